"""What a trial measured, and a line of the ladder that tools.tune climbs."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from tools.tune.dimensions import Keys

# Rungs that are no dimensions
AS_IT_IS, FIRST, LAST = "the config as it is", "conservative", "repeated"
# Notes: why an option was taken without a gain, and why it was not
FOR_ROOM, NOT_NEEDED = "for its room", "the room is not needed"
NOISE, TOO_LARGE, NO_MEMORY = "within noise", "does not fit by the estimate", "out of memory"
NO_GAIN = "nothing to gain"


class OutOfTime(Exception):
    """The budget is used up: no further trial is started."""


@dataclass(frozen=True)
class Result:
    """What one run of a setting measured, or why it failed."""

    tokens_per_sec: tuple[float, ...] = ()  # of each row
    memory_gib: float | None = None  # the most that was allocated on a GPU
    mfu_percent: float | None = None
    reason: str | None = None
    out_of_memory: bool = False
    seconds: float = 0.0

    @property
    def speed(self) -> float:
        return statistics.median(self.tokens_per_sec)


@dataclass(frozen=True)
class Step:
    """One line of the ladder: a setting that was tried."""

    rung: str  # the dimension
    option: str
    setting: Keys
    needed_gib: float  # by the estimate, with its reserve
    result: Result | None  # of its first run; None if it was not run
    gain: float | None  # against the best so far, as a share
    kept: bool
    note: str = ""
