"""Fixtures of the tests of faults: a run that saves twice, and a preparation in this process."""

import pytest
from support.helpers import TINY, make_dataset, write_config
from support.preparation import run_parts_here, small_bpe


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out"


@pytest.fixture
def config(tmp_path, out):
    """Of a run that evaluates and saves after iterations 2 and 4."""
    keys = {**TINY, "max_iters": 4, "eval_interval": 2, "out_dir": out}
    return write_config(tmp_path / "run.py", **keys, dataset=make_dataset(tmp_path / "tokens"))


@pytest.fixture
def bpe(tmp_path):
    return small_bpe(tmp_path / "bpe")


@pytest.fixture
def here(monkeypatch):
    """Units of a dataset are made in this process."""
    monkeypatch.setattr("data.pipeline.preparation.run_parts", run_parts_here)
