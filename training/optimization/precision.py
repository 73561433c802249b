"""Scales the loss of float16, and chooses the layers that compute in fp8.

`dtype` is what the matmuls compute in, `param_dtype` what the optimizer's weights are stored in
(training/strategies/replicated.py copies one to the other). float16 alone needs its loss scaled, because its
smallest gradients would round to zero.
"""

from __future__ import annotations

import torch
import torch.nn as nn

from common.errors import RunError, UserError
from ops import float8
from ops.cross_entropy import cross_entropy, cross_entropy_float8
from ops.float8 import FORWARD, GRADIENT, quantize
from ops.linear import Linear
from ops.swiglu import swiglu_backward, swiglu_backward_float8
from training.configuration.keys import TrainConfig

INITIAL_SCALE = 65536.0  # the values of torch.amp.GradScaler
GROWTH, BACKOFF, GROWTH_INTERVAL = 2.0, 0.5, 2000


class LossScale:
    """Dynamic loss scale (Micikevicius et al. 2018, sec. 3.2) that never waits for the device.

    torch.amp.GradScaler looks at each rank's own gradients; this one is told by the global gradient norm, so
    that sharded ranks agree. With enabled=False the scale is 1 and stays 1.
    """

    def __init__(self, enabled: bool, device: torch.device):
        self.enabled = enabled
        self.scale = torch.tensor(INITIAL_SCALE if enabled else 1.0, device=device)
        self.growth_tracker = torch.zeros((), dtype=torch.int32, device=device)

    def update(self, found_inf: torch.Tensor) -> None:
        """found_inf: 1.0 if this iteration's gradients overflowed, else 0.0."""
        if self.enabled:
            torch._amp_update_scale_(
                self.scale, self.growth_tracker, found_inf, GROWTH, BACKOFF, GROWTH_INTERVAL
            )

    def state(self) -> dict[str, torch.Tensor]:
        return {"scale": self.scale, "growth_tracker": self.growth_tracker} if self.enabled else {}


# --- low precision ---


def use_low_precision(model: nn.Module, config: TrainConfig) -> None:
    """Gives the Linear layers in low_precision_scope their fp8 weights; refresh_weights fills them.
    Embeddings and norms never have any. Raises UserError for a width or a number of tokens that an fp8 matmul
    cannot have, and RunError for a GPU on which a kernel stores wrong numbers."""
    if config.low_precision == "none":
        return
    _check_tokens(config)
    parts = ("blocks.", "head.") if config.low_precision_scope == "layers_and_head" else ("blocks.",)
    for name, module in model.named_modules():
        if not isinstance(module, Linear) or not name.startswith(parts):
            continue
        assert not module.weight.is_meta, f"{name}: init_weights comes first"
        if any(width % float8.ALIGNMENT for width in module.weight.shape):
            raise UserError(
                f"low_precision={config.low_precision!r} needs matrices whose sides are multiples of "
                f"{float8.ALIGNMENT}, but {name} is {tuple(module.weight.shape)}; change n_embd, "
                "head_dim, d_ff or vocab_size, or set low_precision='none'"
            )
        module.float8 = float8.empty_like(module.weight)
    device = next(model.parameters()).device
    if device.type == "cuda":  # where kernels write fp8
        check_low_precision(device)


def _check_tokens(config: TrainConfig) -> None:
    """Weight gradients sum over the tokens of a micro-batch, the head's over those of a part of it."""
    tokens, chunks = config.micro_batch * config.block_size, config.logit_parts
    if config.low_precision_scope != "layers_and_head":
        chunks = 1
    if tokens % (chunks * float8.ALIGNMENT):
        divided = f", in {chunks} loss_chunks" if chunks > 1 else ""
        raise UserError(
            f"low_precision={config.low_precision!r} needs a multiple of {float8.ALIGNMENT} tokens, "
            f"but batch_size * block_size is {tokens:,}{divided}; choose another block_size or batch_size"
        )


def check_low_precision(device: torch.device) -> None:
    """Compares what the kernels write in fp8 with plain arithmetic, number by number, to a rounding step: a
    compiler's fault has made such kernels store wrong ones (ops/triton_kernels/float8.py). Raises RunError.
    Sync point."""
    generator = torch.Generator(device).manual_seed(0)  # the run's own random numbers stay as they are
    x, dh, logits = (
        torch.randn(256, width, generator=generator, device=device).to(torch.bfloat16)
        for width in (512, 256, 512)
    )
    targets = torch.arange(256, device=device)
    _, gradient = cross_entropy_float8(logits.clone(), targets)
    cross_entropy(logits, targets, True)  # by now, logits are their gradient
    written = {
        "cast to e4m3": (x, quantize(x, FORWARD)),
        "cast to e5m2": (x, quantize(x, GRADIENT)),
        "backward of SwiGLU": (swiglu_backward(x, dh), swiglu_backward_float8(x, dh)),
        "gradient of the logits": (logits, gradient),
    }
    for name, (source, found) in written.items():
        expected = (source.float() / found.inverse_scale).double()
        for matrix, kernel in ((expected, found.values), (expected.t(), found.transposed)):
            step = torch.finfo(kernel.dtype).eps * matrix.abs().clamp(min=torch.finfo(kernel.dtype).tiny)
            if not ((kernel.double() - matrix).abs() <= step).all():
                raise RunError(
                    f"the kernel of the {name} stores wrong fp8 numbers on this GPU, with Triton's compiler "
                    "as it is installed; another version of torch brings another one, low_precision='none' "
                    "needs none"
                )


def describe_low_precision(model: nn.Module) -> dict[str, str]:
    """For the start-up report of a model with fp8 matmuls: what adds its weight gradients to their sums. The
    first call on a GPU compares a small product and waits for it (ops/cublaslt.py)."""
    layers = [m for m in model.modules() if isinstance(m, Linear) and m.float8 is not None]
    sums = [layer.weight_grad for layer in layers if layer.weight_grad is not None]
    return {"fp8_weight_gradients": float8.describe_sums(sums)} if layers else {}
