"""tools.tune as a user runs it, on the CPU: from a config to the tuned one, and what it refuses."""

import subprocess
import sys

import pytest
import torch
from support.helpers import SMALL, TINY, last_run, make_dataset, write_config

from bench import runner
from bench.process import Outcome
from common.command import INTERRUPTED, USER_ERROR, run_command
from tools.tune import __main__ as tool
from tools.tune import space, tuned_config
from training.configuration.files_and_flags import load_config
from training.configuration.keys import ROOT
from training.hardware.capability import lookup

# two trials are left: micro-batches of 4, as the config has it, and of 2
FEW = (
    "--iters=2",
    "--warmup=1",
    "--compile=False",
    "--use_dataloader=False",
    "--activation_checkpointing=none",
)


@pytest.fixture
def config(tmp_path):
    keys = {**TINY, "dataset": make_dataset(tmp_path / "tokens"), "peak_tflops": 1.0}
    return write_config(tmp_path / "tiny.py", **keys)


@pytest.fixture
def in_process(run, monkeypatch):
    """Trials train in this process; started: their arguments."""
    started = []

    def run_process(command, log, timeout_s, keep_cache=False):
        target = command[command.index("train.py") :]
        started.append(target)
        status = run(*target[1:])
        log.write_text("error: as its log says\n")
        return Outcome(1.0, None if status == 0 else "as its log says")

    monkeypatch.setattr(runner, "run_process", run_process)
    return started


def tune(config, tmp_path, *arguments):
    files = (f"--out_dir={tmp_path / 'out'}", f"--write={tmp_path / 'tuned_tiny.py'}")
    return run_command(tool.main, [str(config), *files, *arguments])


def test_the_tuned_config_trains_with_the_tokens_of_the_config(config, tmp_path, in_process, run, capsys):
    assert tune(config, tmp_path, *FEW) == 0
    printed = capsys.readouterr().out
    tuned = tmp_path / "tuned_tiny.py"
    text = tuned.read_text()
    assert "conservative" in printed and "Chosen: " in printed
    for word in (tuned_config.MARK, "python -m tools.tune", "tokens/s", "MFU", "torch", "Measured 20"):
        assert word in text, word
    assert "\n\n\n" not in text and not any(line.endswith(" ") for line in text.splitlines())
    count = len(in_process)
    trained = [load_config(target[1:]) for target in in_process]
    assert {one.samples_per_iter(1) for one in trained} == {4}
    assert {one.micro_batch for one in trained} >= {1, 4}, "the careful one, and the config as it is"
    assert tune(config, tmp_path, *FEW) == 0 and len(in_process) == count, "no finished trial is run again"
    assert run(tuned, f"--out_dir={tmp_path / 'run'}") == 0
    record = last_run(tmp_path / "run")["config"]
    assert record["tokens_per_iter"] == 128 and not record["compile"]
    assert record["eval_batch_size"] == 4, "as before, whatever the micro-batch"
    assert record["learning_rate"] == TINY["learning_rate"], "what was not tuned is as in the config"


@pytest.mark.parametrize("trial", range(3))
def test_ctrl_c_writes_the_best_so_far(trial, config, tmp_path, in_process, monkeypatch, capsys):
    """During the first trial there is nothing to write."""
    clean = runner.run_process

    def interrupted(*arguments):
        if len(in_process) == trial:
            raise KeyboardInterrupt
        return clean(*arguments)

    monkeypatch.setattr(runner, "run_process", interrupted)
    assert tune(config, tmp_path, *FEW) == INTERRUPTED
    printed, tuned = capsys.readouterr(), tmp_path / "tuned_tiny.py"
    assert len(in_process) == trial and tuned.exists() == (trial > 0)
    if trial:
        assert "the same command goes on from here" in printed.out
        assert printed.err == "interrupted; the result is the best so far\n"
        assert load_config([str(tuned)]).tokens_per_iter == 128
    monkeypatch.setattr(runner, "run_process", clean)
    assert tune(config, tmp_path, *FEW) == 0
    assert "over before the last rung" not in capsys.readouterr().out


def test_the_plan_starts_nothing_and_writes_nothing(config, tmp_path, in_process, capsys):
    before = sorted(tmp_path.iterdir())
    assert tune(config, tmp_path, "--dry") == 0
    printed = capsys.readouterr().out
    assert not in_process and sorted(tmp_path.iterdir()) == before
    for word in ("the config as it is", "conservative", "recomputation", "GiB est.", "About"):
        assert word in printed, word


