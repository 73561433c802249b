"""bench.recovery ends ranks of real runs and states how soon they go on."""

import json
import sys

import pytest
from support import warm_python
from support.helpers import HANG_S, ROOT, TINY, make_dataset, write_config

from bench import recovery
from common.errors import UserError


@pytest.fixture
def bench(tmp_path):
    """bench(*options): the JSON that it saves, of a tiny run."""
    keys = TINY | {"dataset": make_dataset(tmp_path / "tokens"), "dropout": 0.1, "max_iters": 10**6}
    config = write_config(tmp_path / "run.py", **{**keys, "lr_decay_iters": 10**6})

    def bench(*options) -> dict:
        command = [sys.executable, "-m", "bench.recovery", config, f"--output={tmp_path / 'out'}"]
        done = warm_python.run(
            [*map(str, command), *options], cwd=ROOT, capture_output=True, text=True, timeout=HANG_S
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads((tmp_path / "out/table.json").read_text())

    return bench


def test_a_killed_rank_and_an_error_are_recovered_from_and_the_record_agrees(bench):
    found = bench("--processes=2", "--fault=SIGKILL", "--fault=exception")["faults"]
    for fault in ("SIGKILL", "exception"):
        result = found[fault]
        seconds, record = result["seconds_to_first_iteration"], result["record"]
        assert seconds > 0 and result["seconds_repeated"] > 0
        assert list(result["steps"])[:3] == ["ranks end", "python", "imports"]
        assert sum(result["steps"].values()) == pytest.approx(seconds)
        # the last row came at most an iteration before the fault
        assert record["seconds_to_first_row"] == pytest.approx(seconds, abs=2)
        assert record["iterations_repeated"] >= result["iterations_repeated"] > 0
        assert record["seconds_repeated"] > 0


def test_a_lost_machine_is_another_start(bench):
    found = bench("--fault=machine")["faults"]["machine"]
    assert found["seconds_to_first_iteration"] > found["steps"]["imports"] > 0


def test_the_only_rank_cannot_notice_that_it_is_stopped(tmp_path):
    with pytest.raises(UserError, match="SIGSTOP: another rank must notice it"):
        recovery.main(["config/quickstart.py", "--fault=SIGSTOP", f"--output={tmp_path}"])
