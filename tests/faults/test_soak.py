"""An hour of training takes no more memory and no more open files at its end than at its beginning, and
leaves no file over. That runs which are killed end as others do is in test_chaos.py.

    SOAK_MINUTES=60 python -m pytest -m chaos tests/faults/test_soak.py -s
"""

import os
import signal
import statistics
import time
from pathlib import Path

import pytest
from support.faults import prepare, processes_of
from support.helpers import HANG_S
from test_chaos import console_of, start, strays

MINUTES = float(os.environ.get("SOAK_MINUTES", 60))
SETTLED = 25  # seconds after its start, a process has the memory that it needs
SAMPLE = 5  # seconds
GROWTH = 1.05
INTERVAL = 100  # iterations between checkpoints, a few seconds
FOREVER = 10**6


def config_file(folder: Path) -> Path:
    model = {"n_layer": 4, "n_embd": 128, "d_ff": 256, "block_size": 64}
    model |= {"use_dataloader": True, "dataloader_num_workers": 1}
    ends_never = {"max_iters": FOREVER, "lr_decay_iters": FOREVER, "eval_interval": 5 * INTERVAL}
    kept = {"checkpoint_interval": INTERVAL, "keep_last": 2, "log_interval": 10}
    return prepare(folder, **model, **ends_never, **kept)


def usage(pid: int) -> tuple[int, int]:
    """(pages in memory, open files) of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]), len(os.listdir(f"/proc/{pid}/fd"))


@pytest.mark.chaos
@pytest.mark.soak
def test_an_hour_of_training_takes_no_more_at_its_end(tmp_path):
    out = tmp_path / "out"
    process = start(config_file(tmp_path), out, "ddp")
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
    early, late = samples[:third], samples[-third:]
    for pid in pids:
        for what, typical in enumerate(
            (statistics.median, statistics.mode)
        ):  # a save opens some for a moment
            before, after = (typical([sample[pid][what] for sample in part]) for part in (early, late))
            print(f"SOAK {MINUTES:g} minutes, process {pid}: {before} to {after} {('pages', 'files')[what]}")
            assert after < GROWTH * before
    assert not strays(out)
    assert {path.name for path in out.iterdir() if not path.name.startswith("run_")} == {
        "checkpoints",
        "run.lock",
    }
