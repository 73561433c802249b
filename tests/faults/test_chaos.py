"""Training is killed with SIGKILL at random moments, start-up, steps, saves, renames and
deletions alike, and each time started again by the same command. It ends as if nothing had happened. And an
hour of training takes no more at its end than at its beginning."""

import contextlib
import itertools
import os
import random
import re
import signal
import statistics
import subprocess
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
from support.faults import digest, prepare, processes_of, saved_steps, wait_for_end
from support.helpers import HANG_S, last_run, start_train

from common.run_records import load_record

pytestmark = pytest.mark.kill

ITERATIONS, INTERVAL = 200, 8  # of a run; between its checkpoints
AT_ONCE = 2  # iterations within which a save has begun to leave its trace
A_SAVE_COMES, A_SAVE_TAKES = 5.0, 0.03  # seconds
STRATEGIES = {
    "one": (1, []),
    "ddp": (2, []),
    "zero1": (2, ["--use_zero1=True"]),
    "fsdp": (2, ["--use_fsdp=True"]),
    "muon": (1, ["--optimizer=muon"]),
    "muon, zero1": (2, ["--optimizer=muon", "--use_zero1=True"]),
    "muon, fsdp": (2, ["--optimizer=muon", "--use_fsdp=True"]),
}


def make_config(folder: Path, **keys) -> Path:
    return prepare(folder, max_iters=ITERATIONS, checkpoint_interval=INTERVAL, eval_interval=40, **keys)


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return make_config(tmp_path_factory.mktemp("chaos"))


def start(config: Path, out: Path, name: str, *more: str) -> subprocess.Popen:
    """The command that a user would type again."""
    processes, flags = STRATEGIES[name]
    flags = [f"--out_dir={out}", "--init_from=auto", *flags, *more]
    with open(console_of(out), "a") as console:
        return start_train(config, *flags, processes=processes, stdout=console, stderr=subprocess.STDOUT)


def console_of(out: Path) -> Path:
    return out.with_name(f"{out.name}.console")


def kill(process: subprocess.Popen, out: Path, rng: random.Random) -> None:
    """Launcher and ranks, in any order."""
    pids = processes_of(out)
    rng.shuffle(pids)
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()
    assert not wait_for_end(out)


def remains(out: Path) -> set[str]:
    """Of saves, deletions and pointers on their way."""
    return {path.name for path in (out / "checkpoints").glob("*.tmp*")}


def losses(out: Path) -> dict[int, float]:
    """Of each iteration, from all records and their journals, the newest last."""
    found = {}
    for path in sorted(out.glob("run_*.json"), key=lambda path: path.stat().st_mtime_ns):
        found |= {row["iter"]: row["loss"] for row in load_record(path)["training_iterations"]}
    return found


def check_record(record: dict) -> None:
    """Each iteration is there once, in order, with the attempt that made it."""
    rows = record["training_iterations"]
    assert [row["iter"] for row in rows] == list(range(ITERATIONS))
    made_by, attempts = [row["attempt"] for row in rows], record["attempts"]
    assert made_by == sorted(made_by) and {each["status"] for each in attempts[:-1]} <= {
        "killed",
        "completed",
    }  # as it ended
    assert all(row["iter"] >= attempts[row["attempt"] - 1]["start_iter"] for row in rows)
    superseded = record["superseded"].get("training_iterations", [])  # a kill may have cost none
    twice = {(row["iter"], row["attempt"]) for row in superseded}
    assert not twice & {(row["iter"], row["attempt"]) for row in rows}


def wait_for_moment(process: subprocess.Popen, out: Path, seconds: float, rng: random.Random) -> bool:
    """Until a random one, every second time in or after a save; whether the run still goes on."""
    try:
        before = remains(out)
        process.wait(rng.uniform(0.3, 1.0) * seconds)
    except subprocess.TimeoutExpired:
        if rng.random() < 0.5:
            until = time.monotonic() + A_SAVE_COMES
            while remains(out) <= before and process.poll() is None and time.monotonic() < until:
                time.sleep(0.0005)
            time.sleep(rng.uniform(0, A_SAVE_TAKES))
    return process.poll() is None


