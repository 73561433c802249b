"""What the code asks of a backend of the feed-forward layers. FfnBackend itself is torch's: the layers stay
as model.py has them. A subclass is another one, and its module names it as FFN_BACKEND
(training/configuration/choices.py)."""

from __future__ import annotations

from typing import Any

from torch import nn


class FfnBackend:
    keeps_input = True  # of down, for the backward; else it is computed again

    @classmethod
    def conflicts(cls, config: Any, model: Any) -> dict[str, bool]:
        """{what a user is told, after the backend's name: whether the settings are so}, on any machine."""
        return {}

    @classmethod
    def problem(cls, here: Any) -> str | None:
        """Why a device of this Capability cannot run it, after the device's name."""

    @classmethod
    def require(cls, here: Any) -> None:
        """Raises UserError if it cannot run on this machine."""

    @classmethod
    def versions(cls) -> dict[str, str | None]:
        """{package: version} for the record, None for what is not installed."""
        return {}

    @classmethod
    def describe(cls) -> str | None:
        """A line of the start-up report."""

    @classmethod
    def use(cls, model: nn.Module) -> None:
        """Sets `compute` of every feed-forward layer. Raises RunError if its kernels fail or are wrong."""


FFN_BACKEND = FfnBackend
