"""The update guard: whether an iteration's loss and gradient norm can be trusted, decided before its update,
on the device.

Both numbers are the same on all ranks, and so is all that follows from them: no rank makes an update that
another leaves out, nobody waits for the device, and a captured iteration (training/cuda_graphs/) decides anew
at each replay. training/faults/anomalies.py says, a log row later, what the decision means for the run.

The trap is what an iteration changes here: the window of accepted values. It is written in place, it is in
the checkpoints, and it is part of what a capture's check puts back.
"""

from __future__ import annotations

import math

import torch

from training.configuration.keys import TrainConfig

LOSS, NORM, LOSS_SPIKE, NORM_SPIKE = 1, 2, 4, 8  # bits of a verdict; the first two: not finite

SIGMA_FLOOR = 1e-3  # of the mean: where nothing varies, rounding must not be a spike


class UpdateGuard:
    """Judges iterations, and remembers the loss and norm of the last spike_window that were accepted.

    A spike is skip_spikes standard deviations above the mean of a full window. Only above: as the loss falls,
    the mean lags behind it on the safe side. A refused value never enters, so a level that stays high is
    refused until max_skips ends the run.
    """

    def __init__(self, config: TrainConfig, device: torch.device):
        self.sigmas, self.size = config.skip_spikes, config.spike_window
        self.bits = torch.tensor([[LOSS, NORM], [LOSS_SPIKE, NORM_SPIKE]], dtype=torch.float32, device=device)
        self.limits = torch.full((2, 2), math.inf, device=device)  # of finite values, of unsuspicious ones
        self.window = torch.zeros(2, self.size, device=device)  # of losses, of norms
        self.accepted = torch.zeros(1, dtype=torch.int64, device=device)

    def judge(self, loss: torch.Tensor, norm: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean loss and global gradient norm, equal on all ranks -> the verdict: 0, or the sum of the bits
        above that are reasons not to make the update; and 1 if the norm is not finite, else 0. 0-d, fp32."""
        values = torch.stack([loss, norm])
        if self.sigmas:
            self._set_limits()
        within = values.abs() < self.limits  # (2, 2); NaN is within nothing, infinity not within infinity
        found = self.bits.masked_fill(within, 0)
        verdict = found.sum()
        if self.sigmas:
            self._remember(values, verdict)
        return verdict, found[0, 1].clamp(max=1)

    def _set_limits(self) -> None:
        variance, mean = torch.var_mean(self.window, dim=1)
        sigma = torch.maximum(variance.sqrt(), mean * SIGMA_FLOOR)
        torch.add(mean, sigma, alpha=self.sigmas, out=self.limits[1])
        self.limits[1].masked_fill_(self.accepted < self.size, math.inf)

    def _remember(self, values: torch.Tensor, verdict: torch.Tensor) -> None:
        """The oldest values give way to accepted ones, else to themselves: the host does not know which."""
        accepted = verdict == 0
        place = self.accepted % self.size
        oldest = self.window.index_select(1, place)
        self.window.index_copy_(1, place, torch.where(accepted, values[:, None], oldest))
        self.accepted.add_(accepted)

    def state(self) -> dict[str, torch.Tensor]:
        """What iterations change. A window of another size is another one: a resume begins it anew."""
        if not self.sigmas:
            return {}
        return {f"spikes_{self.size}.window": self.window, f"spikes_{self.size}.accepted": self.accepted}
