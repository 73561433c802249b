"""The runs that a law is fitted to: the parameters, tokens and last validation loss of each record."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import UserError
from common.text import one_line
from plots.run_record import Run, evaluations, load_run

LARGEST_LOSS = 100.0  # nats per token; that of a random choice among 16 million ids is 17


@dataclass(frozen=True)
class Point:
    name: str
    data: str  # dataset and size of the vocabulary
    parameters: int  # all of them, embeddings included
    tokens: float
    loss: float  # nats per token, of the validation split
    warning: str | None = None


def read_points(paths: list[Path]) -> list[Point]:
    """One point per run. Raises UserError, which names the record."""
    runs = [load_run(path) for path in paths]
    points = [_point(run) for run in _newest(runs)]
    for point in points:
        if point.data != points[0].data:
            raise UserError(
                f"--fit needs runs of one dataset and vocabulary: {points[0].name} is of {points[0].data}, "
                f"and {point.name} of {point.data}"
            )
    return points


def _newest(runs: list[Run]) -> list[Run]:
    """Without the records of earlier attempts: the newest one is the whole run."""
    earlier = {
        (run.path.parent, attempt.get("run_name"))
        for run in runs
        for attempt in _listed(run.record.get("attempts"))[:-1]
    }
    return [run for run in runs if (run.path.parent, run.record.get("run_name")) not in earlier]


def _listed(value: Any) -> list[dict]:
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


def _point(run: Run) -> Point:
    iterations, losses = evaluations(run, "val_loss")
    if not len(losses):
        raise UserError(f"{run.path} has no validation loss; train it with an --eval_interval above 0")
    iteration, loss = float(iterations[-1]), float(losses[-1])
    if not 0 < loss < LARGEST_LOSS:
        raise UserError(
            f"{run.path} ends with a validation loss of {loss:g}, which is none of a language model"
        )
    model = run.startup.get("model")
    parameters = model.get("total_params") if isinstance(model, dict) else None
    if not isinstance(parameters, int) or isinstance(parameters, bool) or not 0 < parameters < 1e15:
        raise UserError(
            f"{run.path} does not say how many parameters the model has (startup_info.model.total_params): "
            "it is an older log, or of another program"
        )
    if run.tokens_per_iter is None or iteration <= 0:
        raise UserError(f"{run.path} does not say after how many tokens its last validation loss is")
    if run.startup.get("pretrained"):
        raise UserError(
            f"{run.path} began with trained weights: its tokens are not all that the model has seen"
        )
    name = one_line(f"{run.path.parent.name}/{run.name}")
    data = one_line(f"{run.config.get('dataset')}, vocabulary of {run.config.get('vocab_size')}")
    return Point(
        name, data, parameters, iteration * run.tokens_per_iter, loss, _warning(run, iteration, name)
    )


def _warning(run: Run, iteration: float, name: str) -> str | None:
    """A loss before the end of the decay is higher than that of a run planned for so many tokens."""
    end = run.config.get("lr_decay_iters") or run.config.get("max_iters")
    if isinstance(end, (int, float)) and iteration < end:
        return (
            f"{name}: its last validation loss is of iteration {iteration:,.0f}, but the rate decays "
            f"until {end:,}: a run planned for so few tokens would have a lower loss"
        )
    return None
