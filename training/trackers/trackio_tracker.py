"""Sends figures to trackio: by default to its database on this machine, in ~/.cache/huggingface/trackio or
the folder that TRACKIO_DIR names."""

from __future__ import annotations

from typing import Any

from training.trackers.tracker import TrackedRun


class TrackioTracker:
    """trackio knows a run by its name, and the last step in its database."""

    def open(self, run: TrackedRun) -> int:
        import trackio  # optional; the rules have checked that it is there

        self.run = trackio.init(
            project=run.project,
            name=run.unique_name,
            config=run.config,
            resume="allow",
            embed=False,
            auto_log_gpu=False,  # the record has clocks, power and memory
            auto_log_cpu=False,
        )
        return self.run._next_step - 1  # it has no other name for the last step in the database

    def send(self, step: int, figures: dict[str, float], texts: dict[str, str]) -> None:
        self.run.log({**figures, **texts}, step=step)

    def close(self, completed: bool, summary: dict[str, Any]) -> None:
        self.run.finish()
