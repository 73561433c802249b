"""Delayed scaling: the next fp8 scale of a tensor from the largest magnitudes that it had in the last steps.

A cast needs no pass over the tensor for its amax: it uses the scale of the step before, and finds the amax
for the next one as it reads. Source: TransformerEngine's DelayedScaling (kernel_bulk in
common/recipe/delayed_scaling.cu).
"""

from __future__ import annotations

import torch

from ops.custom_op import custom_op, register_fake

FP32_MAX = torch.finfo(torch.float32).max


def update_all(
    scale: torch.Tensor,
    history: torch.Tensor,
    amax: torch.Tensor,
    mapped_to: torch.Tensor,
    algorithm: str = "max",
) -> None:
    """Writes the scale (n) and the history (L, n), fp32, of n tensors, and sets amax (n) to 0 for the casts
    that come.

    history[0] is for amaxes since the last update, the rest are those of the L - 1 updates before, oldest
    first. amax: what casts found since then, the maximum over the ranks; where it is 0, history[0] counts. A
    tensor whose amax is 0 both ways was not used: its state stays. 'max': the largest of the last L updates,
    this one included, skipping nan; 'most_recent': this one's. The scale maps that to mapped_to (n), the
    largest number of the tensor's dtype. It stays where that is 0, inf or nan, and is at most the largest
    fp32 number. So a scale of 0, which says that there is no history, stays until the first
    finite amax. ValueError: shapes that do not fit."""
    if history.ndim != 2 or not len(history) or scale.shape != history.shape[1:] or amax.shape != scale.shape:
        raise ValueError(
            "an update needs scale (n), history (L, n) with L at least 1, and amax (n), "
            f"got {tuple(scale.shape)}, {tuple(history.shape)}, {tuple(amax.shape)}"
        )
    _update_all(scale, history, amax, mapped_to, algorithm == "max")


@custom_op("nanomfu::update_all_delayed_scaling", mutates_args=("scale", "history", "amax"))
def _update_all(
    scale: torch.Tensor, history: torch.Tensor, amax: torch.Tensor, mapped_to: torch.Tensor, over_all: bool
) -> None:
    """torch.compile does not see into it: on a GPU it divides approximately."""
    latest = torch.where(amax == 0, history[0], amax.float())
    used = latest != 0
    rolled = torch.cat((history[1:], latest[None]))
    largest = rolled.nan_to_num(nan=0.0, posinf=torch.inf).amax(0) if over_all else latest
    usable = used & largest.isfinite() & (largest > 0)
    scale.copy_(torch.where(usable, (mapped_to / largest).clamp(max=FP32_MAX), scale))
    rolled = torch.cat((torch.zeros_like(rolled[:1]), rolled[1:]))  # room for the amaxes that come
    history.copy_(torch.where(used, rolled, history))
    amax.zero_()


@register_fake(_update_all)
def _(scale, history, amax, mapped_to, over_all):
    return None
