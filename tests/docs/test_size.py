"""The project is small, and stays so: its budgets. Who needs more room deletes something, or says in the
commit why a budget grows."""

import subprocess

import pytest
from support.helpers import ROOT
from support.imports import graph, reached, read_sources

from training.configuration.choices import CHOICES
from training.configuration.keys import KEYS

DATED = ("LOG.md", "CHANGELOG.md", *(path.relative_to(ROOT).as_posix() for path in ROOT.glob("log/*.md")))


def files(pattern: str) -> list[str]:
    done = subprocess.run(["git", "ls-files", pattern], cwd=ROOT, capture_output=True, text=True, check=True)
    return [path for path in done.stdout.split() if (ROOT / path).is_file()]


def lines(paths) -> int:
    return sum((ROOT / path).read_text(encoding="utf-8").count("\n") for path in paths)


def reached_by_training() -> set[str]:
    """What train.py imports, wherever the import stands, and what the core's tables of
    training/configuration/choices.py name."""
    named = {f"{module.replace('.', '/')}.py" for one in CHOICES.values() for module in one.core.values()}
    return reached(graph(read_sources()), "train.py", *named)


MEASURES = {
    "lines of the product": lambda: lines(path for path in files("*.py") if not path.startswith("tests/")),
    "lines that train.py reaches": lambda: lines(reached_by_training()),
    "lines of ops/": lambda: lines(files("ops/*.py")),
    "lines of bench/": lambda: lines(files("bench/*.py")),
    "lines of configs": lambda: lines(files("config/*.py")),
    "lines of training/": lambda: lines(files("training/*.py")),
    "keys": lambda: len(KEYS),
    "words of the documents": lambda: sum(
        len((ROOT / path).read_text(encoding="utf-8").split()) for path in files("*.md") if path not in DATED
    ),
}
BUDGETS = {
    "lines of the product": 37_850,
    "lines that train.py reaches": 22_340,
    "lines of ops/": 4_540,
    "lines of bench/": 2_700,
    "lines of configs": 534,
    "lines of training/": 15_220,
    "keys": 109,
    "words of the documents": 29_500,
}


@pytest.mark.parametrize("name", BUDGETS)
def test_no_budget_is_exceeded(name):
    assert MEASURES[name]() <= BUDGETS[name], name
