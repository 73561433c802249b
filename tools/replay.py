"""Runs a sealed run again, in a fresh process, and says whether its numbers hold.

    python -m tools.replay seal_20260101_120000.json
    python -m tools.replay seal_20260101_120000.json --out_dir=out-replay --dataset=my_folder

The settings are the seal's, as plain values of known keys; nothing else of a seal is used, and no code of it
is run. Exit status 1: a number does not hold, or the run failed. docs/seal.md says what is compared.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.process import TIMEOUT_MAX_S, python_command, run_process
from common.arguments import check_output, real_number, user_folder, user_path
from common.command import FAILED, run_command
from common.errors import UserError
from common.run_records import run_records
from common.text import one_line
from plots.run_record import load_run
from plots.verdict import MIN_ROWS, compare
from tools.seal.contents import changed_sections, describe_code, read_seal
from tools.seal.recount import disagreements
from training.batches.fingerprint import run_fingerprint
from training.batches.sources import open_sources
from training.configuration.files_and_flags import load_config
from training.configuration.keys import KEYS, TrainConfig
from training.records.startup_info import git_state

# By how much a number may differ where its noise is not measured in the two runs, as a share.
OTHER_MACHINE = 0.03  # tokens/s of GPUs of one kind: those measured so far differ by 2 to 3 % (LOG.md)
LOSS = 0.01  # a loss; strategies, kernels and versions add in another order (LOG.md: up to 0.4 %)
# Keys of the sealed run that the new one has its own way: where it wrote, where it began, whom it told.
NOT_TAKEN = {"out_dir", "dataset", "init_from", "resume_from", "init_weights", "allow_changes", "trackers"}
NOT_TAKEN |= {"wandb_project", "wandb_run_name", "checkpoint_interval", "profile", "dry_run"}
NOT_TAKEN |= {"always_save_checkpoint", "save_log_to_json"}
# Which the record has beside the key
COUNTS = {"gradient_accumulation_steps_per_gpu", "gradient_accumulation_steps_global"}
MESSAGE = 1000  # characters of a line; some of its words are the seal's
RANDOM = re.compile(r"random-(\d{1,9})")  # a dataset of bench.random_tokens
VERSIONS = ("torch", "cuda", "cudnn", "nccl", "python")


@dataclass(frozen=True)
class Finding:
    """One comparison. holds: None if it means nothing here, and the text says why."""

    what: str
    holds: bool | None
    text: str


def main(argv: list[str]) -> int:
    options = parse(argv)
    seal = read_seal(options.seal)
    if changed := changed_sections(seal):
        raise UserError(f"{options.seal} was changed after sealing: {', '.join(changed)}; fetch it again")
    if wrong := disagreements(seal["record"]):
        raise UserError(f"{options.seal} does not agree with itself: {wrong[0]}")
    record = seal["record"]
    processes = require_machine(record)
    out_dir = options.out_dir or Path("out-replay") / record["run_name"]
    if run_records(out_dir):
        raise UserError(f"{out_dir} has a run already; name an empty folder with --out_dir")
    check_output(out_dir, "--out_dir")
    out_dir.mkdir(parents=True, exist_ok=True)
    flags = settings(record, out_dir.resolve(), options.dataset)
    config_file = out_dir / "replay.py"
    config_file.write_text("# No setting: they are flags of this command\n", encoding="utf-8")
    argv_of_run = [str(config_file.resolve()), *flags]
    require_data(load_config(argv_of_run, processes), record)
    for line in about_code(seal["code"]):
        print(one_line(line, MESSAGE), flush=True)
    print(f"Running {record['run_name']} again in {out_dir}", flush=True)
    command = python_command(["train.py", *argv_of_run], processes)
    done = run_process(command, out_dir / "console.log", options.timeout, keep_cache=True)
    if done.reason:
        print(f"The run failed: {done.reason}; see {out_dir / 'console.log'}")
        return FAILED
    found = list(findings(options.seal, record, run_records(out_dir)[-1]))
    for finding in found:
        state = {True: "holds", False: "DOES NOT HOLD", None: "not compared"}[finding.holds]
        print(f"{finding.what:<14} {state}: {one_line(finding.text, MESSAGE)}")
    failed = [finding.what for finding in found if finding.holds is False]
    print(f"{', '.join(failed)}: does not hold" if failed else "All that can be compared here holds.")
    return FAILED if failed else 0


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tools.replay", description=__doc__.splitlines()[0], allow_abbrev=False
    )
    add = parser.add_argument
    add("seal", metavar="SEAL", type=user_folder, help="a file that tools.seal made")
    add("--out_dir", type=user_folder, help="where the run writes (default: out-replay/RUN)")
    add("--dataset", type=user_path, help="the same tokens under another name or in another folder")
    add("--timeout", type=real_number(1, TIMEOUT_MAX_S), default=TIMEOUT_MAX_S, help="seconds for the run")
    return parser.parse_args(argv)


def settings(record: dict[str, Any], out_dir: Path, dataset: str | None) -> list[str]:
    """Flags of train.py with the sealed configuration. Raises UserError for keys and values that are no
    settings; train.py checks types and rules."""
    if (record["startup_info"].get("resumed_from") or {}) and len(record.get("attempts") or []) < 2:
        raise UserError(
            "the run went on from a checkpoint of another run, so it cannot be run from its beginning"
        )
    if record["startup_info"].get("pretrained"):
        raise UserError(
            "the run began with pretrained weights, which are not in a seal; it cannot be replayed"
        )
    flags = [f"--out_dir={out_dir}", f"--dataset={dataset or record['config'].get('dataset')}"]
    for key, value in record["config"].items():
        if key in COUNTS | NOT_TAKEN:
            continue
        if key not in KEYS:
            raise UserError(
                f"the seal's configuration has {key!r}, no setting of this code; it is of other code"
            )
        if value != KEYS[key].default:
            flags.append(f"--{key}={value}")
    return [*flags, "--always_save_checkpoint=False"]


def require_machine(record: dict[str, Any]) -> int:
    """The number of processes. Raises UserError if this machine has not as many GPUs."""
    processes = record["startup_info"]["hardware"].get("num_gpus")
    if not isinstance(processes, int) or not 1 <= processes <= 4096:
        raise UserError(f"the seal's num_gpus is {processes!r}, no number of GPUs")
    if record["config"].get("device") == "cpu":
        if processes > (os.cpu_count() or 1):
            raise UserError(f"the sealed run used {processes} processes, more than this machine has cores")
        return processes
    gpus = torch.cuda.device_count()
    if gpus < processes:
        raise UserError(
            f"the sealed run used {processes} GPUs, and this machine has {gpus}; replay it on one with more"
        )
    return processes


def require_data(config: TrainConfig, record: dict[str, Any]) -> None:
    """Raises UserError if the dataset is absent, or holds other tokens."""
    sealed = record["startup_info"]["data"].get("fingerprint")
    try:
        here = run_fingerprint(open_sources(config, scan=False))["sha256"]
    except UserError as error:
        size = RANDOM.fullmatch(Path(config.dataset).name)
        made = f", and python -m bench.random_tokens {size[1]} makes it" if size else ""
        raise UserError(
            f"{error}\nThe seal needs this dataset{made}; --dataset=FOLDER names another place"
        ) from None
    if here != sealed:
        raise UserError(
            f"the dataset {config.dataset!r} holds other tokens than the sealed run read (fingerprint "
            f"{here[:12]}, sealed {str(sealed)[:12]}); prepare it anew, or name the right one with --dataset"
        )


def about_code(code: dict[str, Any]) -> Iterator[str]:
    """What differs between the sealed code and this; the difference is shown to people and never applied."""
    here = describe_code(git_state())
    if code.get("note"):
        yield f"Note: {code['note']}"
    if code.get("commit") and code["commit"] != here["commit"]:
        yield (
            f"Note: sealed at commit {code['commit'][:12]}, this is {str(here['commit'])[:12]}; "
            f"for the same code: git checkout {code['commit'][:12]}"
        )
    if code.get("difference"):
        yield "Note: the sealed code had changes on top of its commit; the seal's code.difference shows them"
    elif here["modified"]:
        yield "Note: this code has changes on top of its commit"


def findings(sealed: Path, record: dict[str, Any], path: Path) -> Iterator[Finding]:
    """The comparisons of the sealed record with the new one."""
    new = load_run(path).record
    yield _flops(record, new)
    yield from _losses(record, new)
    yield _speed(record, new)


def _flops(old: dict, new: dict) -> Finding:
    flops = [one["startup_info"]["flops"] for one in (old, new)]
    shown = [f"{one['flops_per_token']:,}" for one in flops]
    text = f"{shown[0]}, by each of the three formulas as sealed"
    if flops[0]["totals"] != flops[1]["totals"]:
        text = f"{shown[0]} and now {shown[1]}, or another of the three formulas"
    return Finding("FLOPs/token", flops[0]["totals"] == flops[1]["totals"], text)


def _losses(old: dict, new: dict) -> Iterator[Finding]:
    """Every logged loss, and those of evaluations."""
    for what, section, name in (
        ("losses", "training_iterations", "loss"),
        ("evaluations", "eval_steps", "val_loss"),
    ):
        sides = [
            {row["iter"]: row[name] for row in one.get(section) or [] if _is_number(row.get(name))}
            for one in (old, new)
        ]
        if not sides[0]:
            continue
        if missing := sorted(sides[0].keys() - sides[1].keys()):
            yield Finding(what, False, f"iteration {missing[0]} has none now")
            continue
        differences = {i: abs(sides[1][i] / loss - 1) if loss else 0.0 for i, loss in sides[0].items()}
        worst = max(differences, key=lambda i: differences[i])
        if not differences[worst]:
            yield Finding(what, True, f"all {len(differences)} are equal to the last digit")
            continue
        most = differences[worst]
        text = (
            f"{sides[0][worst]:.6f} and now {sides[1][worst]:.6f} at iteration {worst}, {100 * most:.4f} % "
            f"apart, the most of {len(differences)}; {100 * LOSS:g} % is allowed"
        )
        yield Finding(what, most <= LOSS, f"{text}{_other_versions(old, new)}")


def _speed(old: dict, new: dict) -> Finding:
    """tokens/s, and so MFU, both of the sealed peak: a peak that is measured anew is another one."""
    hardware = [one["startup_info"]["hardware"] for one in (old, new)]
    names = [each.get("gpu_name") for each in hardware]
    if names[0] != names[1]:
        text = f"sealed on {names[0]}, this is {names[1]}: tokens/s and MFU of another kind of machine"
        return Finding("tokens/s", None, text)
    rows = [_rates(old), _rates(new)]
    medians = [float(np.median(one)) if len(one) else 0.0 for one in rows]
    if min(map(len, rows)) < MIN_ROWS or not all(medians):
        return Finding(
            "tokens/s", None, f"too few rows after the warm-up: {min(map(len, rows))}, not {MIN_ROWS}"
        )
    verdict = compare([rows[1]], [rows[0]])
    mfu = (old["summary"].get("mfu_percent") or {}).get("median")
    shown = f", MFU {mfu:.2f} and {mfu * medians[1] / medians[0]:.2f} % of the sealed peak" if mfu else ""
    if old["config"].get("device") == "cpu":
        text = f"{medians[0]:,.0f} and now {medians[1]:,.0f}{shown}; other programs use a CPU, too"
        return Finding("tokens/s", None, text)
    allowed = 0.0 if _same_gpus(old, new) else OTHER_MACHINE
    holds = verdict.low <= allowed and verdict.high >= -allowed
    text = (
        f"{medians[0]:,.0f} and now {medians[1]:,.0f}{shown}; "
        f"{verdict.text('the new run', 'the sealed one')}; "
        f"{100 * allowed:g} % beyond this noise is allowed"
    )
    return Finding("tokens/s", holds, f"{text}{_other_versions(old, new)}")


def _same_gpus(old: dict, new: dict) -> bool:
    """By their UUIDs: virtual machines share host names. A record without UUIDs is of other GPUs."""
    machines = [one["startup_info"].get("machine") or {} for one in (old, new)]
    uuids = [{gpu.get("uuid") for gpu in machine.get("gpus") or ()} for machine in machines]
    return bool(uuids[0]) and None not in uuids[0] and uuids[0] == uuids[1]


def _rates(record: dict) -> np.ndarray:
    rows = record["training_iterations"]
    steady = [
        row for row in rows if not row.get("warmup") and row.get("attempt", 1) == record.get("attempt", 1)
    ]
    return np.array([row["tokens_per_sec"] for row in steady if _is_number(row.get("tokens_per_sec"))])


def _other_versions(old: dict, new: dict) -> str:
    software = [one["startup_info"]["software"] for one in (old, new)]
    different = [
        f"{name} {software[0].get(name)} and {software[1].get(name)}"
        for name in VERSIONS
        if software[0].get(name) != software[1].get(name)
    ]
    return f" (versions differ: {', '.join(different)})" if different else ""


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


if __name__ == "__main__":
    sys.exit(run_command(main, sys.argv[1:]))
