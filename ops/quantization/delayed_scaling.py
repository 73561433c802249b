"""Delayed scaling: the next fp8 scale of a tensor from the largest magnitudes that it had in the last steps.

A cast needs no pass over the tensor for its amax: it uses the scale of the step before, and finds the amax
for the next one as it reads. Source: TransformerEngine's DelayedScaling (kernel_bulk in
common/recipe/delayed_scaling.cu).
"""

from __future__ import annotations

import torch
from torch.library import custom_op

FP32_MAX = torch.finfo(torch.float32).max
ALGORITHMS = ("max", "most_recent")


def update(
    scale: torch.Tensor,
    history: torch.Tensor,
    amax: torch.Tensor,
    dtype: torch.dtype,
    algorithm: str = "max",
    margin: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The state after an update: the new scale (n) and the new history (L, n), fp32.

    scale (n) and history (L, n), fp32, are the state of n tensors; history[0] is for amaxes since the last
    update, the rest are those of the L - 1 updates before, oldest first. amax (n): what casts found since
    then, the maximum over the ranks; where it is 0, history[0] counts. A tensor whose amax is 0 both ways was
    not used: its state stays. 'max': the largest of the last L updates, this one included, skipping nan;
    'most_recent': this one's. The scale maps that to the largest number of dtype (E4M3 or E5M2) over
    2^margin. It stays where that is 0, inf or nan, and is at most the largest fp32 number.
    ValueError: another algorithm, or shapes that do not fit."""
    _check(scale, history, amax, algorithm)
    return _update(scale, history, amax, torch.finfo(dtype).max * 2.0**-margin, algorithm == "max")


def _check(scale: torch.Tensor, history: torch.Tensor, amax: torch.Tensor, algorithm: str) -> None:
    if algorithm not in ALGORITHMS:
        raise ValueError(f"amax algorithm {algorithm!r} does not exist; it is one of {', '.join(ALGORITHMS)}")
    if history.ndim != 2 or not len(history) or scale.shape != history.shape[1:] or amax.shape != scale.shape:
        raise ValueError(
            "an update needs scale (n), history (L, n) with L at least 1, and amax (n), "
            f"got {tuple(scale.shape)}, {tuple(history.shape)}, {tuple(amax.shape)}"
        )


@custom_op("nanomfu::update_delayed_scaling", mutates_args=())
def _update(
    scale: torch.Tensor, history: torch.Tensor, amax: torch.Tensor, mapped_to: float, over_all: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """torch.compile does not see into it: on a GPU it divides approximately."""
    return _next_state(scale, history, amax, torch.full_like(scale, mapped_to), over_all)


@_update.register_fake
def _(scale, history, amax, mapped_to, over_all):
    return torch.empty_like(scale), torch.empty_like(history)


def update_all(
    scale: torch.Tensor,
    history: torch.Tensor,
    amax: torch.Tensor,
    mapped_to: torch.Tensor,
    algorithm: str = "max",
) -> None:
    """update() in place, for tensors of different dtypes: mapped_to (n), fp32, has what each scale maps the
    largest magnitude to (the largest number of its dtype, over 2^margin). Writes scale and history, and sets
    amax to 0 for the casts that come. A scale of 0, which says that there is no history
    (ops/delayed_float8.py), stays until the first finite amax. ValueError: as update()."""
    _check(scale, history, amax, algorithm)
    _update_all(scale, history, amax, mapped_to, algorithm == "max")


@custom_op("nanomfu::update_all_delayed_scaling", mutates_args=("scale", "history", "amax"))
def _update_all(
    scale: torch.Tensor, history: torch.Tensor, amax: torch.Tensor, mapped_to: torch.Tensor, over_all: bool
) -> None:
    new_scale, new_history = _next_state(scale, history, amax, mapped_to, over_all)
    scale.copy_(new_scale)
    history.copy_(new_history)
    amax.zero_()


@_update_all.register_fake
def _(scale, history, amax, mapped_to, over_all):
    return None


def _next_state(
    scale: torch.Tensor, history: torch.Tensor, amax: torch.Tensor, mapped_to: torch.Tensor, over_all: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """mapped_to: (n)."""
    latest = torch.where(amax == 0, history[0], amax.float())
    used = latest != 0
    rolled = torch.cat((history[1:], latest[None]))
    largest = rolled.nan_to_num(nan=0.0, posinf=torch.inf).amax(0) if over_all else latest
    usable = used & largest.isfinite() & (largest > 0)
    new_scale = torch.where(usable, (mapped_to / largest).clamp(max=FP32_MAX), scale)
    rolled = torch.cat((torch.zeros_like(rolled[:1]), rolled[1:]))  # room for the amaxes that come
    return new_scale, torch.where(used, rolled, history)
