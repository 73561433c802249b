"""Scales the loss of float16.

`dtype` is what the matmuls compute in, `param_dtype` what the optimizer's weights are stored in
(training/strategies/replicated.py copies one to the other). float16 alone needs its loss scaled, because its
smallest gradients would round to zero.
"""

from __future__ import annotations

import torch

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
