"""The last five lines of a run: what came out, and the commands that go on from it."""

from __future__ import annotations

import shlex
from datetime import datetime

from common import units
from common.processes import python_name
from training.configuration.keys import TrainConfig
from training.process.launch import is_launched, machine_number, machine_size
from training.records.rows import Logger

NO_CHECKPOINT, NO_RECORD = "no checkpoint was saved", "no record was saved (save_log_to_json=False)"


def summary_of(logger: Logger, has_checkpoint: bool, argv: list[str]) -> dict[str, str]:
    """{name: text}, on rank 0, once the record is complete. argv: what train.py was called with."""
    record, summary, config = logger.record, logger.summary, logger.config
    assert record is not None
    attempt, mfu = record.this_attempt, summary["mfu_percent"]
    began, ended = (datetime.fromisoformat(attempt[name]) for name in ("start_time", "end_time"))
    best, last = summary["best_val_loss"], summary["final_loss"]
    speed = f"{mfu['median']:.2f} %" if mfu else "n/a"
    losses = "not evaluated" if best is None else f"{best:.4f} (validation)"
    evaluated = {each["iter"]: each["val_loss"] for each in logger.content["eval_steps"]}
    if best is not None and best == evaluated.get(0):  # no model that was trained has it
        only = len(evaluated) == 1
        losses = "not evaluated" if only else f"{best:.4f} (validation)"
        losses += " after the first update" if only else " before the first update"
    plot = shlex.join([python_name(), "plots/plot_single_run.py", str(record.path)])
    sample = shlex.join([python_name(), "sample.py", f"--out_dir={config.out_dir}"])
    # a run that a signal ended has saved iterations that no row has
    done = max([logger.logged, *(save["iter"] for save in logger.content["checkpoints"])])
    resume = resume_command(argv, done, config)
    return {
        "Time": f"{units.duration((ended - began).total_seconds())} for {done - logger.start:,} "
        f"iterations; median MFU {speed}",
        "Best loss": losses + (f", last training loss {last:.4f}" if last is not None else ""),
        "To resume": resume if has_checkpoint else NO_CHECKPOINT,
        "To sample": sample if has_checkpoint else NO_CHECKPOINT,
        "To plot": plot if config.save_log_to_json else NO_RECORD,
    }


def resume_command(argv: list[str], done: int, config: TrainConfig) -> str:
    """Goes on to the last iteration or, if that is done, as far again."""
    more = ["--init_from=resume"]
    if done >= config.max_iters:
        more += [f"--max_iters={2 * config.max_iters}"]
        more += [f"--max_epochs={2 * config.max_epochs:g}"] if config.max_epochs else []
    names = {"--resume_from", *(flag.partition("=")[0] for flag in more)}
    rest, skip = [], False
    for word in argv:
        name, equals, _ = word.partition("=")
        if skip or name in names:
            skip = not skip and not equals
        else:
            rest.append(word)
    return shlex.join([*_launcher(), "train.py", *rest, *more])


def _launcher() -> list[str]:
    machines = machine_number()[1]
    if not is_launched():
        return [python_name()]
    where = ["--standalone"] if machines == 1 else [f"--nnodes={machines}", "..."]
    return ["torchrun", *where, f"--nproc_per_node={machine_size()}"]
