"""max_epochs ends a run after so many times through the data, for any number of processes and resumes."""

import numpy as np
import pytest
from support.helpers import ROOT, TINY, last_run, make_dataset, run_in_one_launch, write_config

from common.errors import UserError
from training.configuration.files_and_flags import load_config
from training.configuration.keys import TrainConfig
from training.optimization.schedule import end_after_epochs

WINDOWS = 10  # of 32 tokens


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("epochs")
    make_dataset(folder / "data", train_tokens=WINDOWS * 32 + 1, val_tokens=200)
    keys = {**TINY, "dataset": folder / "data", "max_iters": 1000, "lr_decay_iters": None, "warmup_iters": 0}
    write_config(folder / "run.py", **keys)
    return folder


def rows(out) -> list[int]:
    return [row["iter"] for row in last_run(out)["training_iterations"]]


ENDS = [(1, 10, 4, 3), (2, 10, 4, 5), (1, 12, 4, 3), (0.1, 30, 1, 3), (0.5, 10, 4, 2), (0, 10, 4, 0)]
# the last is the published continued pretraining: 22,206 sequences, of which one has no target
ENDS += [(3, 2, 100, 1), (4, 22_205, 32, 2776)]


@pytest.mark.parametrize(("max_epochs", "epoch", "per_iteration", "iterations"), ENDS)
def test_the_last_iteration_begins_another_epoch_rather_than_leave_samples_out(
    max_epochs, epoch, per_iteration, iterations
):
    config = TrainConfig(max_epochs=max_epochs)
    assert end_after_epochs(config, epoch, per_iteration).max_iters == iterations
    config = TrainConfig(max_iters=2, max_epochs=max_epochs)
    assert end_after_epochs(config, epoch, per_iteration).max_iters == min(2, iterations)


def test_a_resume_with_other_batches_counts_the_samples_that_are_left():
    config = TrainConfig(max_epochs=2.0)
    assert end_after_epochs(config, 100, 10, iteration=5, samples_seen=50).max_iters == 20
    assert end_after_epochs(config, 100, 30, iteration=5, samples_seen=50).max_iters == 10
    assert end_after_epochs(config, 100, 30, iteration=9, samples_seen=210).max_iters == 9


def test_a_run_ends_after_its_epochs_and_says_so(run, folder, capsys):
    out = folder / "two"
    flags = [f"--out_dir={out}", "--max_epochs=2", "--eval_interval=3", "--keep_last=None"]
    assert run(folder / "run.py", *flags) == 0
    record = last_run(out)
    assert rows(out) == [0, 1, 2, 3, 4] and record["status"] == "completed"
    assert (record["config"]["max_iters"], record["config"]["max_epochs"]) == (5, 2.0)
    assert record["config"]["lr_decay_iters"] == 5
    assert record["startup_info"]["data"]["sources"][0]["samples_per_epoch"] == WINDOWS
    assert record["startup_info"]["data"]["sources"][0]["epochs"] == 2.0
    assert [step["iter"] for step in record["eval_steps"]] == [3, 5]
    assert (out / "checkpoints" / "step-00000005").is_dir()
    assert "max_epochs=2 of 10 samples" in capsys.readouterr().out

    assert run(folder / "run.py", *flags[:1], "--max_epochs=3", "--init_from=resume") == 0
    assert rows(out) == list(range(8))  # 30 samples, 4 in an iteration
    assert last_run(out)["config"]["lr_decay_iters"] == 5  # of the first attempt


def test_two_processes_end_where_one_does(folder):
    flags = ["--max_epochs=2", "--batch_size=2", f"--out_dir={folder / 'processes'}"]
    run_in_one_launch(folder, [[folder / "run.py", *flags]], processes=2)
    assert rows(folder / "processes") == [0, 1, 2, 3, 4]


def test_a_dry_run_says_that_epochs_are_counted_in_the_data_and_a_mixture_is_refused(run, folder, capsys):
    assert run(ROOT / "config/quickstart.py", "--max_epochs=4", "--dry_run=True") == 0
    assert "at most 300" in (said := capsys.readouterr().out) and "max_epochs=4 is counted" in said
    argv = [str(folder / "run.py"), "--max_epochs=1", "--dataset=a:0.5,b:0.5"]
    with pytest.raises(UserError, match="each of its datasets has epochs of its own"):
        load_config(argv)


def test_packed_windows_have_epochs_of_their_own(run, folder):
    data = make_dataset(folder / "packed", train_tokens=2000, val_tokens=200, eot_id=0)
    flags = f"--dataset={data}", "--packing=truncate", "--max_epochs=1", f"--out_dir={folder / 'out-packed'}"
    assert run(folder / "run.py", *flags) == 0
    source = last_run(folder / "out-packed")["startup_info"]["data"]["sources"][0]
    assert source["samples_per_epoch"] == source["packing"]["windows"]
    assert len(rows(folder / "out-packed")) == int(np.ceil(source["packing"]["windows"] / 4))
