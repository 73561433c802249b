"""The table of README.md: systems, versions of Python and torch, NVIDIA drivers; which were tested."""

from __future__ import annotations

import re

from training.configuration.keys import ROOT
from training.process.torch_build import LEAST_DRIVER, SUPPORTED

# What was run, with where; log/ has the days. Whatever else is named has wheels, by pip download.
TESTED_PYTHONS = {(3, 11): "CPU", (3, 12): "H100, H200"}
TESTED_TORCHES = {(2, 11): "CPU, H100, H200", (2, 12): "CPU", (2, 13): "CPU"}
TESTED_DRIVER = "580 (CUDA 13; H100, H200)"
NEWEST_PYTHON, NEWEST_TORCH = (3, 14), (2, 14)  # with wheels
SYSTEMS = (
    "Linux",
    "macOS on Apple silicon, its CPU: `device='mps'` is refused; Windows by WSL: the locks are of Unix",
)


def where_it_runs() -> str:
    """A Markdown table."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    needed = re.search(r'^requires-python = ">=(\d+)\.(\d+)"$', text, re.M)
    assert needed, "pyproject.toml states requires-python = '>=X.Y'"
    rows = [
        ("system", *SYSTEMS),
        ("Python", *_versions((int(needed[1]), int(needed[2])), NEWEST_PYTHON, TESTED_PYTHONS)),
        ("torch", *_versions(SUPPORTED[0], NEWEST_TORCH, TESTED_TORCHES)),
    ]
    others = [f"{driver} for CUDA {cuda} builds" for cuda, driver in LEAST_DRIVER.items()]
    rows.append(("NVIDIA driver", TESTED_DRIVER, f"the oldest: {', '.join(others)}"))
    head = ["| | tested | exists, not tested |", "|---|---|---|"]
    return "\n".join([*head, *(f"| {' | '.join(row)} |" for row in rows)])


def _versions(first: tuple[int, int], last: tuple[int, int], tested: dict[tuple[int, int], str]) -> list[str]:
    """[those that were tested, the others], from the first to the last minor version."""
    assert all(first <= version <= last for version in tested), tested
    every = [(first[0], minor) for minor in range(first[1], last[1] + 1)]
    return [
        ", ".join(f"{a}.{b} ({tested[a, b]})" for a, b in every if (a, b) in tested),
        ", ".join(f"{a}.{b}" for a, b in every if (a, b) not in tested),
    ]
