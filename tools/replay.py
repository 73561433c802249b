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
from common.arguments import check_output, user_folder, user_path
from common.cgroups import usable_cores
from common.command import FAILED, run_command
from common.errors import UserError
from common.json_file import read_json
from common.run_records import run_records
from common.text import one_line
from tools.seal.contents import changed_parts, code_text, read_seal, readable
from tools.seal.recount import disagreements
from training.batches.fingerprint import run_fingerprint
from training.batches.sources import open_sources
from training.configuration.choices import CHOICES, is_module
from training.configuration.files_and_flags import load_config
from training.configuration.keys import KEYS, TrainConfig
from training.configuration.other_names import REMOVED_KEYS, removed_settings, todays_settings
from training.records.startup_info import git_state

SPEED = 0.03  # a share of tokens/s: GPUs of one kind differ by 2 to 3 % (LOG.md)
LOSS = 0.01  # of a loss; strategies, kernels and versions add in another order (LOG.md: up to 0.4 %)
MIN_ROWS = 16  # after the warm-up; a median of fewer says too little
# Keys of the sealed run that the new one has its own way: where it wrote, where it began, whom it told.
NOT_TAKEN = {"out_dir", "dataset", "init_from", "resume_from", "init_weights", "allow_changes", "trackers"}
NOT_TAKEN |= {"wandb_project", "wandb_run_name", "checkpoint_interval", "profile", "dry_run"}
NOT_TAKEN |= {"always_save_checkpoint", "save_log_to_json", *REMOVED_KEYS}
# Which the record has beside the key
NOT_TAKEN |= {"gradient_accumulation_steps_per_gpu", "gradient_accumulation_steps_global"}
MESSAGE = 1000  # characters of a line; some of its words are the seal's

Finding = tuple[str, bool | None, str]  # what, whether it holds (None: that means nothing here), a text


def main(argv: list[str]) -> int:
    options = parse(argv)
    with readable(options.seal):
        return replay(options)


def replay(options: argparse.Namespace) -> int:
    seal = read_seal(options.seal)
    if changed := changed_parts(seal):
        raise UserError(f"{options.seal} was changed after sealing: {', '.join(changed)}; fetch it again")
    if wrong := disagreements(seal):
        raise UserError(f"{options.seal} does not agree with itself: {wrong[0]}")
    record = seal["record"]
    processes = record["startup_info"]["hardware"]["num_gpus"]
    here = usable_cores() if record["config"]["device"] == "cpu" else torch.cuda.device_count()
    if not 1 <= processes <= here:
        raise UserError(f"the sealed run used {processes} GPUs (or processes), and this job may use {here}")
    out_dir = (options.out_dir or Path("out-replay") / options.seal.stem).resolve()
    if run_records(out_dir):
        raise UserError(f"{out_dir} has a run already; name an empty folder with --out_dir")
    check_output(out_dir, "--out_dir")
    out_dir.mkdir(parents=True, exist_ok=True)
    (empty := out_dir / "replay.py").write_text("# The settings are flags of the command\n")
    flags = [str(empty), *settings(record, out_dir, options.dataset)]
    require_data(load_config(flags, processes), record["startup_info"]["data"]["fingerprint"])
    sealed = f"Sealed: torch {record['startup_info']['software']['torch']}, {code_text(seal['code'])}"
    for line in (sealed, *removed_settings(record["config"])):
        print(one_line(line, MESSAGE))
    print(f"Here: torch {torch.__version__}, {code_text(git_state())}, in {out_dir}", flush=True)
    command = python_command(["train.py", *flags], processes)
    done = run_process(command, out_dir / "console.log", TIMEOUT_MAX_S, keep_cache=True)
    if done.reason:
        print(f"The run failed: {done.reason}; see {out_dir / 'console.log'}")
        return FAILED
    found = findings(record, read_json(run_records(out_dir)[-1]))
    for what, holds, text in found:
        state = {True: "holds", False: "DOES NOT HOLD", None: "not compared"}[holds]
        print(f"{what:<14} {state}: {one_line(text, MESSAGE)}")
    failed = [what for what, holds, _ in found if holds is False]
    print(f"{', '.join(failed)}: does not hold" if failed else "All that can be compared here holds.")
    return FAILED if failed else 0


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tools.replay", description=__doc__.splitlines()[0], allow_abbrev=False
    )
    add = parser.add_argument
    add("seal", metavar="SEAL", type=user_folder, help="a file that tools.seal made")
    add("--out_dir", type=user_folder, help="where the run writes (default: out-replay/SEAL)")
    add("--dataset", type=user_path, help="the same tokens under another name or in another folder")
    return parser.parse_args(argv)


