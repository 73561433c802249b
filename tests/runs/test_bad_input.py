"""What a user can get wrong ends with one clear message and an exit status, not a traceback or a hang."""

import json
import re
import shutil
import sys

import pytest
import torch
from support.helpers import ROOT, TINY, last_run, make_dataset, run_train, write_config

import model

USER_ERROR, FAILED = 2, 1


@pytest.fixture
def folder(tmp_path):
    return make_dataset(tmp_path / "tokens")


@pytest.fixture
def config(tmp_path, folder):
    return write_config(tmp_path / "run.py", **TINY, dataset=folder, out_dir=tmp_path / "out")


@pytest.fixture
def refusal(run, config, capfd):
    """refusal(*flags): what train.py says about the tiny run with these flags, having refused it."""

    def refusal(*flags, config=config, status=USER_ERROR) -> str:
        got = run(*([config] if config else []), *flags)
        printed = capfd.readouterr()
        assert got == status, printed
        assert_clear(printed.err)
        return printed.err

    return refusal


def assert_clear(stderr: str):
    assert "Traceback" not in stderr
    assert stderr.startswith("error: ") and stderr.count("error: ") == 1, stderr


# --- as a user types it ---


@pytest.mark.parametrize(
    "arguments, wanted",
    [
        ([], ["no config file given", "usage: python train.py config/FILE.py", "config/quickstart.py"]),
        (["config/quickstart.py", "--learing_rate=1"], ["'learing_rate'", "did you mean 'learning_rate'?"]),
        (
            ["config/smoke_qwen3.py", "--dataset=absent/folder"],
            ["no folder absent/folder", "data/text/prepare.py"],
        ),
    ],
    ids=["no config", "typo", "no dataset"],
)
def test_command_that_cannot_run_exits_with_2_and_one_message(arguments, wanted):
    done = run_train(*arguments)
    assert done.returncode == USER_ERROR and done.stdout == ""
    assert_clear(done.stderr)
    assert all(text in done.stderr for text in wanted), done.stderr


@pytest.mark.parametrize(
    "flags, wanted",
    [
        (["--dataset=absent/folder"], "there is no folder absent/folder"),
        (["--use_zero1=True", "--use_fsdp=True"], "use_zero1=True and use_fsdp=True"),
    ],
    ids=["no dataset", "zero1 and fsdp"],
)
def test_no_rank_hangs_and_rank_0_says_why(config, flags, wanted):
    done = run_train(config, *flags, processes=2, timeout=60)
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
    done = run_train(config, "--vocab_size=60", processes=2, timeout=60)
    assert done.returncode != 0
    assert "contains token id 63, beyond the model's vocab_size=60" in done.stderr


# --- configuration ---


@pytest.mark.parametrize(
    "flags, wanted",
    [
        (["--batch_sise=4"], ["'batch_sise'", "did you mean 'batch_size'?"]),
        (["--attention_backend=flash_attn_9"], ["'flash_attn_9'", "flash_attn_3", "sdpa", "manual"]),
        (["--arch_preset=qwen9"], ["'qwen9'", "qwen3"]),
        (["--num_key_value_heads=3"], ["n_head=4", "num_key_value_heads=3"]),
    ],
    ids=lambda value: " ".join(value) if value[0].startswith("--") else "",
)
def test_setting_that_cannot_be_is_named(refusal, flags, wanted):
    message = refusal(*flags)
    assert all(text in message for text in wanted), message


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_cuda_without_a_gpu_says_what_to_use(refusal):
    message = refusal("--device=cuda")
    assert "device='cuda'" in message and "--device=cpu" in message


def test_wandb_that_is_not_installed_says_how_to_get_it(refusal, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    message = refusal("--wandb_log=True")
    assert "pip install -r requirements-trackers.txt" in message and "--wandb_log=False" in message


@pytest.mark.parametrize("inside", ["out", "out/below/it"])
def test_out_dir_that_cannot_be_written_is_named(refusal, tmp_path, inside):
    (tmp_path / "out").write_text("a regular file: nothing can be below it, for root neither")
    message = refusal(f"--out_dir={tmp_path / inside}")
    assert f"out_dir='{tmp_path / inside}' cannot be written" in message and "--out_dir" in message


# --- data ---


# --- checkpoints ---


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of 4 iterations with two checkpoints, at 2 and at 4."""
    root = tmp_path_factory.mktemp("trained")
    folder = make_dataset(root / "tokens")
    config = write_config(root / "run.py", **TINY, dataset=folder, out_dir=root / "out")
    done = run_train(config, "--eval_interval=2", "--keep_last=None")
    assert done.returncode == 0, done.stderr
    return root / "out"


@pytest.fixture
def checkpoints(trained, tmp_path):
    """A copy of that run's checkpoints in this test's out_dir."""
    return shutil.copytree(trained, tmp_path / "out") / "checkpoints"


RESUME = ("--init_from=resume", "--max_iters=6")


def test_resume_without_a_checkpoint_says_where_it_looked(refusal, tmp_path):
    message = refusal(*RESUME)
    assert f"{tmp_path / 'out' / 'checkpoints'} holds no complete checkpoint" in message
    assert "--init_from=scratch" in message


@pytest.mark.parametrize(
    "flag, field",
    [
        ("--n_layer=3", "n_layer: checkpoint 2, configuration 3"),
        (
            "--rope_scaling={'rope_type': 'linear', 'factor': 2}",
            "rope_scaling: checkpoint None, configuration {'rope_type': 'linear', 'factor': 2.0}",
        ),
    ],
)
def test_resume_into_another_architecture_names_the_field(refusal, checkpoints, flag, field):
    message = refusal(*RESUME, flag)
    assert "another architecture" in message and field in message


def test_a_damaged_checkpoint_is_named_in_log_and_record_and_an_older_one_used(
    run, config, checkpoints, tmp_path, capfd
):
    path = next((checkpoints / "step-00000004").glob("tensors-*"))
    path.write_bytes(path.read_bytes()[:-100])
    assert run(config, *RESUME) == 0
    said = capfd.readouterr().out
    assert f"step-00000004 is damaged: {path.name} has" in said
    assert f"Resuming from {checkpoints / 'step-00000002'}" in said
    info = last_run(tmp_path / "out")["startup_info"]
    assert info["checkpoints_set_aside"][0]["renamed"] == str(checkpoints / "step-00000004.corrupt")


def test_a_resume_with_damaged_checkpoints_only_is_refused(refusal, checkpoints):
    for folder in checkpoints.glob("step-*"):
        (folder / "state.json").write_text("{}")
    message = refusal(*RESUME)
    assert "none of the checkpoints can be trusted" in message and "step-00000002: state.json has" in message
    assert "start again with --init_from=scratch" in message


# --- divergence ---


def test_loss_that_is_no_number_ends_the_run_with_advice(refusal, monkeypatch):
    forward = model.Transformer.forward
    monkeypatch.setattr(model.Transformer, "forward", lambda *args: forward(*args) * float("nan"))
    message = refusal(status=FAILED)
    assert "the loss of iteration 0 is nan" in message and "learning_rate" in message
