"""Reads back what TensorBoard, Weights & Biases and trackio have of the run in an out_dir.

python -m support.tracker_files wandb OUT_DIR    (the same as JSON: {figure: [[step, value], ...]})
"""

import json
import os
import subprocess
import sys
from pathlib import Path

from tools.track.trackers import wandb_history

OF_WANDB_ITSELF = ("_step", "_runtime", "_timestamp")
TESTS = Path(__file__).resolve().parents[1]


def figures_of(tracker: str, out_dir: Path, **env: str) -> dict[str, list]:
    """Every point of every figure, in a process of its own: trackio finds its folder when it is imported."""
    done = subprocess.run(
        [sys.executable, "-m", "support.tracker_files", tracker, str(out_dir)],
        env={**os.environ, "PYTHONPATH": f"{TESTS}:{TESTS.parent}", **env},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def of_wandb(out_dir: Path) -> dict[str, list]:
    files = sorted(out_dir.glob("wandb/offline-run-*/run-*.wandb"))  # wandb sync sends them in this order
    assert len({path.name for path in files}) == 1, "one run, whatever the number of attempts"
    found: dict[str, list] = {}
    for path in files:
        for step, row in wandb_history(path):
            for name in row.keys() - set(OF_WANDB_ITSELF):
                found.setdefault(name, []).append((step, json.loads(row[name])))
    return found


def of_tensorboard(out_dir: Path) -> dict[str, list]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (folder,) = out_dir.glob("tensorboard/*")
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})
    events.Reload()
    found = {
        name: [(each.step, each.value) for each in events.Scalars(name)] for name in events.Tags()["scalars"]
    }
    texts = {
        name.removesuffix("/text_summary"): [
            (each.step, each.tensor_proto.string_val[0].decode()) for each in events.Tensors(name)
        ]
        for name in events.Tags()["tensors"]
    }
    return found | texts


def of_trackio(out_dir: Path) -> dict[str, list]:
    import trackio
    from trackio.sqlite_storage import SQLiteStorage

    (run,) = trackio.Api().runs("nanomfu")
    found: dict[str, list] = {}
    for row in SQLiteStorage.get_logs("nanomfu", run.name, run_id=run.id):
        for name in row.keys() - {"step", "timestamp"}:
            found.setdefault(name, []).append((row["step"], row[name]))
    return found


if __name__ == "__main__":
    READERS = {"wandb": of_wandb, "tensorboard": of_tensorboard, "trackio": of_trackio}
    print(json.dumps(READERS[sys.argv[1]](Path(sys.argv[2]))))
