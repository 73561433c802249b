"""Fixtures of the tests of faults: a run that saves twice, and a preparation in this process."""

import pytest
import torch
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


@pytest.fixture
def refuse_reading(monkeypatch):
    """From refuse_reading() on, no tensor's value may be read: a GPU would be waited for, and a graph could
    not be captured."""

    def refuse(*_):
        raise AssertionError("a tensor's value was read")

    def refuse_all() -> None:
        for name in ("item", "tolist", "__bool__", "__float__", "__int__", "__index__"):
            monkeypatch.setattr(torch.Tensor, name, refuse)

    return refuse_all
