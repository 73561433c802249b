"""Says what every tracker does and what it must know of a run. Each of the three has a file of its own."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

NOTHING = -1  # the last step of a tracker that has none


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker must know of a run before it gets figures. All text is without secrets."""

    id: str  # the same in all attempts
    name: str
    project: str
    folder: Path  # of the run record
    config: dict[str, Any]  # the settings, and what is constant in a run: hardware, peaks, versions, sizes

    @property
    def unique_name(self) -> str:
        """For trackers that know a run by its name alone."""
        return f"{self.name}-{self.id}"

    def own_folder(self, name: str) -> Path:
        """A folder beside the record. Raises ValueError if it is a link: nothing is written through one."""
        folder = self.folder / name
        if folder.is_symlink():
            raise ValueError(f"{folder} is a link; move it away")
        return folder


class Tracker(Protocol):
    """Every method may wait or raise: a thread of its own calls them (training/trackers/sender.py)."""

    def open(self, run: TrackedRun) -> int:
        """Begins the run, or continues it. Returns the last step of which the tracker has all figures, or
        NOTHING: the files of the tracker decide what is still to be sent, whatever ended the last attempt."""

    def send(self, step: int, figures: dict[str, float], texts: dict[str, str]) -> None:
        """All that belongs to a step. Called once for each, with rising steps."""

    def close(self, completed: bool, summary: dict[str, Any]) -> None:
        """Writes out what was sent. summary: the record's."""
