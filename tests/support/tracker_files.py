"""Reads back what TensorBoard, Weights & Biases and trackio have of the run in an out_dir.

python -m support.tracker_files wandb OUT_DIR    (the same as JSON: {figure: [[step, value], ...]})
"""

import json
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from support.helpers import HANG_S

OF_WANDB_ITSELF = ("_step", "_runtime", "_timestamp")
TESTS = Path(__file__).resolve().parents[1]


def figures_of(tracker: str, out_dir: Path, **env: str) -> dict[str, list]:
    """Every point of every figure, in a process of its own: trackio finds its folder when it is imported."""
    done = subprocess.run(
        [sys.executable, "-m", "support.tracker_files", tracker, str(out_dir)],
        env={**os.environ, "PYTHONPATH": f"{TESTS}:{TESTS.parent}", **env},
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def of_wandb(out_dir: Path) -> dict[str, list]:
    (path,) = out_dir.glob("wandb/offline-run-*/run-*.wandb")  # one, whatever the number of attempts
    found: dict[str, list] = {}
    for step, row in wandb_history(path.read_bytes()):
        for name in row.keys() - set(OF_WANDB_ITSELF):
            found.setdefault(name, []).append((step, json.loads(row[name])))
    return found


def wandb_history(content: bytes) -> Iterator[tuple[int, dict[str, str]]]:
    """(step, {name: value as JSON}) of each row in an offline file, up to where it is cut off. The file is a
    log as LevelDB writes it, behind 7 bytes of its own: blocks of 32 KiB with parts of records. A part has a
    checksum (4 bytes), its length (2) and its kind (1): 1 whole, 2 first, 3 middle, 4 last."""
    from wandb.proto.wandb_internal_pb2 import Record

    at, begun = 7, b""
    while at + 7 <= len(content):
        if (left := (1 << 15) - at % (1 << 15)) < 7:  # of the block: too short for a part
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", content, at)
        part = content[at + 7 : at + 7 + length]
        if not kind or len(part) < length:
            return
        at, begun = at + 7 + length, part if kind in (1, 2) else begun + part
        if kind in (1, 4) and (record := Record.FromString(begun)).HasField("history"):
            items = record.history.item
            yield record.history.step.num, {i.key or "/".join(i.nested_key): i.value_json for i in items}


def of_tensorboard(out_dir: Path) -> dict[str, list]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (folder,) = out_dir.glob("tensorboard/*")
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    found = {
        name: [(each.step, each.value) for each in events.Scalars(name)] for name in events.Tags()["scalars"]
    }
    return found


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
