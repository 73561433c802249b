"""What a user can get wrong ends with one clear message and an exit status, not a traceback or a hang."""

import json
import re

import pytest
import torch
from support.helpers import ROOT, TINY, make_dataset, run_train, write_config

USER_ERROR = 2


@pytest.fixture
def folder(tmp_path):
    return make_dataset(tmp_path / "tokens")


@pytest.fixture
def config(tmp_path, folder):
    return write_config(tmp_path / "run.py", **TINY, dataset=folder, out_dir=tmp_path / "out")


def assert_clear(stderr: str):
    assert "Traceback" not in stderr
    assert stderr.startswith("error: ") and stderr.count("error: ") == 1, stderr


ABSENT = (
    ["config/smoke_qwen3.py", "--dataset=absent/folder"],
    ["no folder absent/folder", "data/text/prepare.py"],
)
NO_CONFIG = [], ["no config file given", "usage: python train.py config/FILE.py", "config/quickstart.py"]


@pytest.mark.parametrize("arguments, wanted", [NO_CONFIG, ABSENT], ids=["no config", "no dataset"])
def test_command_that_cannot_run_exits_with_2_and_one_message(arguments, wanted):
    done = run_train(*arguments)
    assert done.returncode == USER_ERROR and done.stdout == ""
    assert_clear(done.stderr)
    assert all(text in done.stderr for text in wanted), done.stderr


TWO_STRATEGIES = ["--use_zero1=True", "--use_fsdp=True"], "use_zero1=True and use_fsdp=True"


@pytest.mark.parametrize("flags, wanted", [(ABSENT[0][1:], ABSENT[1][0]), TWO_STRATEGIES], ids=str)
def test_no_rank_hangs_and_rank_0_says_why(config, flags, wanted):
    done = run_train(config, *flags, processes=2)
    assert done.returncode == 1 and re.findall(r"exitcode  : (-?\d+)", done.stderr)[-1] == str(USER_ERROR)
    assert wanted in done.stderr.partition("[rank 0] error: ")[2]
    before_summary = done.stderr.partition("train.py FAILED")[0]
    assert before_summary.count(wanted) == 1, "every rank has this error; rank 0 alone says it"
    assert str(ROOT / "train.py") not in done.stderr, "a traceback of ours among torchrun's"


def test_fault_that_one_rank_alone_finds_ends_all_ranks(config, folder):
    """Rank 0 alone scans the tokens; rank 1 is by then waiting for it in the process group."""
    path = folder / "meta.json"
    meta = json.loads(path.read_text())
    path.write_text(json.dumps({**meta, "vocab_size": 1, "files": {}}))
    done = run_train(config, "--vocab_size=60", processes=2)
    assert done.returncode != 0
    assert "contains token id 63, beyond the model's vocab_size=60" in done.stderr


@pytest.mark.parametrize("inside", ["out", "out/below/it"])
def test_an_out_dir_that_cannot_be_written_and_a_missing_gpu_are_named(run, config, tmp_path, capfd, inside):
    (tmp_path / "out").write_text("a regular file: nothing can be below it, for root neither")
    refusals = [("out_dir", tmp_path / inside, "out_dir='{}' cannot be written")]
    refusals += [("device", "cuda", "device='{}'")] if not torch.cuda.is_available() else []
    for key, value, wanted in refusals:
        assert run(config, f"--{key}={value}") == USER_ERROR
        error = capfd.readouterr().err
        assert_clear(error)
        assert wanted.format(value) in error and f"--{key}" in error
