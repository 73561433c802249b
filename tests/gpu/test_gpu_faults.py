"""Faults with NCCL on two GPUs: what the tests of preemption and failures do on
gloo, and what only a GPU can."""

import pickle

import pytest
from support.faults import ITERATIONS, prepare, run_with_fault
from support.gpu_runs import TWO_GPUS

pytestmark = [pytest.mark.gpu, pytest.mark.chaos, TWO_GPUS]
END_SECONDS = 300


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("gpu-faults")


@pytest.fixture(scope="module")
def config(folder):
    return prepare(folder, device="cuda", dtype="bfloat16")


@pytest.fixture(scope="module")
def uninterrupted(config, folder):
    done = run_with_fault(config, folder / "uninterrupted")
    assert done.status == 0, done.output[-3000:]
    return done


@pytest.mark.parametrize("what", ["SIGKILL", "illegal", "raise", "exit0"])
@pytest.mark.dead_rank
def test_a_rank_that_dies_takes_the_job_with_it(config, folder, what):
    ended = run_with_fault(config, folder / what, fault=f"{what} 1 10")
    assert ended.status == 1 and ended.seconds < END_SECONDS, ended.output[-3000:]
    print(f"{what}: over after {ended.seconds:.1f} s")
    cause = ended.output.split("Root Cause")[-1]
    if what != "exit0":
        assert "rank      : 1" in cause, cause


@pytest.mark.hang
def test_a_hang_leaves_a_flight_recorder_of_every_live_rank(config, folder):
    soon = ("--timeout_minutes=0.1", "--start_timeout_minutes=0.5")
    ended = run_with_fault(config, folder / "hang", *soon, fault="hang 1 15")
    assert ended.status == 1 and ended.seconds < END_SECONDS, ended.output[-3000:]
    print(f"hang: over after {ended.seconds:.1f} s, timeout 6 s")
    assert "rank 1 (" in ended.output and "is alive, in iteration 15 (batch)" in ended.output
    for rank in (0, 1):
        entries = pickle.loads((folder / "hang" / f"flight_recorder_rank_{rank}").read_bytes())["entries"]
        assert any("all_reduce" in entry["profiling_name"] for entry in entries)


@pytest.mark.stop
def test_sigterm_saves_and_a_resume_ends_bit_equal(config, folder, uninterrupted):
    out = folder / "stopped"
    stopped = run_with_fault(config, out, fault="SIGTERM torchrun 10")
    assert stopped.status == 1 and stopped.steps[-1] <= 13, stopped.output[-3000:]
    print(f"SIGTERM: over after {stopped.seconds:.1f} s")
    resumed = run_with_fault(config, out, "--init_from=resume")
    assert resumed.status == 0 and resumed.steps[-1] == ITERATIONS, resumed.output[-3000:]
    assert resumed.digest() == uninterrupted.digest()


@pytest.mark.restart
def test_a_run_restarted_by_torchrun_goes_on(config, folder, uninterrupted):
    ended = run_with_fault(config, folder / "restart", fault="SIGKILL 1 15", torchrun=("--max-restarts=3",))
    assert ended.status == 0 and "Restart 1 by torchrun" in ended.output, ended.output[-3000:]
    print(f"restart: done {ended.seconds:.1f} s after the kill")
    assert ended.digest() == uninterrupted.digest()


@pytest.mark.parametrize("flags", [[], ["--use_fsdp=True"]])
@pytest.mark.straggler
def test_a_slow_gpu_is_named(config, folder, flags):
    out = folder / f"slow{''.join(flags)}"
    ended = run_with_fault(config, out, *flags, "--max_iters=80", "--eval_interval=0", fault="slow_gpu 1 40")
    assert ended.status == 0, ended.output[-3000:]
    (event,) = ended.record()["events"]
    assert event["rank"] == 1 and 40 < event["iter"] <= 60, event
    print(event)
