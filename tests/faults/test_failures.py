"""Ranks that die, hang or are slow; torchrun's restarts."""

import json
import os
import subprocess
import threading

import pytest
import torch
from support.checkpoint_parts import ALONE, copy_checkpoint, make_config, make_saver, make_state, save
from support.faults import INTERVAL, ITERATIONS, WORKER, prepare, run_with_fault
from support.helpers import start_train
from support.hostile_files import replace

from common.errors import UserError
from training.checkpoints import resume as start
from training.configuration.files_and_flags import load_config
from training.faults.stragglers import StragglerDetector
from training.process.work_timer import Iteration, WorkTimer

END_SECONDS = 300  # from a rank's end to the job's


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("failures")


@pytest.fixture(scope="module")
def config(folder):
    return prepare(folder)


def root_cause(output: str) -> str:
    """Of torchrun's summary."""
    return output.split("Root Cause (first observed failure):")[-1]


# --- 13: a rank dies ---


@pytest.mark.dead_rank
def test_an_exception_of_one_rank_ends_the_job_with_its_traceback(config, folder):
    ended = run_with_fault(config, folder / "raise", fault="raise 1 10")
    assert ended.status == 1 and ended.seconds < END_SECONDS, ended.output[-3000:]
    cause = root_cause(ended.output)
    assert "rank      : 1" in cause and "ValueError: a fault of rank 1" in cause
    assert "in happen" in cause, "the traceback"
    assert ended.record()["status"] == "failed"
    assert " failed: ValueError" in next(ended.out.glob("run_*.log")).read_text()


@pytest.mark.chaos
@pytest.mark.parametrize("rank", ["0", "1"])
@pytest.mark.parametrize("flags", [[], ["--use_fsdp=True"], ["--use_dataloader=True"]])
@pytest.mark.parametrize("what", ["raise", "oom", "exit0", "SIGKILL"])
@pytest.mark.parametrize("where", ["10", "evaluation", "saving"])
@pytest.mark.dead_rank
def test_a_rank_that_dies_takes_the_job_with_it(config, folder, what, rank, flags, where):
    out = folder / f"{what}-{rank}-{len(flags) and flags[0][6:10]}-{where}"
    ended = run_with_fault(config, out, *flags, fault=f"{what} {rank} {where}")
    assert ended.status == 1 and ended.seconds < END_SECONDS, ended.output[-3000:]
    assert ended.steps in ([], [INTERVAL]), "a checkpoint that was being written may have been completed"
    cause = root_cause(ended.output)
    if what in ("raise", "oom"):
        assert f"rank      : {rank}" in cause
        assert {"raise": f"a fault of rank {rank}", "oom": "out of GPU memory"}[what] in cause
    if what == "SIGKILL":
        assert f"rank      : {rank}" in cause and "SIGKILL" in cause
    if what == "exit0":
        assert f"rank {rank} (" in ended.output and "has ended" in ended.output
    if rank == "1":
        assert ended.record()["status"] == "failed"


# --- 14: a rank hangs ---

SOON = ("--timeout_minutes=0.05", "--start_timeout_minutes=0.15")


HANGS = [("hang", "is alive, in iteration 15 (batch)")]  # it waits for something else than the others
HANGS += [pytest.param("SIGSTOP", "is silent, last seen in ", marks=pytest.mark.chaos)]


@pytest.mark.parametrize(("fault", "rank_1"), HANGS)
@pytest.mark.hang
def test_a_rank_that_hangs_or_is_stopped_is_named_with_its_iteration(config, folder, fault, rank_1):
    ended = run_with_fault(config, folder / fault, *SOON, fault=f"{fault} 1 15")
    assert ended.status == 1 and ended.seconds < END_SECONDS, ended.output[-3000:]
    assert "no progress for 3 s (timeout_minutes): rank 1 (" in root_cause(ended.output)
    assert rank_1 in ended.output and "rank 0 is alive, in iteration 15 (backward)" in ended.output
    stacks = {path.name: path.read_text() for path in ended.out.glob("hang_stacks_rank_*.txt")}
    assert fault == "SIGSTOP" or "in happen" in stacks["hang_stacks_rank_1.txt"], "where it hangs"
    assert ended.record()["status"] == "failed"


