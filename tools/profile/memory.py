"""Shows where the memory of a run is: a table by part at the fullest moment, beside the estimate.

train.py writes what it reads, with profile='memory' (training/records/memory_snapshot.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.errors import RunError
from common.json_file import read_json
from training.records.memory_parts import PARTS, UNKNOWN, estimated_parts
from training.records.memory_snapshot import ITERATIONS, table_path

VIEWER = "https://docs.pytorch.org/memory_viz"
UNKNOWN_SHOWN = 8  # names


# Keys of a run that memory_lines() can show.
MEMORY_KEYS = {"profile": "memory", "max_iters": ITERATIONS, "log_interval": 1}


def memory_lines(out_dir: Path, processes: int = 1) -> list[str]:
    """The table of rank 0, and the peaks of the others. Raises RunError if a rank has left nothing that can
    be read."""
    path = table_path(out_dir, 0)
    facts, *others = (_read(out_dir, rank) for rank in range(processes))
    lines = [
        f"Memory at the fullest moment of iteration {facts['iteration']}, rank 0 ({facts['device']}), GiB",
        f"{'part':34} {'measured':>9} {'estimate':>9} {'difference':>11}",
        *_rows(facts),
        *_unknown_lines(facts["unknown"]),
    ]
    if facts["device"] == "cpu":
        lines.append("The estimate is for a GPU, whose kernels need less than a CPU's operators.")
    if facts["snapshot"]:
        lines += [
            f"Most in the whole run: {facts['max_allocated_gib']:.3f} allocated, "
            f"{facts['max_reserved_gib']:.3f} reserved",
            f"Outside of the allocator (CUDA, libraries, other programs): {facts['outside_gib']:.3f}",
            f"Snapshot: {path.parent / facts['snapshot']}; open {VIEWER} and drop the file there",
        ]
    return lines + [f"rank {rank}: {other['peak_gib']:.3f}" for rank, other in enumerate(others, start=1)]


def _read(out_dir: Path, rank: int) -> dict[str, Any]:
    path = table_path(out_dir, rank)
    try:
        return read_json(path)
    except (OSError, ValueError) as error:
        raise RunError(
            f"{path} cannot be read: {error}; train.py --profile=memory writes it after iteration "
            f"{ITERATIONS - 2} of a process, so run {ITERATIONS} iterations or more"
        ) from None


def _rows(facts: Mapping[str, Any]) -> list[str]:
    """A line for each part; below it, its places."""
    measured, estimated = facts["parts"], estimated_parts(facts["estimate"])
    rows = []
    for part in PARTS:
        places = {name: size for name, size in measured.items() if name.split(":")[0] == part}
        if not places and part not in estimated:
            continue
        rows.append(_row(part, sum(places.values()), estimated.get(part, 0.0)))
        for name, size in sorted(places.items(), key=lambda item: -item[1]):
            if name != part:
                rows.append(f"  {name.removeprefix(part + ': '):32} {size:9.3f}")
    return [*rows, _row("sum", facts["peak_gib"], sum(estimated.values()))]


def _row(name: str, measured: float, estimated: float) -> str:
    row = f"{name:34} {measured:9.3f} {estimated:9.3f}"
    return f"{row} {100 * (estimated / measured - 1):+9.1f} %" if measured and estimated else row


def _unknown_lines(unknown: Mapping[str, float]) -> list[str]:
    largest = sorted(unknown.items(), key=lambda item: -item[1])
    lines = [f"  {UNKNOWN}: {size:.3f} {name}" for name, size in largest[:UNKNOWN_SHOWN]]
    rest = largest[UNKNOWN_SHOWN:]
    if rest:
        lines.append(f"  {UNKNOWN}: {sum(size for _, size in rest):.3f} in {len(rest)} others")
    return lines
