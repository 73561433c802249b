"""The run record (JSON) and the log beside it. Both are rank 0's. The JSON is replaced atomically, so it
parses at every moment of the run, also after kill -9."""

from __future__ import annotations

import json
import logging
import math
import os
import sys
from datetime import datetime
from pathlib import Path

from tqdm import tqdm

from training.config import UserError

log = logging.getLogger("nanomfu")


class _Console(logging.Handler):
    """Prints above the progress bar instead of through it."""

    def emit(self, entry: logging.LogRecord) -> None:
        tqdm.write(self.format(entry), file=sys.stdout)
        sys.stdout.flush()


def start_logging(log_path: Path | None, console: bool = True) -> None:
    """Sends the 'nanomfu' logger to the console and to log_path. Without either, only the handlers go."""
    log.handlers.clear()
    log.propagate = False
    log.setLevel(logging.INFO)
    log.addHandler(_Console() if console else logging.NullHandler())
    if log_path is not None:
        log.addHandler(logging.FileHandler(log_path, encoding="utf-8"))


def write_to_log_file(message: str) -> None:
    """A message that the console got in another way, such as the error that ended the run."""
    for handler in log.handlers:
        if isinstance(handler, logging.FileHandler):
            handler.emit(logging.makeLogRecord({"msg": message}))


def check_writable(out_dir: Path) -> None:
    """Makes out_dir and writes a byte there. Raises UserError. Rank 0 only, before anything expensive."""
    probe = out_dir / f".write_test_{os.getpid()}"
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
        probe.write_text("x")
        probe.unlink()
    except OSError as error:
        raise UserError(
            f"out_dir={str(out_dir)!r} cannot be written: {error}; choose another --out_dir"
        ) from None


def new_run_path(out_dir: Path) -> Path:
    """out_dir/run_YYYYMMDD_HHMMSS.json, a name that no earlier run has."""
    name = f"run_{datetime.now():%Y%m%d_%H%M%S}"
    candidates = [out_dir / f"{name}.json"] + [out_dir / f"{name}_{i}.json" for i in range(2, 100)]
    return next(path for path in candidates if not path.exists() and not path.with_suffix(".log").exists())


class RunRecord:
    """Everything a run leaves behind to reproduce and plot its numbers."""

    def __init__(self, path: Path, config: dict, startup_info: dict, enabled: bool):
        self.path, self.enabled = path, enabled
        self.content = {
            "run_name": path.stem,
            "start_time": _now(),
            "end_time": None,
            "status": "running",
            "config": config,
            "startup_info": startup_info,
            "training_iterations": [],
            "training_progress": [],
            "eval_steps": [],
            "checkpoints": [],
            "summary": None,
        }

    def add_iteration(self, row: dict) -> None:
        mfu, memory = row["mfu"], row["memory"]
        self.content["training_iterations"].append(row)
        self.content["training_progress"].append(
            {
                "iter": row["iter"],
                "loss": row["loss"],
                "mfu": mfu and mfu["mfu"],
                "tokens_per_sec": row["tokens_per_sec"],
                "memory_allocated_gb": memory and memory["allocated_gb"],
                "dt_ms": row["time_ms"],
            }
        )

    def add_evaluation(self, iteration: int, losses: dict, lr: float) -> None:
        step = {"iter": iteration, "train_loss": losses["train"], "val_loss": losses["val"], "lr": lr}
        if "sources" in losses:  # of a mixture
            step["sources"] = losses["sources"]
        self.content["eval_steps"].append(step)

    def add_checkpoint(self, iteration: int, val_loss: float | None, path: Path) -> None:
        self.content["checkpoints"].append({"iter": iteration, "val_loss": val_loss, "path": str(path)})

    def finish(self, status: str, summary: dict) -> None:
        self.content.update(status=status, end_time=_now(), summary=summary)
        self.save()

    def save(self) -> None:
        if not self.enabled:
            return
        temporary = self.path.with_suffix(".json.tmp")
        try:
            temporary.write_text(json.dumps(_finite(self.content), indent=1, allow_nan=False))
            os.replace(temporary, self.path)
        except OSError as error:  # a full disk must not end a run; the previous record is still whole
            log.warning("could not write %s: %s", self.path, error)


def _finite(value):
    """The same content with NaN and infinities as null: JSON has neither."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _now() -> str:
    return datetime.now().astimezone().isoformat(timespec="seconds")