# --- 15: a rank is slow ---


def judged(times) -> list[tuple[int, object]]:
    """[(iteration, what rank 0 says)] of times[iteration][rank], which each rank measures for itself."""
    clocks = [WorkTimer(on_gpu=False) for _ in times[0]]
    detector, news = StragglerDetector(len(clocks)), []
    for iteration, seconds in enumerate(times):
        for clock, own in zip(clocks, seconds, strict=True):
            clock.unread.append(Iteration(0.0, [[0.5, 0.5]], own, waits_before_end=1))
        news += [(iteration, found) for found in detector.changes([clock.seconds() for clock in clocks])]
    return news


@pytest.mark.straggler
def test_a_rank_that_needs_three_times_as_long_is_named_within_20_iterations_and_noise_names_nobody():
    ((iteration, found),) = judged([[0.03, 0.031, 0.09 if i >= 30 else 0.03, 0.029] for i in range(60)])
    assert found.rank == 2 and 0 < iteration - 30 < 17, "three more pass until a time is sent and received"
    assert found[1:] == ("straggler", pytest.approx(90), pytest.approx(30))
    times = 0.1 + 0.02 * torch.rand(500, 8, generator=torch.Generator().manual_seed(0))
    times[range(0, 500, 5), [i % 8 for i in range(100)]] *= 4  # now and then one takes four times as long
    assert judged(times.tolist()) == []
    news = judged([[0.1] * 7 + [0.2]] * 40 + [[0.1] * 8] * 40)
    assert [(found.rank, found.kind) for _, found in news] == [(7, "straggler"), (7, "no_straggler")]


@pytest.mark.chaos
@pytest.mark.parametrize("flags", [[], ["--use_zero1=True"], ["--use_fsdp=True"]])
@pytest.mark.straggler
def test_a_slow_rank_is_named_in_the_log(config, folder, flags):
    out = folder / f"slow{''.join(flags)}"
    flags = [*flags, "--max_iters=80", "--eval_interval=0"]
    ended = run_with_fault(config, out, *flags, fault="slow 1 40")
    lines = ended.output.splitlines()
    (named,) = (i for i, line in enumerate(lines) if "is a straggler" in line)
    before = [line for line in lines[:named] if "📍 Iter" in line]
    assert lines[named].startswith("rank 1 (") and 40 < int(before[-1].split()[2]) <= 60
    assert [event["kind"] for event in ended.record()["events"]] == ["straggler"]


# --- 16: restarts ---


@pytest.mark.restart
@pytest.mark.parametrize("at", [15, pytest.param(5, marks=pytest.mark.chaos)])
def test_a_run_restarted_by_torchrun_goes_on_from_its_newest_checkpoint(config, folder, uninterrupted, at):
    """Or begins again before the first one, also in an out_dir that has checkpoints of another run."""
    out = folder / f"restart-{at}"
    if at < INTERVAL:
        run_with_fault(config, out, "--seed=7")
    # seven iterations take milliseconds, so a thread might still be writing the checkpoint before them
    how = {"fault": f"SIGKILL 1 {at}", "torchrun": ("--max-restarts=3",)}
    ended = run_with_fault(config, out, "--async_checkpoint=False", **how)
    assert ended.status == 0, ended.output[-3000:]
    resumes = f"Resuming from {out}/checkpoints/step-{INTERVAL:08d}"
    assert "Restart 1 by torchrun" in ended.output
    assert (resumes if at > INTERVAL else "begins again as it began") in ended.output
    assert ended.digest() == uninterrupted.digest()
    assert bool(list(out.glob("checkpoints-before-*/step-*"))) == (at < INTERVAL)


