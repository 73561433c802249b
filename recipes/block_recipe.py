"""What the recipes mxfp8 and nvfp4 have in common: emulated in bf16 everywhere, and on GPUs whose tensor
cores multiply blocks with scales natively, after a check.

Sources: OCP Microscaling v1.0 and arXiv 2506.08027 (MXFP8); arXiv 2509.25149 (NVFP4).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from ops.float8_recipe import check_kernels
from ops.linear import Linear
from ops.quantization.random_bits import random_key
from ops.recipe import CHECKED, EMULATED, Forms, Recipe
from recipes.block_linear import BlockLinear
from recipes.block_scaled_check import find_difference

log = logging.getLogger("nanomfu")

SHAPE = (128, 1152)  # of every kernel, a row has several programs, and the last one is not full


class BlockRecipe(Recipe):
    needs = "bfloat16 (compute capability 8.0 or above), in which it is emulated"
    native_needs = "compute capability 10.x (B200, B300, GB200, GB300) and to pass the check at the start"
    emulated: type[BlockLinear]
    scaled: type[BlockLinear]  # multiplies scaled blocks
    bytes_scaled: float  # of a number there, with its scale
    weight_bytes: float  # of an emulated weight's two forms, or one
    scales_head: bool  # whether the head is multiplied so, too
    # of x and a key: {kernel: what it makes of x, one form or two}
    casts: Callable[[torch.Tensor, torch.Tensor], dict[str, Any]]

    @classmethod
    def support(cls, here):
        # torch.nn.functional.scaled_mm, whose kernels for these formats are cuBLAS's, for 10.x
        scales_blocks = here.compute is not None and here.compute[0] == 10
        return CHECKED if scales_blocks else EMULATED if here.bf16 else None

    @classmethod
    def forms(cls, native):
        emulated = Forms(operand=2.0, weight=cls.weight_bytes)
        scaled = Forms(operand=cls.bytes_scaled, weight=2 * cls.bytes_scaled, adds=False)
        if not native:
            return emulated, emulated
        return scaled, scaled if cls.scales_head else emulated

    def __init__(self, config, layers, head, place):
        self.check_failed: str | None = None
        if place.device.type == "cuda":  # where kernels write the numbers
            check_kernels(config.low_precision, lambda: self.compare_casts(place.device))
        may_scale = self.support(place.here) == CHECKED
        if may_scale:
            self.check_failed = self._check(config, layers, head if self.scales_head else {}, place)
        self.multiplies_blocks = may_scale and self.check_failed is None
        super().__init__(config, layers, head, place)
        self.native, self.bf16_head = self.multiplies_blocks, bool(head) and not self.scales_head

    def convert(self, layer: Linear, number: int, in_head: bool) -> Linear:
        scaled = self.multiplies_blocks and (self.scales_head or not in_head)
        return (self.scaled if scaled else self.emulated)(layer, self.key(number))

    def key(self, number: int) -> torch.Tensor | None:
        """Of a layer's random bits."""
        return None

    def _check(self, config, layers, head, place) -> str | None:
        """Why these layers must be emulated, on every rank if on one: a line says so. All ranks. Sync
        point."""
        key = random_key(config.seed, device=place.device)
        cases = {((one.out_features, one.in_features), place.tokens) for one in layers.values()}
        cases |= {((one.out_features, one.in_features), place.head_tokens) for one in head.values()}
        found = (find_difference(self.scaled, self.emulated, *case, key) for case in sorted(cases))
        reason = place.first_reason(found)
        if reason:
            log.warning(
                f"\nwarning: low_precision={config.low_precision!r} is emulated on every GPU of this run, "
                f"slower than bf16: the check at the start failed on {reason} ({place.here.name}, torch "
                f"{torch.__version__}, CUDA {torch.version.cuda})"
            )
        return reason

    @property
    def executed(self):
        name = self.config.low_precision
        if self.native:
            return f"native {name}" + ", but the head: bf16" * self.bf16_head
        why = f" (check failed: {self.check_failed})" if self.check_failed else ""
        return f"bf16, emulates {name}{why}"

    # --- the emulation's kernels ---

    @classmethod
    def compare_casts(cls, device: torch.device) -> str | None:
        """Which kernel writes other numbers than its plain form on the CPU, which is what tests compare with
        TransformerEngine and torchao; None: none does. Sync point."""
        generator = torch.Generator().manual_seed(0)  # the run's own random numbers stay as they are
        x = torch.randn(SHAPE, generator=generator) * 10.0 ** torch.linspace(-4, 2, SHAPE[1])  # E4M3 scales
        x[:32, :32] = 0.0  # blocks of zeros
        x, key = x.bfloat16(), random_key(2**40 + 7, iteration=20, micro_step=3, tensor=17)
        plain, written = cls.casts(x, key), cls.casts(x.to(device), key.to(device))
        for name, tensors in written.items():
            for form, (found, expected) in enumerate(zip(_both(tensors), _both(plain[name]), strict=True)):
                if different := int((found.cpu() != expected).sum()):
                    along = f" along {('rows', 'columns')[form]}" if isinstance(tensors, tuple) else ""
                    of_all = f"{different:,} of {expected.numel():,}"
                    return f"its kernel '{name}' writes other numbers{along} than the plain form ({of_all})"
        return None


def _both(tensors: torch.Tensor | tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    return tensors if isinstance(tensors, tuple) else (tensors,)
