"""bench.recovery ends ranks of real runs, and states what their records say of the recovery."""

import json

import pytest
from support.helpers import TINY, launch, make_dataset, write_config

from bench import recovery
from common.errors import UserError
from common.run_records import load_record, run_records


@pytest.mark.parametrize(("fault", "processes"), [("SIGKILL", 2), ("machine", 1)])
def test_a_run_goes_on_after_a_fault_and_its_record_says_how_soon(tmp_path, fault, processes):
    keys = TINY | {"dataset": make_dataset(tmp_path / "tokens"), "dropout": 0.1, "lr_decay_iters": 10**6}
    config, folder = write_config(tmp_path / "run.py", **keys), tmp_path / "out"
    flags = [f"--processes={processes}", f"--fault={fault}", "--max_iters=1000000", f"--output={folder}"]
    launch([["-m", "bench.recovery", config, *flags]])
    found = json.loads((folder / "table.json").read_text())["faults"][fault]
    assert found["seconds_to_first_row"] > 0 and found["iterations_repeated"] > 0
    record = load_record(max(run_records(folder / "runs" / fault)))
    assert [attempt["recovery"] for attempt in record["attempts"]] == [None, found]
    assert len(record["superseded"]["training_iterations"]) == found["iterations_repeated"]
    assert f"| {fault} " in (folder / "table.md").read_text()
    assert not (folder / "runs" / fault / "checkpoints").exists()


def test_the_only_rank_cannot_notice_that_it_is_stopped(tmp_path):
    with pytest.raises(UserError, match="SIGSTOP: another rank must notice it"):
        recovery.main(["config/quickstart.py", "--fault=SIGSTOP", f"--output={tmp_path}"])
