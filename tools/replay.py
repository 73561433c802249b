"""Runs a sealed run again, in a fresh process, and says whether its numbers hold.

    python -m tools.replay seal_20260101_120000.json
    python -m tools.replay seal_20260101_120000.json --out_dir=out-replay --dataset=my_folder

The settings are the seal's, as plain values of known keys; nothing else of a seal is used, and no code of it
is run. Exit status 1: a number does not hold, or the run failed. docs/seal.md says what is compared.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import Any

import torch

from bench.process import TIMEOUT_MAX_S, python_command, run_process
from common.arguments import user_folder, user_path
from common.cgroups import usable_cores
from common.command import FAILED, run_command
from common.errors import UserError
from common.run_records import load_record, run_records
from common.text import one_line
from tools.seal import faults, read_seal, readable
from training.configuration.choices import CHOICES, is_module
from training.configuration.keys import KEYS
from training.configuration.other_names import REMOVED_KEYS, removed_settings, todays_settings
from training.records.startup_info import code_text, git_state

SPEED = 0.03  # a share of tokens/s: GPUs of one kind differ by 2 to 3 % (LOG.md)
LOSS = 0.01  # of a loss; strategies, kernels and versions add in another order (LOG.md: up to 0.4 %)
MIN_ROWS = 16  # after the warm-up; a median of fewer says too little
# Keys of the sealed run that the new one has its own way: where it wrote, where it began, whom it told.
NOT_TAKEN = {"out_dir", "dataset", "init_from", "resume_from", "init_weights", "allow_changes", "trackers"}
NOT_TAKEN |= {"wandb_project", "wandb_run_name", "checkpoint_interval", "profile", "dry_run"}
NOT_TAKEN |= {"always_save_checkpoint", "save_log_to_json", *REMOVED_KEYS}
# Which the record has beside the key
NOT_TAKEN |= {"gradient_accumulation_steps_per_gpu", "gradient_accumulation_steps_global"}
HOLDS = {True: "holds", False: "DOES NOT HOLD", None: "not compared"}


def main(argv: list[str]) -> int:
    title = __doc__.splitlines()[0]
    parser = argparse.ArgumentParser(prog="python -m tools.replay", description=title, allow_abbrev=False)
    add = parser.add_argument
    add("seal", metavar="SEAL", type=user_folder, help="a file that tools.seal made")
    add("--out_dir", type=user_folder, help="where the run writes (default: out-replay/SEAL)")
    add("--dataset", type=user_path, help="the same tokens under another name or in another folder")
    options = parser.parse_args(argv)
    out_dir = (options.out_dir or Path("out-replay") / options.seal.stem).resolve()
    with readable(options.seal):
        return replay(options.seal, out_dir, options.dataset)


def replay(path: Path, out_dir: Path, dataset: str | None) -> int:
    seal = read_seal(path)
    if wrong := faults(seal):
        raise UserError(f"{path}: {wrong[0]}; fetch it again")
    record, startup = seal["record"], seal["record"]["startup_info"]
    processes = startup["hardware"]["num_gpus"]
    here = usable_cores() if record["config"]["device"] == "cpu" else torch.cuda.device_count()
    if not 1 <= processes <= here:
        raise UserError(f"the sealed run used {processes} GPUs (or processes), and this job may use {here}")
    if run_records(out_dir):
        raise UserError(f"{out_dir} has a run already; name an empty folder with --out_dir")
    values = {**settings(record, dataset), "out_dir": str(out_dir), "always_save_checkpoint": False}
    out_dir.mkdir(parents=True, exist_ok=True)
    (config := out_dir / "replay.py").write_text("".join(f"{k} = {v!r}\n" for k, v in values.items()))
    sealed = f"Sealed: torch {startup['software']['torch']}, {code_text(seal['code'])}"
    print(*(one_line(line, 1000) for line in (sealed, *removed_settings(record["config"]))), sep="\n")
    print(f"Here: torch {torch.__version__}, {code_text(git_state())}, in {out_dir}", flush=True)
    command, log = python_command(["train.py", str(config)], processes), out_dir / "console.log"
    if reason := run_process(command, log, TIMEOUT_MAX_S, keep_cache=True).reason:
        print(f"The run failed: {reason}; see {log}")
        return FAILED
    found = findings(record, load_record(run_records(out_dir)[-1]))
    for what, holds, text in found:
        print(f"{what:<14} {HOLDS[holds]}: {one_line(text, 1000)}")
    failed = [what for what, holds, _ in found if holds is False]
    print(f"{', '.join(failed)}: does not hold" if failed else "All that can be compared here holds.")
    return FAILED if failed else 0


def settings(record: dict[str, Any], dataset: str | None) -> dict[str, Any]:
    """The sealed configuration, by known keys. train.py checks types and rules."""
    startup, config = record["startup_info"], record["config"]
    if startup.get("pretrained") or (startup.get("resumed_from") and len(record["attempts"]) < 2):
        raise UserError("the run began with weights that are not in a seal, so it cannot be run again")
    stated = {key: value for key, value in todays_settings(config).items() if key not in NOT_TAKEN}
    if unknown := [key for key in stated if key not in KEYS]:
        raise UserError(f"the seal's configuration has {unknown[0]!r}, no setting of this code")
    if foreign := [key for key in CHOICES if is_module(stated.get(key))]:
        raise UserError(
            f"the sealed run took its {foreign[0]} from the module {stated[foreign[0]]}; a replay imports "
            "nothing that a seal names but this code's own: train by train.py, if you trust that module"
        )
    changed = {key: value for key, value in stated.items() if value != KEYS[key].default}
    return {**changed, "dataset": dataset or config["dataset"]}


def findings(old: dict[str, Any], new: dict[str, Any]) -> list[tuple[str, bool | None, str]]:
    """(what, whether it holds or None if that cannot be said, a text) of a sealed record and a new one."""
    prints = [one["startup_info"]["data"]["fingerprint"][:12] for one in (old, new)]
    flops = [one["startup_info"]["flops"] for one in (old, new)]
    counts = " and now ".join(f"{one['flops_per_token']:,}" for one in flops)
    # not those where an earlier attempt ended, which a run in one piece does not make
    every, steps = old["config"]["eval_interval"], old["eval_steps"]
    steps = [one for one in steps if one is steps[-1] or not (every and one["iter"] % every)]
    return [
        ("data", prints[0] == prints[1], "fingerprint " + " and now ".join(prints)),
        ("FLOPs/token", flops[0]["totals"] == flops[1]["totals"], f"{counts}, and by all formulas"),
        ("losses", *_losses(old["training_iterations"], new["training_iterations"], "loss")),
        ("evaluations", *_losses(steps, new["eval_steps"], "val_loss")),
        ("tokens/s", *_speed(old, new)),
    ]


def _losses(old_rows: list[dict], new_rows: list[dict], name: str) -> tuple[bool, str]:
    old, new = ({row["iter"]: row[name] for row in rows} for rows in (old_rows, new_rows))
    if missing := sorted(old.keys() - new.keys()):
        return False, f"iteration {missing[0]} has none now"
    # repr: nan, the loss of a run that diverged, is equal to nan
    apart = {i: abs(new[i] / loss - 1) for i, loss in old.items() if repr(new[i]) != repr(loss)}
    if not apart:
        return True, f"all {len(old)} are equal to the last digit"
    worst = max(apart, key=lambda i: math.inf if math.isnan(apart[i]) else apart[i])
    text = f"{old[worst]:.6f} and now {new[worst]:.6f} at iteration {worst}, {100 * apart[worst]:.4f} % apart"
    return apart[worst] <= LOSS, f"{text}, the most of {len(old)}; {100 * LOSS:g} % is allowed"


def _speed(old: dict[str, Any], new: dict[str, Any]) -> tuple[bool | None, str]:
    """tokens/s, and so MFU of the sealed peak: a peak that is measured anew is another one."""
    rows = min(one["summary"]["rows_after_warmup"] for one in (old, new))
    if rows < MIN_ROWS:
        return None, f"too few rows after the warm-up: {rows}, not {MIN_ROWS}"
    names = [one["startup_info"]["hardware"]["gpu_name"] for one in (old, new)]
    sealed, now = (one["summary"]["tokens_per_sec"]["median"] for one in (old, new))
    text = f"{sealed:,.0f} and now {now:,.0f}, {100 * (now / sealed - 1):+.1f} %, and so is MFU"
    if names[0] != names[1] or old["config"]["device"] == "cpu":
        return None, f"{text}; sealed on {names[0]}, this is {names[1]}; other programs use a CPU, too"
    return abs(now / sealed - 1) <= SPEED, f"{text}; {100 * SPEED:g} % is allowed"


if __name__ == "__main__":
    sys.exit(run_command(main, sys.argv[1:]))
