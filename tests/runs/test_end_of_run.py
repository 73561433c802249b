"""However a run ends, checkpoint, record and loader are closed, and the first error is the one reported. A
run that completes is evaluated where it ends, and says what came out and what can be done with it."""

import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys

import pytest
import torch
from support.helpers import HANG_S, ROOT, TINY, checkpoint_tensors, last_run, make_dataset, write_config

import train
from common.errors import UserError
from common.processes import python_name
from training import evaluate_and_save
from training.batches.loader import Loader
from training.configuration.keys import TrainConfig
from training.evaluate_and_save import EvaluateAndSave
from training.process import launch
from training.records.rows import Logger
from training.records.summary import resume_command

CLOSED = (EvaluateAndSave, Logger, Loader)  # in this order


@pytest.fixture
def start(tmp_path, run):
    """start(): the exit status of a run in tmp_path/out."""
    dataset = make_dataset(tmp_path / "tokens")
    config = write_config(tmp_path / "config.py", **TINY, dataset=dataset, out_dir=tmp_path / "out")
    return lambda *flags: run(config, *flags)


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


# --- the last evaluation ---


def evaluated(out) -> list[int]:
    return [step["iter"] for step in last_run(out)["eval_steps"]]


def saved(out) -> list[str]:
    return sorted(path.name for path in out.glob("checkpoints/step-*"))


def test_the_last_iteration_is_always_evaluated(start, tmp_path):
    assert start("--max_iters=5", "--eval_interval=2") == 0
    assert evaluated(tmp_path / "out") == [2, 4, 5]
    assert last_run(tmp_path / "out")["checkpoints"][-1]["val_loss"] is not None
    assert start("--max_iters=8", "--eval_interval=2", "--init_from=resume") == 0
    assert evaluated(tmp_path / "out") == [2, 4, 5, 6, 8]


def test_without_evaluations_there_is_no_last_one(start, tmp_path):
    assert start("--eval_interval=0") == 0
    assert evaluated(tmp_path / "out") == []


@pytest.mark.parametrize(
    ("flags", "steps"),
    [
        (["--eval_interval=100"], []),
        (["--eval_interval=100", "--eval_at_start=True"], ["step-00000005"]),
        (["--eval_interval=3", "--keep_last=1"], ["step-00000005"]),
    ],
)
def test_a_run_too_short_for_a_best_saves_none(start, tmp_path, flags, steps):
    """The model learns, so that each evaluation is a new best: of one evaluation alone, that says nothing."""
    assert start("--max_iters=5", "--always_save_checkpoint=False", *flags) == 0
    assert evaluated(tmp_path / "out")[-1] == 5
    assert saved(tmp_path / "out")[-1:] == steps


def test_an_equal_validation_loss_is_no_new_best(start, tmp_path, monkeypatch):
    monkeypatch.setattr(evaluate_and_save, "evaluate", lambda *_: {"train": 3.0, "val": 3.0})
    assert start("--max_iters=6", "--eval_interval=2", "--always_save_checkpoint=False") == 0
    assert evaluated(tmp_path / "out") == [2, 4, 6] and saved(tmp_path / "out") == ["step-00000002"]


def test_the_last_evaluation_changes_no_bit_of_the_training(start, tmp_path, monkeypatch):
    """With dropout, whose random numbers a resume continues: after a last evaluation that the longer run does
    not have, and after a stop between the last update and it."""
    kept = ("--eval_interval=4", "--dropout=0.2", "--lr_decay_iters=9", "--keep_last=None")
    tensors = {}
    for name, attempts in {"whole": [9], "longer": [6, 9], "stopped": ["stop", 9]}.items():
        out = tmp_path / name
        for number, last in enumerate(attempts):
            flags = [f"--out_dir={out}", *kept, *["--init_from=resume"] * (number > 0)]
            with monkeypatch.context() as patched:
                if last == "stop":
                    stop_in_the_last_evaluation(patched)
                assert start(*flags, f"--max_iters={last if last != 'stop' else 9}") == (
                    128 + signal.SIGTERM if last == "stop" else 0
                )
        assert evaluated(out)[-1] == 9 and len(evaluated(out)) == len(set(evaluated(out)))
        tensors[name] = checkpoint_tensors(out / "checkpoints/step-00000009")
    for name in ("longer", "stopped"):
        assert tensors[name].keys() == tensors["whole"].keys()
        for key, value in tensors["whole"].items():
            assert torch.equal(tensors[name][key], value), (name, key)


def stop_in_the_last_evaluation(monkeypatch) -> None:
    evaluate = EvaluateAndSave.evaluate

    def stopped(self, iteration, learning_rate):
        if iteration == self.config.max_iters:
            self.watchdog._handle_signal(signal.SIGTERM)
            self.watchdog.check(iteration, at_once=True)
        return evaluate(self, iteration, learning_rate)

    monkeypatch.setattr(EvaluateAndSave, "evaluate", stopped)


# --- the summary ---


def summary(output: str) -> dict[str, str]:
    """Of the last five lines."""
    return dict(re.split(r": +", line, maxsplit=1) for line in output.splitlines()[-5:])