def train_through(
    config: Path, out: Path, name: str, kills: int, seconds: float, rng: random.Random
) -> Counter:
    """Until the run is complete; what it was doing when it was killed, `kills` times at most."""
    made = Counter()
    while True:
        before, process = remains(out), start(config, out, name)
        if made.total() < kills and wait_for_moment(process, out, seconds, rng):
            kill(process, out, rng)
            new = remains(out) - before
            deletes = any(".tmp-delete" in name for name in new)
            doing = "deletions" if deletes else "saves" if new else "others"
            made[doing] += 1
            done, saved = max(losses(out), default=-1) + 1, max(saved_steps(out), default=0)
            # training is up to an interval ahead of a checkpoint that is still being written
            lost = INTERVAL + (INTERVAL if doing == "saves" else AT_ONCE)
            assert done - saved <= lost, f"{done} iterations were made, {saved} are saved, among {doing}"
            continue
        assert process.wait(HANG_S) == 0, console_of(out).read_text()[-3000:]
        return made


def survive(config: Path, folder: Path, name: str, kills: int, seed: int) -> None:
    began = time.monotonic()
    whole = folder / "whole"
    assert not train_through(config, whole, name, 0, 60, random.Random(0))
    seconds = time.monotonic() - began
    expected = losses(whole)
    assert len(expected) == ITERATIONS
    rng, made, runs = random.Random(seed), Counter(), 0
    while made.total() < kills:
        out = folder / f"killed-{runs}"
        made += train_through(config, out, name, kills - made.total(), seconds, rng)
        runs += 1
        assert digest(out, ITERATIONS) == digest(whole, ITERATIONS), f"seed {seed}, run {runs}"
        assert losses(out) == expected
        check_record(last_run(out))
        assert not strays(out), f"seed {seed}, run {runs}: {strays(out)}"
    print(f"\nCHAOS {name}: {made.total()} kills in {runs} runs of {ITERATIONS} iterations, {dict(made)}")


def strays(out: Path) -> list[str]:
    """What is in the checkpoints' folder and is none, nor a pointer."""
    names = [path.name for path in (out / "checkpoints").iterdir()]
    return [name for name in names if not re.fullmatch(r"latest|best|step-\d{8}", name)]


@pytest.mark.slow
def test_a_run_that_is_killed_ends_as_if_it_had_not_been(config, tmp_path):
    survive(config, tmp_path, "one", kills=3, seed=1)


@pytest.mark.chaos
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", STRATEGIES)
def test_hundreds_of_kills(config, tmp_path, name, device, seed):
    if device == "cuda" and torch.cuda.device_count() < STRATEGIES[name][0]:
        pytest.skip("needs two GPUs")
    on_gpu = {"device": "cuda", "dtype": "bfloat16"}
    made = config if device == "cpu" else make_config(tmp_path, **on_gpu)
    survive(made, tmp_path, name, kills=10, seed=seed)


MINUTES = float(os.environ.get("SOAK_MINUTES", 60))
SETTLED, SAMPLE = 25, 5  # seconds until a process has the memory that it needs, and between two samples


def usage(pid: int) -> tuple[int, int]:
    """(pages in memory, open files) of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]), len(os.listdir(f"/proc/{pid}/fd"))


@pytest.mark.chaos
@pytest.mark.soak
def test_an_hour_of_training_takes_no_more_memory_and_files_at_its_end_and_leaves_none_over(tmp_path):
    """SOAK_MINUTES=60 python -m pytest -m soak tests/faults/test_chaos.py -s"""
    keys = {"n_layer": 4, "n_embd": 128, "d_ff": 256, "block_size": 64, "max_iters": 10**6}
    keys |= {"use_dataloader": True, "dataloader_num_workers": 1, "lr_decay_iters": 10**6, "log_interval": 10}
    keys |= {"eval_interval": 500, "checkpoint_interval": 100, "keep_last": 2}
    out = tmp_path / "out"
    process = start(prepare(tmp_path, **keys), out, "ddp")
    time.sleep(SETTLED)
    pids = processes_of(out)  # the launcher, its ranks and their workers
    samples, until = [], time.monotonic() + 60 * MINUTES
    while time.monotonic() < until:
        assert process.poll() is None, console_of(out).read_text()[-3000:]
        samples.append({pid: usage(pid) for pid in pids})
        time.sleep(SAMPLE)
    process.send_signal(signal.SIGTERM)
    assert process.wait(HANG_S) == 1, console_of(out).read_text()[-3000:]
    third = len(samples) // 3
    typical = {"pages": statistics.median, "files": statistics.mode}  # a save opens some files for a moment
    for pid, (place, what) in itertools.product(pids, enumerate(typical)):
        parts = ([sample[pid][place] for sample in part] for part in (samples[:third], samples[-third:]))
        before, after = map(typical[what], parts)
        print(f"SOAK {MINUTES:g} minutes, process {pid}: {before} to {after} {what}")
        assert after < 1.05 * before
    assert not strays(out)
    left = {path.name for path in out.iterdir() if not path.name.startswith("run_")}
    assert left == {"checkpoints", "run.lock"}