def settings(record: dict[str, Any], out_dir: Path, dataset: str | None) -> list[str]:
    """Flags of train.py with the sealed configuration. Raises UserError for keys that are no settings here;
    train.py checks types and rules."""
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
    changed = [f"--{key}={value}" for key, value in stated.items() if value != KEYS[key].default]
    name = dataset or config["dataset"]
    return [f"--out_dir={out_dir}", f"--dataset={name}", *changed, "--always_save_checkpoint=False"]


def require_data(config: TrainConfig, sealed: str) -> None:
    """Raises UserError if the dataset is absent, or has another fingerprint."""
    # the index of packed windows, which a scan opens, is part of the fingerprint
    here = run_fingerprint(open_sources(config, scan=config.packing == "truncate"))["sha256"]
    if here != sealed:
        raise UserError(
            f"the dataset {config.dataset!r} holds other tokens than the sealed run read (fingerprint "
            f"{here[:12]}, sealed {sealed[:12]}); prepare it anew, or name the right one with --dataset"
        )


def findings(old: dict[str, Any], new: dict[str, Any]) -> list[Finding]:
    """The comparisons of the sealed record with the new one."""
    flops = [one["startup_info"]["flops"] for one in (old, new)]
    # not those where an earlier attempt ended, which a run in one piece does not make
    every, steps = old["config"]["eval_interval"], old["eval_steps"]
    steps = [one for one in steps if one is steps[-1] or not (every and one["iter"] % every)]
    counts = " and now ".join(f"{one['flops_per_token']:,}" for one in flops)
    return [
        ("FLOPs/token", flops[0]["totals"] == flops[1]["totals"], f"{counts}, and by all formulas"),
        _losses("losses", old["training_iterations"], new["training_iterations"], "loss"),
        _losses("evaluations", steps, new["eval_steps"], "val_loss"),
        _speed(old, new),
    ]


def _losses(what: str, old_rows: list[dict], new_rows: list[dict], name: str) -> Finding:
    old, new = ({row["iter"]: row[name] for row in rows} for rows in (old_rows, new_rows))
    if missing := sorted(old.keys() - new.keys()):
        return what, False, f"iteration {missing[0]} has none now"
    # repr: nan, the loss of a run that diverged, is equal to nan
    apart = {i: abs(new[i] / loss - 1) for i, loss in old.items() if repr(new[i]) != repr(loss)}
    if not apart:
        return what, True, f"all {len(old)} are equal to the last digit"
    worst = max(apart, key=lambda i: math.inf if math.isnan(apart[i]) else apart[i])
    text = f"{old[worst]:.6f} and now {new[worst]:.6f} at iteration {worst}, {100 * apart[worst]:.4f} % apart"
    return what, apart[worst] <= LOSS, f"{text}, the most of {len(old)}; {100 * LOSS:g} % is allowed"


def _speed(old: dict[str, Any], new: dict[str, Any]) -> Finding:
    """tokens/s, and so MFU of the sealed peak: a peak that is measured anew is another one."""
    if (rows := min(one["summary"]["rows_after_warmup"] for one in (old, new))) < MIN_ROWS:
        return "tokens/s", None, f"too few rows after the warm-up: {rows}, not {MIN_ROWS}"
    names = [one["startup_info"]["hardware"]["gpu_name"] for one in (old, new)]
    rates = [one["summary"]["tokens_per_sec"]["median"] for one in (old, new)]
    change = rates[1] / rates[0] - 1
    text = f"{rates[0]:,.0f} and now {rates[1]:,.0f}, {100 * change:+.1f} %, and so is MFU"
    if names[0] != names[1]:
        return "tokens/s", None, f"{text}; sealed on {names[0]}, this is {names[1]}"
    if old["config"]["device"] == "cpu":
        return "tokens/s", None, f"{text}; other programs use a CPU, too"
    return "tokens/s", abs(change) <= SPEED, f"{text}; {100 * SPEED:g} % is allowed"


if __name__ == "__main__":
    sys.exit(run_command(main, sys.argv[1:]))
