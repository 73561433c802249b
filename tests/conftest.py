"""Fixtures of every test file, and the rule for `gpu` tests."""

import gc
import json
import logging
import os
import signal

import pytest
import torch
from support.counted_flops import once_a_model
from support.helpers import TINY, WITHOUT_DATA, make_dataset, write_config


def pytest_configure(config):
    # Operations of tests are tiny: several threads mostly wait for each other, and take four times the CPU
    # time. And a forked process, which has none of these threads, would wait for them for ever.
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"  # of the processes that tests start
    if not getattr(config.option, "numprocesses", None):  # with xdist: its workers, which run the tests
        react_to_signals()


def react_to_signals():
    """Under nohup, or in the background of a script, SIGHUP or SIGINT is ignored, and every process that is
    started would ignore it, too. With a handler that does nothing, only this process does."""
    for number in (signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, lambda number, frame: None)


# The files that take longest, first: no process has such a file left when the others are done.
# With --no-loadscope-reorder, as `make test` runs it.
LONGEST = (
    *("runs/test_strategies", "unit/test_low_precision", "faults/test_starts", "runs/test_changed_model"),
    *("faults/test_preemption", "faults/test_second_look", "faults/test_killed_trackers"),
    *("faults/test_failures", "faults/test_checkpoint_saving", "faults/test_health"),
)


def pytest_collection_modifyitems(items):
    places = {f"tests/{name}.py": place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.nodeid.partition("::")[0], len(places)))  # stable
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


def pytest_report_teststatus(report):
    """The closing line counts the tests that found no test data apart from the other skips."""
    if report.skipped and WITHOUT_DATA in str(report.longrepr):
        return "skipped without test data", "s", "SKIPPED"


@pytest.fixture(scope="session")
def counted_flops():
    from training.records.utilization import count_flops

    return once_a_model(count_flops)


@pytest.fixture(autouse=True)
def log_as_before():
    """No test finds the handlers that start_logging added in an earlier one."""
    log = logging.getLogger("nanomfu")
    handlers, propagate, level = log.handlers[:], log.propagate, log.level
    yield
    if log.handlers != handlers:
        for handler in log.handlers:
            handler.close()
        log.handlers[:] = handlers
    log.propagate = propagate
    log.setLevel(level)


@pytest.fixture
def run(counted_flops, monkeypatch):
    """train.run(argv) in this process: gives the exit status, and leaves no signal handler behind."""
    import train
    from training import dry_run

    for module in (train, dry_run):
        monkeypatch.setattr(module, "count_flops", counted_flops)
    handlers_of = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield lambda *argv: train.run([str(arg) for arg in argv])
    for number, handler in handlers_of.items():
        signal.signal(number, handler)
    gc.unfreeze()


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


@pytest.fixture(scope="module")
def documents_run(tmp_path_factory):
    """A folder with a dataset of short documents and run.py, which trains on it."""
    from support.masked_documents import make_documents_run

    return make_documents_run(tmp_path_factory.mktemp("documents"))


@pytest.fixture
def graph_lines(caplog):
    """graph_lines(): what the log said about CUDA Graphs."""
    caplog.set_level(logging.INFO, logger="nanomfu")
    return lambda: [message for message in caplog.messages if "CUDA Graph" in message]
