"""Stop requests: SIGTERM, SIGUSR1, Ctrl-C, a lost terminal; whenever, to any process."""

import os
import signal
import subprocess
import time
from types import SimpleNamespace

import pytest
import torch
from support.faults import ITERATIONS, WORKER, prepare, run_with_fault, saved_steps
from support.helpers import HANG_S, last_run, start_train

from training import evaluate_and_save
from training.faults import consensus as consensus_module
from training.faults import watchdog
from training.faults.consensus import Consensus
from training.faults.replica_check import ReplicaCheck
from training.process.world import World

pytestmark = pytest.mark.stop

ARRIVAL_SECONDS = 0.3  # until a signal has reached the thread that waits for it


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("preemption")


@pytest.fixture(scope="module")
def config(folder):
    return prepare(folder)


def test_sigterm_to_torchrun_saves_and_a_resume_ends_bit_equal(config, folder, uninterrupted):
    """With data workers, which the signal reaches as well."""
    out = folder / "torchrun"
    stopped = run_with_fault(config, out, "--use_dataloader=True", fault="SIGTERM torchrun 10")
    assert stopped.status == 1, stopped.output[-3000:]
    assert stopped.steps[-1] in (11, 12)
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


CASES = {  # where the request comes -> flags
    "0": [],
    "9": [],
    "10": ["--use_dataloader=True", "--use_fsdp=True"],
    "evaluation": ["--eval_iters=50"],
    "saving": [],
    "start": [],
}


@pytest.mark.chaos
@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
@pytest.mark.parametrize("who", ["torchrun", "0", "1"])
@pytest.mark.parametrize("where", CASES)
def test_a_stop_request_at_any_moment_loses_nothing(config, folder, uninterrupted, name, who, where):
    out, flags = folder / f"{name}-{who}-{where}", CASES[where]
    torchrun = ("--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1",)
    stopped = run_with_fault(config, out, *flags, fault=f"{name} {who} {where}", torchrun=torchrun)
    assert stopped.status == 1, stopped.output[-3000:]
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
    env = {"TORCHINDUCTOR_CACHE_DIR": f"{out}-cache", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "200"}
    stopped = run_with_fault(config, out, "--compile=True", fault=f"SIGTERM {who} 0", **env)
    assert stopped.status == 1 and stopped.steps and stopped.steps[-1] in (1, 2), stopped.output[-3000:]


@pytest.mark.chaos
def test_ranks_whose_torchrun_is_killed_save_and_end(config, folder):
    ended = run_with_fault(config, folder / "orphans", "--max_iters=2000", fault="SIGKILL torchrun 10")
    assert ended.status == -signal.SIGKILL
    assert "stopped by SIGTERM" in ended.output
    assert ended.steps and ended.record()["status"] == "interrupted"


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1", "SIGINT", "SIGHUP"])
def test_exit_status_is_128_and_the_signal(run, config, tmp_path, monkeypatch, capfd, name):
    number, saves = getattr(signal, name), name != "SIGHUP"
    after_iteration(monkeypatch, 3, lambda: os.kill(os.getpid(), number))
    before = [signal.getsignal(number), signal.pthread_sigmask(signal.SIG_BLOCK, [])]
    assert run(config, f"--out_dir={tmp_path}", f"--always_save_checkpoint={saves}") == 128 + number
    assert saved_steps(tmp_path) == ([4] if saves else [])
    assert ("Nothing was saved" in capfd.readouterr().out) != saves
    assert [signal.getsignal(number), signal.pthread_sigmask(signal.SIG_BLOCK, [])] == before


def test_stop_requests_before_and_during_a_save_save_once(run, config, tmp_path, monkeypatch):
    """Slurm and torchrun repeat theirs."""
    monkeypatch.setattr(watchdog, "SECOND_SIGNAL_S", 0.1)
    begin = evaluate_and_save.Saver.begin

    def terminate():
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(ARRIVAL_SECONDS)

    def begin_and_be_stopped(saver, *arguments):
        terminate()
        begin(saver, *arguments)
        terminate()

    monkeypatch.setattr(evaluate_and_save.Saver, "begin", begin_and_be_stopped)
    assert run(config, f"--out_dir={tmp_path}") == 143
    assert saved_steps(tmp_path) == [8] and last_run(tmp_path)["status"] == "interrupted"
    assert (tmp_path / "checkpoints" / "step-00000008" / "manifest.json").is_file()


@pytest.mark.parametrize(("interval", "made"), [(8, ["8", "16", "24"]), (ITERATIONS, ["24"])])
def test_an_evaluation_that_was_given_up_is_made_after_the_resume(
    run, config, tmp_path, monkeypatch, capfd, interval, made
):
    """Also the last one."""
    command = config, f"--out_dir={tmp_path}", f"--eval_interval={interval}"
    with monkeypatch.context() as patch:
        stop_in_evaluation(patch)
        assert run(*command) == 143
    assert "📊 Eval" not in capfd.readouterr().out and saved_steps(tmp_path) == [interval]
    assert run(*command, "--init_from=resume") == 0
    evaluations = [line.split()[2] for line in capfd.readouterr().out.splitlines() if "📊 Eval" in line]
    assert evaluations == made


def test_a_second_ctrl_c_ends_a_run_that_does_not_react(config, folder):
    out, how = folder / "impatient", {"script": WORKER, "FAULT": "hang 0 3", "stderr": subprocess.STDOUT}
    process = start_train(config, f"--out_dir={out}", **how)
    try:
        while "FAULT" not in (line := process.stdout.readline()):
            assert line, "it ended"
        process.send_signal(signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(2)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=HANG_S)
    finally:
        process.kill()
    assert process.returncode == 130 and "interrupted again" in output
    assert last_run(out)["status"] == "interrupted"


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


def test_what_is_asked_is_answered_once_also_what_is_under_way_when_an_answer_is_needed_at_once(monkeypatch):
    """A stop that the other rank asked for, while a checkpoint is saved."""
    of_rank_1 = iter([[15.0, 0.0, 0.0], [0.0, 7.0, 0.0]])

    def arrives(everyone, mine, **_):
        everyone.copy_(torch.stack([mine[0], torch.tensor(next(of_rank_1), dtype=mine.dtype)]))
        return SimpleNamespace(wait=lambda: None)

    alone = Consensus(World(0, 0, 1, torch.device("cpu")))
    alone.ask("checkpoint", 7)
    assert alone.answer("checkpoint") == 0, "not before the exchange"
    for answer in (7, 0):
        alone.exchange()
        assert alone.answer("checkpoint") == answer and alone.answer("stop") == 0
    monkeypatch.setattr(consensus_module, "cpu_group", lambda world: "gloo")
    monkeypatch.setattr(consensus_module, "all_gather", arrives)
    consensus = Consensus(World(0, 0, 2, torch.device("cpu")))
    consensus.exchange()
    assert consensus.answer("stop") == 0, "on its way"
    consensus.exchange(at_once=True)
    assert consensus.by_rank("stop") == [0, 15] and consensus.by_rank("checkpoint") == [0, 7]
