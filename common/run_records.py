"""Finds the run records in an out_dir."""

from __future__ import annotations

from pathlib import Path


def run_records(out_dir: Path) -> list[Path]:
    """In the order of their names, so the newest is last."""
    return sorted(path for path in out_dir.glob("run_*.json") if not is_old_seal(path))


def is_old_seal(path: Path) -> bool:
    """Whether this is a seal of the earlier name, run_*.seal.json, beside the record that it seals."""
    return path.name.endswith(".seal.json")
