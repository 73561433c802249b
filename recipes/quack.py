"""ffn_backend='quack': the feed-forward layers compute with quack_matmuls.py.

It is an extra (requirements/quack.txt). Nothing falls back: what is missing is an error before the first
iteration, and so is a kernel whose numbers are wrong.
"""

from __future__ import annotations

from importlib import metadata

import torch

from common.errors import RunError, UserError
from model import FeedForward
from ops.ffn_backend import FfnBackend
from recipes import quack_matmuls as quack

PACKAGES = ("quack-kernels", "nvidia-cutlass-dsl")
# Its sources have kernels for 8.x, 10.x and 12.x, too, which were not measured.
HOPPER = (9, 0)
CUDA = 13  # for which requirements/quack.txt installs the compiler of its kernels
NEEDS = "a Hopper GPU (compute capability 9.0: H100, H200), where it was measured"
INSTALL = "pip install -r requirements/quack.txt"
ROWS = 256  # tokens of the comparison: two tiles of each kernel
TOLERANCE = 5e-3  # of results in bf16, relative: rounding makes 0.0017, a wrong layout about 1
ACTIVATIONS = (("swiglu", "silu"), ("mlp", "gelu"))  # ffn_type, activation
ALIGNMENT = 8  # columns of bf16: its kernels load and store rows at addresses of 16 bytes


class Quack(FfnBackend):
    keeps_input = False

    @classmethod
    def conflicts(cls, config, model):
        pair = (model.ffn_type, model.activation)
        widths = {"n_embd": model.n_embd, "d_ff": model.d_ff}
        return {
            f"computes in bfloat16, but dtype={config.dtype!r}; set dtype='bfloat16'": config.dtype
            != "bfloat16",
            f"computes the layers in bfloat16, but low_precision={config.low_precision!r} does not; set "
            "low_precision='none'": config.low_precision != "none",
            "has kernels for ffn_type='swiglu' with activation='silu' and for 'mlp' with 'gelu', but this "
            f"model has {pair[0]!r} with {pair[1]!r}; set one of these pairs": pair not in ACTIVATIONS,
            "adds no bias in the feed-forward layer, but bias=True; set bias=False": model.bias,
            **{
                f"needs widths that are multiples of {ALIGNMENT}, but {name}={width}; change {name}": bool(
                    width % ALIGNMENT
                )
                for name, width in widths.items()
            },
        }

    @classmethod
    def problem(cls, here):
        return None if here.compute == HOPPER else "is no Hopper GPU"

    @classmethod
    def require(cls, here):
        asked, back = "ffn_backend='quack'", "or set --ffn_backend=torch"
        if cls.problem(here):
            has = "none" if here.compute is None else "{}.{}".format(*here.compute)
            raise UserError(f"{asked} needs {NEEDS}, but {here.name} has {has}; set --ffn_backend=torch")
        if missing := [name for name, version in cls.versions().items() if version is None]:
            raise UserError(f"{asked} needs {' and '.join(missing)}, not installed here: {INSTALL}, {back}")
        cuda = torch.version.cuda
        if cuda is None or int(cuda.partition(".")[0]) != CUDA:
            raise UserError(
                f"{asked} needs a build of torch for CUDA {CUDA}, but torch {torch.__version__} is for CUDA "
                f"{cuda}; install another build, {back}"
            )

    @classmethod
    def versions(cls):
        found: dict[str, str | None] = dict.fromkeys(PACKAGES)
        for name in PACKAGES:
            try:
                found[name] = metadata.version(name)
            except metadata.PackageNotFoundError:
                pass
        return found

    @classmethod
    def describe(cls):
        library, compiler = cls.versions().values()
        if library is None:
            return "quack, which is not installed here"
        return f"quack {library} (CUTLASS DSL {compiler}): matmuls with the activation, forward and backward"

    @classmethod
    def use(cls, model):
        layers = [module for module in model.modules() if isinstance(module, FeedForward)]
        for layer in layers:
            layer.compute = quack.fused_feed_forward
        check_ffn_backend(layers[0])  # all have one shape


FFN_BACKEND = Quack


# --- the comparison ---


def check_ffn_backend(layer: FeedForward) -> None:
    """Compares both operations with plain arithmetic, on a few tokens and random weights of this layer's
    shape. Compiles their kernels, too. Raises RunError. Sync point."""
    device, activation = layer.up.weight.device, quack.name_of(layer.activation)
    generator = torch.Generator(device).manual_seed(0)  # the run's own random numbers stay as they are

    def randn(rows: int, columns: int, scale: float = 1.0) -> torch.Tensor:
        numbers = torch.randn(rows, columns, generator=generator, device=device)
        return numbers.mul_(scale).to(torch.bfloat16)

    (N, C), F = layer.up.weight.shape, layer.down.weight.shape[1]
    x, dy, preactivation = randn(ROWS, C), randn(ROWS, C), randn(ROWS, N)
    up, down = randn(N, C, C**-0.5), randn(C, F, C**-0.5)
    forward, backward = (x, up, activation), (dy, down, preactivation, activation)
    try:
        found = *quack.activated_matmul(*forward), *quack.activation_backward_matmul(*backward)
        expected = *quack.plain_forward(*forward), *quack.plain_backward(*backward)
        errors = [_relative_error(*pair) for pair in zip(found, expected, strict=True)]
    except Exception as error:  # of its import, its compiler or a launch: they have no common class
        first = (str(error).strip().splitlines() or [""])[0]
        raise RunError(
            f"the kernels of ffn_backend='quack' do not run here: {type(error).__name__}: {first}; repeat "
            f"{INSTALL}, or set --ffn_backend=torch"
        ) from error
    names = ("the output of up", "the activation", "the gradient of up's output", "the activation again")
    for name, off in zip(names, errors, strict=True):
        if not off < TOLERANCE:  # also NaN
            raise RunError(
                f"the kernel of ffn_backend='quack' for {name} computes wrong numbers on this GPU: they are "
                f"{off:.2g} off plain arithmetic, where rounding explains {TOLERANCE}; "
                "set --ffn_backend=torch"
            )


def _relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    difference = (found.float() - expected.float()).norm()
    return (difference / expected.float().norm()).item()
