"""Fixtures of every test file, and the rule for `gpu` tests."""

import gc
import json
import logging
import signal

import pytest
import torch
from support.helpers import TINY, WITHOUT_DATA, make_dataset, write_config


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


def pytest_report_teststatus(report):
    """The closing line counts the tests that found no test data apart from the other skips."""
    if report.skipped and WITHOUT_DATA in str(report.longrepr):
        return "skipped without test data", "s", "SKIPPED"


@pytest.fixture
def run():
    """train.run(argv) in this process, on one thread: gives the exit status, and leaves no handler behind."""
    import train

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tiny operations; several threads only wait for each other on a busy machine

    handlers_of = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    log = logging.getLogger("nanomfu")
    handlers, propagate, level = log.handlers[:], log.propagate, log.level
    yield lambda *argv: train.run([str(arg) for arg in argv])
    for number, handler in handlers_of.items():
        signal.signal(number, handler)
    for handler in log.handlers:
        handler.close()
    log.handlers[:], log.propagate = handlers, propagate
    log.setLevel(level)
    gc.unfreeze()
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def uninterrupted(tmp_path_factory):
    """A tiny run of two processes to which nothing happens, for the tests in which something does."""
    from support.faults import prepare, run_with_fault

    folder = tmp_path_factory.mktemp("uninterrupted")
    done = run_with_fault(prepare(folder), folder / "out")
    assert done.status == 0, done.output[-3000:]
    return done


@pytest.fixture
def trained(run, tmp_path):
    """The out_dir of a run on characters, evaluated and saved twice."""
    tokens = make_dataset(tmp_path / "tokens")
    meta = json.loads((tokens / "meta.json").read_text())
    meta["tokenizer"] = {"kind": "char", "name": "char", "chars": "".join(map(chr, range(48, 48 + 64)))}
    (tokens / "meta.json").write_text(json.dumps(meta | {"format": 1, "eot_id": None, "source": "test"}))
    keys = {**TINY, "dataset": str(tokens), "out_dir": str(tmp_path / "out"), "eval_interval": 2}
    assert run(write_config(tmp_path / "run.py", **keys)) == 0
    return tmp_path / "out"