def test_a_run_ends_with_its_summary_in_five_lines(start, tmp_path, capfd):
    flags = ("--eval_interval=2", "--max_iters=6", "--peak_tflops=0.04")
    assert start(*flags) == 0
    found, record = summary(capfd.readouterr().out), last_run(tmp_path / "out")
    mfu = record["summary"]["mfu_percent"]
    assert re.fullmatch(r"[\d.]+ s for 6 iterations; median MFU (.*)", found["Time"])
    assert found["Time"].endswith(f"{mfu['median']:.2f} %" if mfu else "n/a")
    best, last = record["summary"]["best_val_loss"], record["training_iterations"][-1]["loss"]
    assert found["Best loss"] == f"{best:.4f} (validation), last training loss {last:.4f}"
    assert list(found) == ["Time", "Best loss", "To resume", "To sample", "To plot"]
    assert shlex.split(found["To sample"]) == [python_name(), "sample.py", f"--out_dir={tmp_path / 'out'}"]
    _, script, path = shlex.split(found["To plot"])
    assert (ROOT / script).is_file() and path == str(next((tmp_path / "out").glob("run_*.json")))


def test_a_run_that_a_signal_ends_counts_iterations_that_have_no_row(start, tmp_path, capfd, monkeypatch):
    evaluate = EvaluateAndSave.evaluate

    def stopped(self, iteration, learning_rate):
        if iteration == 4:
            self.watchdog._handle_signal(signal.SIGTERM)
        return evaluate(self, iteration, learning_rate)

    monkeypatch.setattr(EvaluateAndSave, "evaluate", stopped)
    start("--eval_interval=4", "--log_interval=100", "--max_iters=200")
    found, record = summary(capfd.readouterr().out), last_run(tmp_path / "out")
    done = record["checkpoints"][-1]["iter"]
    assert done > record["training_iterations"][-1]["iter"] + 1
    assert f" for {done} iterations; " in found["Time"]


@pytest.mark.parametrize(
    ("losses", "flags", "said"),
    [
        ([4.0], ["--eval_interval=0"], "not evaluated after the first update"),
        ([4.0, 5.0], ["--eval_interval=100"], "4.0000 (validation) before the first update"),
        ([4.0, 3.0], ["--eval_interval=100"], "3.0000 (validation)"),
    ],
)
def test_the_loss_of_the_model_before_training_is_not_called_the_best(
    losses, flags, said, start, capfd, monkeypatch
):
    found = iter([{"train": loss, "val": loss} for loss in losses])
    monkeypatch.setattr("training.evaluate_and_save.evaluate", lambda *_: next(found))
    assert start("--eval_at_start=True", *flags) == 0
    assert summary(capfd.readouterr().out)["Best loss"].startswith(f"{said}, last training loss ")
    assert next(found, None) is None


def test_the_command_that_resumes_trains_as_far_again(start, run, tmp_path, capfd):
    assert start("--max_iters", "3") == 0
    python, script, *arguments = shlex.split(summary(capfd.readouterr().out)["To resume"])
    assert (python, script) == (python_name(), "train.py")
    assert run(*arguments) == 0
    assert last_run(tmp_path / "out")["training_iterations"][-1]["iter"] == 5


def test_without_a_checkpoint_or_a_record_the_summary_says_so(start, capfd):
    assert start("--always_save_checkpoint=False", "--save_log_to_json=False") == 0
    found = summary(capfd.readouterr().out)
    assert found["To resume"] == found["To sample"] == "no checkpoint was saved"
    assert found["To plot"] == "no record was saved (save_log_to_json=False)"
    assert found["Best loss"].startswith("not evaluated, last training loss ")


def test_the_command_that_resumes_starts_as_many_processes(monkeypatch):
    config = TrainConfig(max_iters=10)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    monkeypatch.setattr(launch, "machine_number", lambda: (0, 1))
    command = resume_command(["--init_from", "auto", "config/a.py", "--resume_from=best"], 5, config)
    assert command == "torchrun --standalone --nproc_per_node=8 train.py config/a.py --init_from=resume"


@pytest.mark.parametrize("program", ["train.py", "sample.py"])
def test_a_python_without_torch_is_told_which_one_to_use(program):
    """-S: without the installed packages, as where no environment is active."""
    command = [sys.executable, "-S", program, "config/quickstart.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 2 and "source .venv/bin/activate" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    "arguments", [["train.py", "--dry_run", "config/quickstart.py"], ["sample.py", "-h"]]
)
def test_a_terminal_is_told_at_once_that_torch_is_loaded(arguments):
    """By a pseudo-terminal; a file or a pipe gets no such line."""
    command = [sys.executable, *arguments]
    main, terminal = os.openpty()
    done = subprocess.run(
        command, cwd=ROOT, stderr=terminal, stdout=subprocess.PIPE, text=True, timeout=HANG_S
    )
    os.close(terminal)
    assert done.returncode == 0 and "loading torch" not in done.stdout
    assert os.read(main, 100).startswith(b"loading torch ...")
    os.close(main)


def test_a_terminal_shows_the_start_up_report_in_80_columns_and_a_pipe_gets_whole_rows():
    command = [
        sys.executable,
        "train.py",
        "config/full_qwen3_1.8b_b200_optimal.py",
        "--dry_run",
        "--gpu=H100",
    ]
    options = {"cwd": ROOT, "stderr": subprocess.DEVNULL}
    piped = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=HANG_S, **options).stdout
    main, terminal = os.openpty()
    with subprocess.Popen(command, stdout=terminal, **options) as process, open(main, "rb") as screen:
        os.close(terminal)
        shown = b""
        with contextlib.suppress(OSError):  # the process has ended
            while part := screen.read1():
                shown += part
    lines = shown.decode().splitlines()
    assert process.returncode == 0 and "Fits: " in piped
    assert max(map(len, lines)) <= 80 < max(map(len, piped.splitlines()))
    assert " ".join(shown.decode().split()) == " ".join(piped.split())
