"""Each tracker has every figure once, and one run, whatever ended the attempts at it."""

import importlib.util
import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from support.helpers import HANG_S, TINY, last_run, make_dataset, run_train, start_train, write_config
from support.tracker_files import figures_of

PACKAGES = ("wandb", "tensorboard", "trackio")
pytestmark = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, PACKAGES)), reason="needs requirements/trackers.txt"
)
ROWS = 100  # that each attempt makes before its kill, some seconds: the trackers start in the first ones
EVERY = 50  # iterations between checkpoints


def rows_logged(out_dir: Path) -> int:
    """The last iteration in the newest journal."""
    paths = sorted(out_dir.glob("run_*.jsonl"), key=lambda path: path.stat().st_mtime_ns)
    if not paths:
        return 0
    lines = paths[-1].read_text().splitlines()
    entries = [entry for line in lines if line.endswith("}}") for entry in json.loads(line).values()]
    return max([entry["iter"] for entry in entries if "iter" in entry], default=0)


@pytest.fixture(scope="module")
def killed_twice(tmp_path_factory):
    """(out_dir, environment) of a run with all trackers, killed with all its processes, then alone, and then
    completed."""
    folder = tmp_path_factory.mktemp("trackers")
    keys = {**TINY, "log_interval": 2, "gradient_log_interval": 50, "eval_interval": EVERY}
    keys |= {"max_iters": 10**6, "trackers": ",".join(PACKAGES), "dataset": make_dataset(folder / "tokens")}
    out_dir = folder / "out"
    config = write_config(folder / "run.py", **keys, out_dir=out_dir, init_from="auto")
    env = {"WANDB_MODE": "offline", "TRACKIO_DIR": str(folder / "trackio")}
    for kill, rows in ((os.killpg, ROWS), (os.kill, 2 * ROWS)):
        process = start_train(config, stdout=subprocess.DEVNULL, **env)
        until = time.monotonic() + HANG_S
        while rows_logged(out_dir) < rows + (kill is os.kill):
            assert process.poll() is None and time.monotonic() < until, process.communicate()
            time.sleep(0.05)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        kill(process.pid, signal.SIGKILL)
        for child in children if kill is os.killpg else ():  # the one that sends has a session of its own
            os.kill(int(child), signal.SIGKILL)
        process.communicate()
    done = run_train(config, f"--max_iters={rows_logged(out_dir) + 2 * EVERY}", **env)
    assert done.returncode == 0 and "a tracker lacks" not in done.stdout, done.stdout + done.stderr
    return out_dir, env


@pytest.mark.parametrize("tracker", PACKAGES)
def test_killed_and_resumed_run_is_one_run_with_every_figure_once(tracker, killed_twice):
    out_dir, env = killed_twice
    record = last_run(out_dir)
    assert [each["status"] for each in record["attempts"]] == ["killed", "killed", "completed"]
    assert record["superseded"]["training_iterations"], "iterations were made twice"
    found = figures_of(tracker, out_dir, **env)
    for name, points in found.items():
        steps = [step for step, _ in points]
        assert steps == sorted(set(steps)), f"{name}: each step once"
    rows = record["training_iterations"]
    for figure, value in {
        "train/loss": lambda row: row["loss"],
        "train/learning_rate": lambda row: row["lr"],
        "gradients/global_norm": lambda row: row["gradients"]["global_norm"],
        "tokens": lambda row: (row["iter"] + 1) * 4 * 32,
    }.items():
        expected = [(row["iter"], pytest.approx(value(row), rel=1e-6)) for row in rows]
        assert list(map(tuple, found[figure])) == expected, figure
    assert len(found["speed/tokens_per_sec"]) == len(rows)
    evaluations = [(each["iter"], pytest.approx(each["val_loss"])) for each in record["eval_steps"]]
    assert list(map(tuple, found["eval/val_loss"])) == evaluations
    attempts = [value for _, value in found["run/attempt"]]
    assert attempts == sorted(attempts) and set(attempts) == {1, 2, 3}
    saved = [value for _, value in found["checkpoint/iter"]]
    assert saved == sorted(set(saved)) and saved[-1] == record["checkpoints"][-1]["iter"]