@pytest.mark.chaos
@pytest.mark.restart
def test_a_node_that_is_lost_is_done_without(config, folder):
    """Two torchruns of one process each; the config file keeps the sequences per iteration."""
    elastic, out = folder / "elastic.py", folder / "elastic"
    divide = "import os as _os\ngradient_accumulation_steps = 2 // int(_os.environ.get('WORLD_SIZE', 1))\n"
    elastic.write_text(config.read_text() + divide + "dropout = 0.0\n")
    meeting = ["--rdzv_backend=c10d", f"--rdzv_endpoint=localhost:{20000 + os.getpid() % 10000}"]
    torchrun = ["--nnodes=1:2", "--max-restarts=3", "--rdzv_id=elastic", *meeting]
    others: list[subprocess.Popen] = []

    def start_other():
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "FAULT": "node any 15"}
        flags = f"--out_dir={out}", "--init_from=auto"
        others.append(start_train(elastic, *flags, script=WORKER, torchrun=torchrun, **quiet))

    threading.Timer(2, start_other).start()  # the first one holds torchrun's store
    ended = run_with_fault(elastic, out, "--init_from=auto", processes=1, torchrun=torchrun)
    others[0].wait()
    assert ended.status == 0 and "Restart 1 by torchrun" in ended.output, ended.output[-3000:]
    assert ended.steps[-1] == ITERATIONS
    assert ended.record()["startup_info"]["hardware"]["num_gpus"] == 1


@pytest.mark.parametrize("end", [None, "", ".corrupt", ".tmp-12", ".before"])
def test_auto_begins_from_scratch_only_where_nothing_was_saved(config, tmp_path, end):
    if end is not None:
        (tmp_path / "checkpoints" / f"step-00000008{end}").mkdir(parents=True)
    found, _ = start.choose_start(
        load_config([str(config), f"--out_dir={tmp_path}", "--init_from=auto"]), ALONE
    )
    assert found.init_from == ("resume" if end in ("", ".corrupt") else "scratch")


@pytest.mark.restart
def test_a_restart_tells_its_own_checkpoints_from_those_that_were_there(config, tmp_path, monkeypatch):
    root, out = tmp_path / "checkpoints", f"--out_dir={tmp_path}"
    of_template = make_config(tmp_path / "template")
    template = save(make_saver(of_template, make_state(of_template)), 1)
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")

    def choose(restarts: int, *flags: str, launch: str = "a launch"):
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", launch)
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(restarts))
        return start.choose_start(load_config([str(config), out, *flags]), ALONE)

    copy_checkpoint(template, root, 100, token="of another run")
    first = ("--init_from=resume", "--resume_from=step-00000100")
    (began, mine) = choose(0)
    assert began.init_from == "scratch" and choose(1) == (began, mine), "the same token"
    again = choose(0, *first)[1]
    assert choose(1, *first)[0].resume_from == "step-00000100" and again != mine
    copy_checkpoint(template, root, 108, token=again)
    assert choose(2)[0].init_from == "resume" and choose(2, *first)[0].resume_from == "latest"
    assert choose(1, launch="killed before it made a token")[0].init_from == "scratch"
    assert choose(0)[0].init_from == choose(1)[0].init_from == "scratch"
    # an earlier version stored no token: the record says which torchrun started the run
    copy_checkpoint(template, root, 104, run="run_1")
    for launch, expected in (("another", "scratch"), ("a launch", "resume")):
        (tmp_path / "run_1.json").write_text(json.dumps({"startup_info": {"launch": {"id": launch}}}))
        assert choose(1)[0].init_from == expected
    (root / "step-00000104" / "state.json").write_text("damaged")
    assert choose(1)[0].init_from == "scratch"


@pytest.mark.restart
@pytest.mark.parametrize("kind", ["pipe", "folder", "long"])
def test_a_token_that_no_run_wrote_is_one_message(config, tmp_path, monkeypatch, kind):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a launch")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    path = tmp_path / "run.token"
    path.write_text("0" * 1000)
    if kind != "long":
        replace(path, kind)
    with pytest.raises(UserError, match="run.token cannot be used .*: rm "):
        start.choose_start(load_config([str(config), f"--out_dir={tmp_path}"]), ALONE)
