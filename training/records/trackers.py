"""Sends log rows to an experiment tracker: Weights & Biases."""

from __future__ import annotations

from typing import Any

from training.configuration.keys import TrainConfig
from training.process.redaction import redact, redact_all


class WandbTracker:
    """Sends the numbers of log rows and evaluations, by iteration. Rank 0 only."""

    def __init__(self, config: TrainConfig, run_name: str):
        import wandb  # optional; the configuration has checked that it is there

        self.wandb = wandb
        name = config.wandb_run_name or run_name
        settings = redact_all(config.to_dict())
        wandb.init(project=redact(config.wandb_project), name=redact(name), config=settings)

    def add_row(self, row: dict[str, Any]) -> None:
        self.wandb.log(numbers(row), step=row["iter"])

    def add_evaluation(self, iteration: int, losses: dict[str, Any]) -> None:
        self.wandb.log({"eval/train_loss": losses["train"], "eval/val_loss": losses["val"]}, step=iteration)

    def close(self, status: str) -> None:
        self.wandb.finish(exit_code=0 if status == "completed" else 1)


def numbers(row: dict[str, Any], prefix: str = "") -> dict[str, float]:
    """The numbers of a row, and those of the dictionaries in it as 'mfu/mfu_percent'."""
    found: dict[str, float] = {}
    for name, value in row.items():
        if isinstance(value, dict):
            found |= numbers(value, f"{prefix}{name}/")
        elif isinstance(value, (int, float)):
            found[f"{prefix}{name}"] = value
    return found
