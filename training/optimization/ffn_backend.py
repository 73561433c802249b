"""Gives the feed-forward layers the backend that ffn_backend names, and checks that it can run here.

'quack' is an extra (requirements-quack.txt). Nothing falls back: what is missing is an error before the first
iteration, and so is a kernel whose numbers are wrong.
"""

from __future__ import annotations

from importlib import metadata
from typing import Any

import torch

from common.errors import RunError, UserError
from model import FeedForward, Transformer
from ops import quack
from training.configuration.keys import TrainConfig
from training.hardware.capability import Capability, dotted

PACKAGES = ("quack-kernels", "nvidia-cutlass-dsl")
CUDA = 13  # for which requirements-quack.txt installs the compiler of its kernels
NEEDS = "a Hopper GPU (compute capability 9.0: H100, H200), where it was measured"
INSTALL = "pip install -r requirements-quack.txt"
ROWS = 256  # tokens of the comparison: two tiles of each kernel
TOLERANCE = 5e-3  # of results in bf16, relative: rounding makes 0.0017, a wrong layout about 1


def versions(config: TrainConfig) -> dict[str, str | None]:
    """{package: version} for the record, None for what is not installed; {} if no extra is asked for."""
    if config.ffn_backend != "quack":
        return {}
    found: dict[str, str | None] = dict.fromkeys(PACKAGES)
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            pass
    return found


def describe_ffn_backend(config: TrainConfig) -> dict[str, Any]:
    """A part of the record's startup_info; {} for torch."""
    if config.ffn_backend != "quack":
        return {}
    library, compiler = versions(config).values()
    if library is None:
        text = "quack, which is not installed here"
    else:
        text = f"quack {library} (CUTLASS DSL {compiler}): matmuls with the activation, forward and backward"
    return {"ffn_backend": {"used": "quack", "line": text}}


def require_ffn_backend(config: TrainConfig, here: Capability) -> None:
    """Raises UserError if the backend cannot run on this machine; training/configuration/rules.py has what it
    cannot compute on any."""
    if config.ffn_backend != "quack":
        return
    asked, back = "ffn_backend='quack'", "or set --ffn_backend=torch"
    if not here.quack:
        raise UserError(
            f"{asked} needs {NEEDS}, but {here.name} has {dotted(here.compute)}; set --ffn_backend=torch"
        )
    found = versions(config)
    if missing := [name for name, version in found.items() if version is None]:
        raise UserError(f"{asked} needs {' and '.join(missing)}, not installed here: {INSTALL}, {back}")
    cuda = torch.version.cuda
    if cuda is None or int(cuda.partition(".")[0]) != CUDA:
        raise UserError(
            f"{asked} needs a build of torch for CUDA {CUDA}, but torch {torch.__version__} is for CUDA "
            f"{cuda}; install another build, {back}"
        )


def use_ffn_backend(model: Transformer, config: TrainConfig) -> None:
    """Sets the backend of every feed-forward layer. Raises RunError if its kernels fail or are wrong."""
    if config.ffn_backend == "torch":
        return
    layers = [module for module in model.modules() if isinstance(module, FeedForward)]
    for layer in layers:
        layer.compute = quack.fused_feed_forward
    check_ffn_backend(layers[0])  # all have one shape


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
