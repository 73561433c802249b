"""Stop requests: SIGTERM, SIGUSR1, Ctrl-C, a lost terminal; whenever, to any process."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from support import warm_python
from support.faults import ITERATIONS, prepare, run_with_fault
from support.helpers import ROOT

from training import evaluate_and_save
from training.faults.consensus import Consensus
from training.faults.replica_check import ReplicaCheck
from training.process.world import World

pytestmark = pytest.mark.stop

GRACE_SECONDS = 30  # torchrun's
ARRIVAL_SECONDS = 0.3  # until a signal has reached the thread that waits for it


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("preemption")


@pytest.fixture(scope="module")
def config(folder):
    return prepare(folder)


# --- several processes ---


def test_sigterm_to_torchrun_saves_and_a_resume_ends_bit_equal(config, folder, uninterrupted):
    """With data workers, which the signal reaches as well."""
    out = folder / "torchrun"
    stopped = run_with_fault(config, out, "--use_dataloader=True", fault="SIGTERM torchrun 10")
    assert stopped.status == 1, stopped.output[-3000:]
    assert stopped.steps[-1] in (11, 12) and stopped.seconds < GRACE_SECONDS
    assert f"stopped by SIGTERM before iteration {stopped.steps[-1]}" in stopped.output
    assert stopped.record()["status"] == "interrupted"

    resumed = run_with_fault(config, out, "--init_from=resume")
    assert resumed.status == 0 and resumed.steps[-1] == ITERATIONS, resumed.output[-3000:]
    assert resumed.digest() == uninterrupted.digest()


def test_sigusr1_to_one_rank_during_an_evaluation_stops_all_ranks(config, folder):
    stopped = run_with_fault(config, folder / "evaluation", "--eval_iters=50", fault="SIGUSR1 1 evaluation")
    assert stopped.status == 1 and stopped.steps == [8], stopped.output[-3000:]
    assert "exitcode  : 138" in stopped.output
    assert stopped.record()["eval_steps"] == [], "it was not completed"


CASES = [
    (signal, who, where, flags)
    for signal in ("SIGTERM", "SIGUSR1")
    for who in ("torchrun", "0", "1")
    for where, flags in {
        "0": [],
        "9": [],
        "10": ["--use_dataloader=True", "--use_fsdp=True"],
        "evaluation": ["--eval_iters=50"],
        "saving": [],
        "start": [],
    }.items()
]


@pytest.mark.chaos
@pytest.mark.parametrize(("name", "who", "where", "flags"), CASES)
def test_a_stop_request_at_any_moment_loses_nothing(config, folder, uninterrupted, name, who, where, flags):
    out = folder / f"{name}-{who}-{where}"
    torchrun = ("--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1",)
    stopped = run_with_fault(config, out, *flags, fault=f"{name} {who} {where}", torchrun=torchrun)
    assert stopped.status == 1 and stopped.seconds < GRACE_SECONDS, stopped.output[-3000:]
    if where == "start":
        assert stopped.steps == []
        return
    if where == "0" and not stopped.steps:  # a rank had not come to its first iteration yet
        assert "before the first iteration: there is nothing to save" in stopped.output
        return
    began = {"evaluation": 8, "saving": 8}.get(where) or int(where)
    assert began <= stopped.steps[-1] <= began + 2

    resumed = run_with_fault(config, out, "--init_from=resume", *flags)
    assert resumed.status == 0, resumed.output[-3000:]
    if "--use_fsdp=True" not in flags:  # which rounds in its own way
        assert resumed.digest() == uninterrupted.digest()


@pytest.mark.chaos
@pytest.mark.parametrize("who", ["torchrun", "1"])
def test_a_stop_request_while_the_first_step_compiles_is_kept(config, folder, who):
    """The compiler's processes get torchrun's signal, too. It may take longer than 30 s."""
    out = folder / f"compile-{who}"
    stopped = run_with_fault(
        config,
        out,
        "--compile=True",
        fault=f"SIGTERM {who} 0",
        timeout=250,
        TORCHINDUCTOR_CACHE_DIR=f"{out}-cache",
        TORCH_ELASTIC_SHUTDOWN_TIMEOUT="200",
    )
    assert stopped.status == 1 and stopped.steps and stopped.steps[-1] in (1, 2), stopped.output[-3000:]


@pytest.mark.chaos
def test_ranks_whose_torchrun_is_killed_save_and_end(config, folder):
    ended = run_with_fault(config, folder / "orphans", "--max_iters=2000", fault="SIGKILL torchrun 10")
    assert ended.status == -signal.SIGKILL
    assert "stopped by SIGTERM" in ended.output
    assert ended.steps and ended.record()["status"] == "interrupted"


# --- one process ---


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1", "SIGINT", "SIGHUP"])
def test_exit_status_is_128_and_the_signal(run, config, tmp_path, monkeypatch, name):
    number = getattr(signal, name)
    after_iteration(monkeypatch, 3, lambda: os.kill(os.getpid(), number))
    before = [signal.getsignal(number), signal.pthread_sigmask(signal.SIG_BLOCK, [])]
    assert run(config, f"--out_dir={tmp_path}") == 128 + number
    assert [path.name for path in tmp_path.glob("checkpoints/step-*")] == ["step-00000004"]
    assert [signal.getsignal(number), signal.pthread_sigmask(signal.SIG_BLOCK, [])] == before


def test_a_stop_request_during_a_save_does_not_save_twice(run, config, tmp_path, monkeypatch):
    begin = evaluate_and_save.Saver.begin

    def begin_and_be_stopped(saver, *arguments):
        begin(saver, *arguments)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(ARRIVAL_SECONDS)

    monkeypatch.setattr(evaluate_and_save.Saver, "begin", begin_and_be_stopped)
    assert run(config, f"--out_dir={tmp_path}") == 143
    assert [path.name for path in tmp_path.glob("checkpoints/step-*")] == ["step-00000008"]


def test_an_evaluation_that_was_given_up_is_made_after_the_resume(run, config, tmp_path, monkeypatch, capfd):
    with monkeypatch.context() as patch:
        stop_in_evaluation(patch)
        assert run(config, f"--out_dir={tmp_path}") == 143
    assert "📊 Eval" not in capfd.readouterr().out
    assert run(config, f"--out_dir={tmp_path}", "--init_from=resume") == 0
    evaluations = [line.split()[2] for line in capfd.readouterr().out.splitlines() if "📊 Eval" in line]
    assert evaluations == ["8", "16", "24"]


def test_a_stop_during_the_last_evaluation_saves_the_last_iteration(run, config, tmp_path, monkeypatch):
    stop_in_evaluation(monkeypatch)
    assert run(config, f"--out_dir={tmp_path}", f"--eval_interval={ITERATIONS}") == 143
    assert [path.name for path in tmp_path.glob("checkpoints/step-*")] == [f"step-{ITERATIONS:08d}"]


def test_a_run_that_saves_nothing_ends_all_the_same(run, config, tmp_path, monkeypatch, capfd):
    after_iteration(monkeypatch, 3, lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert run(config, f"--out_dir={tmp_path}", "--always_save_checkpoint=False") == 143
    assert "Nothing was saved" in capfd.readouterr().out
    assert not list(tmp_path.glob("checkpoints/step-*"))


def test_a_second_ctrl_c_ends_a_run_that_does_not_react(config, folder):
    out = folder / "impatient"
    process = warm_python.Popen(
        [sys.executable, "tests/support/fault_worker.py", str(config), f"--out_dir={out}"],
        cwd=ROOT,
        env={**os.environ, "FAULT": "hang 0 3", "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        while "FAULT" not in (line := process.stdout.readline()):
            assert line, "it ended"
        process.send_signal(signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(2)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=20)
    finally:
        process.kill()
    assert process.returncode == 130 and "interrupted again" in output
    assert json.loads(next(out.glob("run_*.json")).read_text())["status"] == "interrupted"


def stop_in_evaluation(monkeypatch) -> None:
    evaluate = evaluate_and_save.evaluate

    def stopped_evaluate(*arguments):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(ARRIVAL_SECONDS)
        return evaluate(*arguments)

    monkeypatch.setattr(evaluate_and_save, "evaluate", stopped_evaluate)


def after_iteration(monkeypatch, iteration: int, action) -> None:
    """With log_interval=1 every iteration ends with the question whether replicas are to be compared."""
    after_update = ReplicaCheck.after_update

    def patched(check, now):
        after_update(check, now)
        if now == iteration:
            action()
            time.sleep(ARRIVAL_SECONDS)

    monkeypatch.setattr(ReplicaCheck, "after_update", patched)


def test_what_is_asked_is_answered_once(config):
    consensus = Consensus(World(0, 0, 1, torch.device("cpu")))
    consensus.ask("checkpoint", 7)
    assert consensus.answer("checkpoint") == 0, "not before the exchange"
    consensus.exchange()
    assert consensus.answer("checkpoint") == 7 and consensus.answer("stop") == 0
    consensus.exchange()
    assert consensus.answer("checkpoint") == 0
