"""Measures the seconds that training takes: evaluation, checkpoints and other pauses are left out."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import torch


class Clock:
    """lap() gives the seconds since the last lap, without the pauses in between."""

    def __init__(self, device: torch.device):
        self.device = device
        self.paused_seconds = 0.0  # since the last lap
        self.lap_start = time.perf_counter()

    def lap(self) -> float:
        now = time.perf_counter()
        seconds = now - self.lap_start - self.paused_seconds
        self.lap_start, self.paused_seconds = now, 0.0
        return seconds

    @contextlib.contextmanager
    def paused(self, synchronize: bool = True) -> Iterator[None]:
        """Around what is no iteration. The device is synchronized at both ends, so that neither training
        still in flight nor the pause's own work is counted wrongly; synchronize=False is for work of the host
        alone."""
        if synchronize:
            self._synchronize()
        began = time.perf_counter()
        try:
            yield
            if synchronize:
                self._synchronize()
        finally:
            self.paused_seconds += time.perf_counter() - began

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()  # sync point
