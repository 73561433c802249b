"""However a run ends, checkpoint, record and loader are closed, and the first error is the one reported."""

import pytest
from support.helpers import TINY, last_run, make_dataset, write_config

import train
from common.errors import UserError
from training.batches.loader import Loader
from training.evaluate_and_save import EvaluateAndSave
from training.records.rows import Logger

CLOSED = (EvaluateAndSave, Logger, Loader)  # in this order


@pytest.fixture
def start(tmp_path, run):
    """start(): the exit status of a run in tmp_path/out."""
    dataset = make_dataset(tmp_path / "tokens")
    config = write_config(tmp_path / "config.py", **TINY, dataset=dataset, out_dir=tmp_path / "out")
    return lambda: run(config)


@pytest.fixture
def closed(monkeypatch):
    """The names of what was closed. closed.fail names those whose close() raises an error, after its work."""

    class Closed(list):
        fail = ()

    names = Closed()

    def note(owner):
        close = owner.close

        def noted(self, *arguments):
            names.append(owner.__name__)
            close(self, *arguments)
            if owner.__name__ in names.fail:
                raise OSError(f"{owner.__name__} cannot be closed")

        monkeypatch.setattr(owner, "close", noted)

    for owner in CLOSED:
        note(owner)
    return names


@pytest.mark.parametrize("owner", CLOSED)
def test_what_cannot_be_closed_keeps_nothing_else_open(start, closed, tmp_path, capfd, owner):
    closed.fail = (owner.__name__,)
    assert start() == 1
    assert closed == [each.__name__ for each in CLOSED]
    assert f"{owner.__name__} cannot be closed" in capfd.readouterr().err
    assert last_run(tmp_path / "out")["status"] == ("failed" if owner is EvaluateAndSave else "completed")


@pytest.mark.parametrize(("error", "status"), [(UserError("the cause"), 2), (RuntimeError("the cause"), 1)])
def test_first_error_is_reported_and_those_of_closing_are_named(
    start, closed, tmp_path, capfd, monkeypatch, error, status
):
    def fail(run):
        raise error

    monkeypatch.setattr(train, "loop", fail)
    closed.fail = tuple(owner.__name__ for owner in CLOSED)
    assert start() == status
    assert closed == [owner.__name__ for owner in CLOSED]
    output = capfd.readouterr()
    assert "the cause" in output.err and "cannot be closed" not in output.err
    assert ("Traceback" in output.err) == (status == 1), "a fault of ours shows where it happened"
    for owner in CLOSED:
        assert f"then, while the run was being closed: OSError: {owner.__name__} cannot" in output.out
    assert last_run(tmp_path / "out")["status"] == "failed"
