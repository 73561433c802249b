"""low_precision='fp8_tensorwise': layers become ops/float8_linear.py's."""

from __future__ import annotations

from collections.abc import Callable

import torch

from common.errors import RunError
from ops.float8 import FORWARD, GRADIENT, describe_sums, quantize
from ops.float8_linear import MULTIPLE, Float8Linear
from ops.linear import Linear
from ops.losses import cross_entropy, cross_entropy_float8
from ops.recipe import EMULATED, NATIVE, Forms, Recipe
from ops.swiglu import swiglu_backward, swiglu_backward_float8

GRADIENT_DTYPES = {"e5m2": torch.float8_e5m2, "e4m3": torch.float8_e4m3fn}  # by fp8_gradients


class Float8(Recipe):
    multiple = MULTIPLE
    settings: tuple[str, ...] = ("fp8_gradients",)
    peak = "fp8"
    needs = native_needs = "fp8 tensor cores (compute capability 8.9 or above: Ada, Hopper, Blackwell)"

    @classmethod
    def support(cls, here):
        """A CPU multiplies the numbers in fp32."""
        return NATIVE if here.fp8 else EMULATED if here.compute is None else None

    @classmethod
    def forms(cls, native):
        both = Forms(operand=1.0, weight=2.0, is_float8=True)
        return both, both

    def __init__(self, config, layers, head, place):
        self.gradient_dtype = GRADIENT_DTYPES[config.fp8_gradients]
        if place.device.type == "cuda":  # where kernels write the numbers
            vocab_size = next((layer.out_features for layer in head.values()), None)
            check_kernels(config.low_precision, lambda: compare_float8(place.device, vocab_size))
        super().__init__(config, layers, head, place)

    def convert(self, layer: Linear, number: int, in_head: bool) -> Linear:
        return Float8Linear(layer, self.gradient_dtype)

    @property
    def executed(self):
        return "native fp8" if self.native else f"fp32, emulates {self.config.low_precision}"

    def describe(self):
        """What adds the weight gradients to their sums. The first call on a GPU compares a small product and
        waits for it (ops/cublaslt.py)."""
        sums = [layer.weight_grad for layer in self.linears.values() if layer.weight_grad is not None]
        return {"fp8_weight_gradients": describe_sums(sums)}


# --- the check at the start ---


def check_kernels(recipe: str, compare: Callable[[], str | None]) -> None:
    """Raises RunError if compare() has a reason against kernels of this GPU, or fails. A compiler that rounds
    or divides otherwise makes other numbers and says nothing: a run would train, with a recipe that is not
    the one it names."""
    try:
        reason = compare()
    except Exception as error:  # whatever fails here would fail in training
        reason = f"a kernel failed: {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    if reason:
        raise RunError(
            f"low_precision={recipe!r} cannot run on this GPU with torch {torch.__version__} and its "
            f"Triton: {reason}; another version of torch brings another Triton, low_precision='none' needs "
            "no such kernel"
        )


def compare_float8(device: torch.device, vocab_size: int | None) -> str | None:
    """Which kernel stores wrong numbers, compared with plain arithmetic; None: none does. They must be right
    to a rounding step: a compiler's fault has made them wrong (ops/triton_kernels/float8.py). vocab_size: of
    a head that computes in fp8; its kernels are compared at this width, so that training need not compile
    them for another. Sync point."""
    generator = torch.Generator(device).manual_seed(0)  # the run's own random numbers stay as they are

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device).to(torch.bfloat16)

    x, dh = random(256, 512), random(256, 256)
    written = {
        "cast to e4m3": (x, quantize(x, FORWARD)),
        "cast to e5m2": (x, quantize(x, GRADIENT)),
        "backward of SwiGLU": (swiglu_backward(x, dh), swiglu_backward_float8(x, dh, GRADIENT)),
    }
    if vocab_size is not None:
        logits, targets = random(256, vocab_size), torch.arange(256, device=device) % vocab_size
        _, gradient = cross_entropy_float8(logits.clone(), targets, GRADIENT)
        cross_entropy(logits, targets, True)  # by now, logits are their gradient
        written["gradient of the logits"] = logits, gradient
    for name, (source, found) in written.items():
        expected = (source.float() / found.inverse_scale).double()
        for matrix, kernel in ((expected, found.rows), (expected.t(), found.columns)):
            step = torch.finfo(kernel.dtype).eps * matrix.abs().clamp(min=torch.finfo(kernel.dtype).tiny)
            if not ((kernel.double() - matrix).abs() <= step).all():
                return f"its kernel '{name}' stores wrong fp8 numbers"
    return None


RECIPE = Float8
