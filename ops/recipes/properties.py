"""What the code asks of a recipe of low precision. docs/low_precision.md has the numbers, blocks and scales.

Sources: NVIDIA TransformerEngine 2.20, common/recipe/__init__.py; Micikevicius et al. 2022 (fp8); OCP
Microscaling v1.0 and arXiv 2506.08027 (MXFP8); arXiv 2509.25149 (NVFP4).
"""

from __future__ import annotations

# tokens and both widths of a matrix must be multiples of it: for torch's fp8 matmul, or of a block
ALIGNMENTS = {"fp8_tensorwise": 16, "fp8_delayed": 16, "mxfp8": 32, "nvfp4": 16}
ONE_SCALE = ("fp8_tensorwise", "fp8_delayed")  # for a whole tensor: fp8_gradients chooses gradients' numbers
DELAYED = ("fp8_delayed",)  # scales come from the amaxes of earlier micro-steps
EMULATED = ("mxfp8", "nvfp4")  # operands are bf16 (emulated.py) but where tensor cores take blocks
BLOCK_SCALED_BYTES = {"mxfp8": 1 + 1 / 32, "nvfp4": 1 / 2 + 1 / 16}  # of a number there, with its scale