def test_a_plan_is_for_any_gpu(capsys):
    flags = [
        "config/full_qwen3_1.8b_b200_optimal.py",
        "--dry",
        "--gpu=B200",
        "--nproc=8",
        "--allow=fp8_tensorwise+head",
    ]
    assert run_command(tool.main, flags) == 0
    printed = capsys.readouterr().out
    for word in (
        "8 x NVIDIA B200",
        "4,194,304 tokens",
        "fp8_tensorwise+head",
        "ZeRO-1",
        "CUDA Graphs",
        "16 x 16",
    ):
        assert word in printed, word


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["config/no_such.py"], "there is no config 'config/no_such.py'; shipped: config/"),
        (["config/quickstart.py", "--allow=fp9"], "--allow: 'fp9' is not one of fp32, bf16"),
        (
            ["config/quickstart.py", "--allow=fp8_tensorwise"],
            "--allow=fp8_tensorwise: the CPU cannot compute",
        ),
        (
            ["config/full_qwen3_1.8b_optimal.py", "--nproc=8"],
            "--nproc=8 needs as many GPUs, but torch sees 2",
        ),
        (["config/quickstart.py", "--gpu=H100"], "belongs to a plan; add --dry"),
        (["config/quickstart.py", "--dry", "--gpu=H100"], "--gpu=H100 and device='cpu' contradict"),
        (["config/quickstart.py", "--dry_run=True"], "dry_run is the benchmark's to set; use --dry"),
        (["config/quickstart.py", "--learning_rat=1"], "did you mean 'learning_rate'?"),
        (["config/quickstart.py", "--write=LICENSE"], "was not written by tools.tune"),
        (["config/quickstart.py", "--write=no/such/folder.py"], "no/such is not there"),
        (["config/qwen3_4b.py", "--dry", "--gpu=T4"], "no setting fits: the smallest"),
    ],
)
def test_bad_input_is_one_clear_line(arguments, message, in_process, monkeypatch, capsys):
    monkeypatch.setattr(space.torch.cuda, "device_count", lambda: 2)
    assert run_command(tool.main, arguments) == USER_ERROR
    error = capsys.readouterr().err
    assert message in error and len(error.splitlines()) == 1 and not in_process


def test_a_gpu_that_others_use_is_refused(monkeypatch):
    monkeypatch.setattr(space, "_in_another_process", lambda function, processes: [0.9, 40.0][:processes])
    space.require_free_gpus(1)
    with pytest.raises(ValueError, match="GPU 1 is in use: 40.0 GiB"):
        space.require_free_gpus(2)


@pytest.mark.parametrize(("budget", "message"), [("5s", "not between 10s"), ("soon", "no time such as 90s")])
def test_a_budget_that_no_trial_fits_in_is_refused(budget, message, capsys):
    assert run_command(tool.main, ["config/quickstart.py", f"--budget={budget}"]) == USER_ERROR
    assert message in capsys.readouterr().err


def test_a_precision_that_the_gpu_only_emulates_is_refused(monkeypatch, config):
    base = load_config([str(config)])
    machine = space.Machine(space.device_memory(space.torch.device("cpu"), 1), lookup((9, 0), "H200"), {}, 1)
    with pytest.raises(ValueError, match="H200 cannot compute mxfp8, or only emulates it"):
        space.Space(base, 1, machine, ("mxfp8",))


def test_a_file_of_somebody_else_is_not_replaced(tmp_path):
    (tmp_path / "mine.py").write_text("n_layer = 2\n")
    (tmp_path / "link.py").symlink_to(tmp_path / "ours.py")
    (tmp_path / "ours.py").write_text(f"{tuned_config.MARK}\n")
    for name in ("mine.py", "link.py"):
        with pytest.raises(ValueError):
            tuned_config.check_path(tmp_path / name)
    tuned_config.check_path(tmp_path / "ours.py")
    tuned_config.check_path(tmp_path / "new.py")


@pytest.mark.gpu
def test_a_tiny_model_is_tuned_on_a_gpu(tmp_path):
    """A minute at most: real processes, and a result that states the memory of the GPU."""
    keys = {**SMALL, "dataset": make_dataset(tmp_path / "tokens"), "batch_size": 16}
    path = write_config(tmp_path / "small.py", **keys)
    torch.cuda.empty_cache()  # what earlier tests have left: tools.tune wants a free GPU
    command = [sys.executable, "-m", "tools.tune", str(path), "--budget=30s", f"--out_dir={tmp_path / 'out'}"]
    command += [f"--write={tmp_path / 'tuned.py'}", "--compile=True", "--iters=20"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    if "is in use" in done.stdout + done.stderr:
        pytest.skip("tests of other processes use the GPU; run this one alone: -p no:xdist, or -n 1")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    header = (tmp_path / "tuned.py").read_text()
    assert (
        "GPU: 1 x NVIDIA" in header and "MFU" in header and "by the estimate" not in header.split("GiB.")[0]
    )
    assert load_config([str(tmp_path / "tuned.py")]).samples_per_iter is not None
