"""The update guard: decides on the device, before an iteration's update, whether to trust its loss and norm.

Both numbers are the same on all ranks, and so is all that follows from them: either all ranks make an update
or none does, nothing waits for the device, and a captured iteration (training/cuda_graphs/) decides anew at
each replay. At the next log row training/faults/anomalies.py decides what the verdict means for the run.

The trap is the state that an iteration changes here: the spike window, which holds the values accepted last.
It is written in place, it is in the checkpoints, and it is part of what a capture's check restores.
"""

from __future__ import annotations

import math

import torch

from training.configuration.dtypes import DTYPES
from training.configuration.keys import TrainConfig

LOSS, NORM, LOSS_SPIKE, NORM_SPIKE = 1, 2, 4, 8  # bits of a verdict; the first two: not finite
SECOND_LOOK = 16  # the bit that says that a repeated micro-step had other results

SPIKE_WINDOW = 128  # accepted iterations
# Least sigma, as a share of the mean: where nothing varies, rounding must not count as a spike.
SIGMA_FLOOR = 1e-3


class UpdateGuard:
    """Judges iterations. Its spike window holds loss and norm of the last SPIKE_WINDOW accepted iterations.

    A spike is skip_spikes standard deviations above the mean of a full spike window. Only above: while the
    loss falls, the mean lags behind it on the safe side. A refused value never enters the window, so a level
    that stays high is refused until max_skips ends the run.
    """

    def __init__(self, config: TrainConfig, device: torch.device):
        self.sigmas, self.size = config.skip_spikes, SPIKE_WINDOW
        # DDP's loss and gradients may travel in bfloat16, which rounds by up to half of its eps
        self.floor = max(SIGMA_FLOOR, torch.finfo(DTYPES[config.reduce_dtype]).eps / 2)
        self.bits = torch.tensor([[LOSS, NORM], [LOSS_SPIKE, NORM_SPIKE]], dtype=torch.float32, device=device)
        self.limits = torch.full((2, 2), math.inf, device=device)  # row 0: of finite values; row 1: of spikes
        self.window = torch.zeros(2, self.size, device=device)  # spike window; row 0: losses, row 1: norms
        self.accepted = torch.zeros(1, dtype=torch.int64, device=device)

    def judge(
        self, loss: torch.Tensor, norm: torch.Tensor, differing: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Takes the mean loss and the global gradient norm, and, after a second look, the number of ranks on
        which it differed: equal on all ranks. Returns the verdict (0, or the sum of the bits above that are
        reasons to skip the update), and 1 if the norm is not finite, else 0. All are 0-d, fp32."""
        values = torch.stack([loss, norm])
        if self.sigmas:
            self._set_limits()
        within = values.abs() < self.limits  # (2, 2); NaN is below no limit, infinity is not below infinity
        found = self.bits.masked_fill(within, 0)
        verdict = found.sum()
        if differing is not None:
            verdict = verdict + SECOND_LOOK * differing.clamp(max=1)
        if self.sigmas:
            self._remember(values, verdict)
        return verdict, found[0, 1].clamp(max=1)

    def _set_limits(self) -> None:
        variance, mean = torch.var_mean(self.window, dim=1)
        sigma = torch.maximum(variance.sqrt(), mean * self.floor)
        torch.add(mean, sigma, alpha=self.sigmas, out=self.limits[1])
        self.limits[1].masked_fill_(self.accepted < self.size, math.inf)

    def _remember(self, values: torch.Tensor, verdict: torch.Tensor) -> None:
        """Replaces the oldest values by accepted ones, else by themselves: the host does not know which."""
        accepted = verdict == 0
        place = self.accepted % self.size
        oldest = self.window.index_select(1, place)
        self.window.index_copy_(1, place, torch.where(accepted, values[:, None], oldest))
        self.accepted.add_(accepted)

    def forget(self) -> None:
        """Empties the spike window: what it holds cannot be compared with what comes."""
        self.accepted.zero_()

    def state(self) -> dict[str, torch.Tensor]:
        """What iterations change. A spike window of another size has another name: a resume begins with an
        empty one."""
        if not self.sigmas:
            return {}
        return {f"spikes_{self.size}.window": self.window, f"spikes_{self.size}.accepted": self.accepted}
