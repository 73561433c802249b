"""Before the ranks have joined: a rank, a machine or a store that is gone ends all others, with its name
and its reason, and a rank that is late is waited for. A machine is a torchrun of its own on this machine."""

import contextlib
import dataclasses
import os
import re
import signal
import socket
import subprocess
import threading
import time

import pytest
import torch
import torch.distributed as dist
from support.faults import WORKER, prepare, processes_of
from support.helpers import start_train

from common.errors import UserError
from training.configuration.keys import TrainConfig
from training.process import agreement as agreement_module
from training.process import world as world_module
from training.process.agreement import check_same_settings
from training.process.world import World, meet

pytestmark = pytest.mark.dead_rank

SECONDS = 90  # for a machine
END_SECONDS = 60  # from a rank's end to that of all others


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return prepare(tmp_path_factory.mktemp("starts"))


# --- the store that outlives an attempt ---


def test_ranks_of_a_dead_attempt_do_not_meet_those_of_a_new_one(monkeypatch):
    """torchrun's store survives a restart, with all that the dead have written."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(server.port))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    confirm = world_module._confirm
    monkeypatch.setattr(world_module, "_confirm", lambda store, name: None)  # a rank 0 that is killed at once
    dead = meet(0)
    dead.set("over", "an earlier failure")
    monkeypatch.setattr(world_module, "_confirm", confirm)
    found = []
    others = [threading.Thread(target=lambda rank=rank: found.append(meet(rank))) for rank in (1, 2)]
    for other in others:
        other.start()
    time.sleep(0.2)
    assert not found, "the dead rank 0 does not answer"
    first = meet(0)
    for other in others:
        other.join(10)
    first.set("hello", "all")
    assert [store.get("hello") for store in found] == [b"all", b"all"]
    assert not any(store.check(["over"]) for store in found)


# --- settings ---


def settings_of(monkeypatch, *of_ranks: tuple[int, dict]) -> None:
    """check_same_settings() of ranks with these (machine, settings)."""
    base = TrainConfig()
    everyone = [(machine, dataclasses.replace(base, **keys).to_dict()) for machine, keys in of_ranks]
    monkeypatch.setattr(agreement_module, "gather_objects", lambda mine, world: everyone)
    check_same_settings(base, World(0, 0, len(of_ranks), torch.device("cpu")))


def test_a_setting_that_differs_is_named_but_machines_may_have_their_data_at_other_paths(monkeypatch):
    with pytest.raises(UserError, match="learning_rate is 0.1 on rank 0, 2, 0.2 on rank 1. Start all"):
        settings_of(monkeypatch, *((0, {"learning_rate": rate}) for rate in (0.1, 0.2, 0.1)))
    with pytest.raises(UserError, match="learning_rate is 0.1 on rank 0, 0.2 on rank 1"):
        settings_of(monkeypatch, (0, {"learning_rate": 0.1}), (1, {"learning_rate": 0.2}))
    settings_of(monkeypatch, (0, {"dataset": "/a/text"}), (1, {"dataset": "/b/text"}))
    with pytest.raises(UserError, match="dataset is '/a' on rank 1, '/b' on rank 2"):
        settings_of(monkeypatch, (0, {"dataset": "/a"}), (1, {"dataset": "/a"}), (1, {"dataset": "/b"}))


# --- real launches ---


def launch(
    config,
    out,
    backend="static",
    machines=2,
    processes=1,
    flags=(),
    torchrun=(),
    seconds=SECONDS,
    all_flags=(),
    **env,
) -> list:
    """[(exit status, seconds since the fault, output)] of each machine. processes: of each, or of all. flags:
    of the last machine; all_flags: of all."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    at = {
        "static": lambda n: ["--master_addr=127.0.0.1", f"--master_port={port}", f"--node_rank={n}"],
        "c10d": lambda n: [  # machine 0 has the store; by itself, whichever torchrun comes first takes it
            *("--rdzv_backend=c10d", f"--rdzv_endpoint=127.0.0.1:{port}", f"--rdzv_id={port}"),
            f"--rdzv_conf=is_host={'false' if n else 'true'}",
        ],
    }[backend]
    consoles = [out.with_name(f"{out.name}-{n}.console") for n in range(machines)]
    started, ended, began = [], [], time.time()
    for n, path in enumerate(consoles):
        options = [f"--nnodes={machines}", *at(n), *torchrun]
        count = processes if isinstance(processes, int) else processes[n]
        how = {"processes": count, "torchrun": options, "script": WORKER, **env}
        own = [*all_flags, *(flags if n == machines - 1 else ())]
        with open(path, "w") as console:
            streams = {"stdout": console, "stderr": subprocess.STDOUT}
            started.append(start_train(config, f"--out_dir={out}", *own, **how, **streams))
    try:
        for path, process in zip(consoles, started, strict=True):
            status = None
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = process.wait(seconds)
            ended.append((status, time.time(), path.read_text()))
    finally:
        for pid in processes_of(out):  # torchruns and ranks
            os.kill(pid, signal.SIGKILL)
        for process in started:
            process.wait()
    faults = [output.partition("FAULT at ")[2].partition("s")[0] for _, _, output in ended]
    fault_at = max([float(text) for text in faults if text], default=began)
    return [(status, at - fault_at, output) for status, at, output in ended]


def says(output: str, *texts: str) -> None:
    for text in texts:
        assert text in output, f"{text!r} is not in\n{output[-3000:]}"


def test_a_wrong_flag_on_one_machine_ends_the_other_with_that_reason(config, tmp_path):
    """The rank there fails before it could join."""
    here, there = launch(config, tmp_path / "out", "c10d", flags=["--dataset=/nowhere"])
    assert here[0] == 1 and there[0] == 1
    says(here[2], "[rank 0] error: rank 1 (", "failed: UserError: dataset='/nowhere': there is no folder")


def test_a_killed_rank_ends_the_other_machine(config, tmp_path):
    here, there = launch(config, tmp_path / "out", FAULT="SIGKILL 1 hashing")
    assert here[0] == 1 and here[1] < END_SECONDS
    says(here[2], "[rank 0] error: rank 1 (", ") has ended")


def test_the_only_rank_of_a_machine_that_is_killed_while_it_trains_is_named_by_the_other(config, tmp_path):
    """The collective of the healthy rank fails, which is no error of its own."""
    here, _ = launch(config, tmp_path / "out", FAULT="SIGKILL 1 10")
    assert here[0] == 1 and here[1] < END_SECONDS
    says(here[2], "[rank 0] error: rank 1 (", ") has ended")
    assert "RuntimeError" not in here[2] and "[rank 0] Traceback" not in here[2]


def test_a_dry_run_on_one_machine_ends_the_other_and_one_on_all_ends_well(config, tmp_path):
    here, there = launch(config, tmp_path / "out", flags=["--dry_run=True"])
    assert here[0] == 1 and there[0] == 0
    says(here[2], "[rank 0] error: rank 1 (", ") has ended without joining")
    both = launch(config, tmp_path / "all", "c10d", all_flags=["--dry_run=True"])
    assert [status for status, _, _ in both] == [0, 0]


LATE = {"held": ("hold", "hashing"), "absent": ("hold", "import")}


@pytest.mark.parametrize(("kind", "rank"), [("held", 0), ("absent", 1)])
def test_a_rank_that_is_late_is_waited_for(config, tmp_path, kind, rank):
    """Before its first sign of life, or while it holds the interpreter lock, so that no thread of it runs."""
    what, where = LATE[kind]
    fault = {"FAULT": f"{what} {rank} {where}", "HOLD_SECONDS": "5", "SAY_TICKS": "2"}
    ended = launch(config, tmp_path / "out", seconds=2 * SECONDS, **fault)
    assert [status for status, _, _ in ended] == [0, 0], ended[0][2][-3000:]
    says(ended[1 - rank][2], f"waiting for rank {rank} ")


def test_hybrid_sharding_on_unequal_machines_is_refused_with_their_sizes(config, tmp_path):
    flags = ["--use_fsdp=True", "--fsdp_sharding=hybrid"]
    here, there = launch(config, tmp_path / "out", processes=(2, 1), all_flags=flags)
    assert here[0] == there[0] == 1, here[2][-3000:]
    says(here[2], "error: fsdp_sharding='hybrid' needs as many processes on each machine")
    says(here[2], "but there are 2 on machine 0 (", "1 on machine 1 (")


def test_two_machines_train_after_a_restart(config, tmp_path):
    """Nothing that the first attempt has left in the store ends the second."""
    env = {"FAULT": "raise 1 hashing", "FAULT_ONCE": str(tmp_path / "fault")}
    ended = launch(config, tmp_path / "out", "c10d", torchrun=["--max-restarts=1"], **env)
    assert [status for status, _, _ in ended] == [0, 0], ended[0][2][-3000:]
    says(ended[0][2] + ended[1][2], "FAULT", "Restart 1 by torchrun")


def test_a_rank_that_fails_before_its_first_sign_ends_the_others_where_torchrun_keeps_a_membership(
    config, tmp_path
):
    """An import that fails: nothing of ours ever runs there."""
    here, _ = launch(config, tmp_path / "out", "c10d", FAULT="raise 1 import")
    assert here[0] == 1 and here[1] < END_SECONDS
    says(here[2], "a torchrun has ended before all ranks had joined (rank 1 of machine 1: not started)")


# whichever comes first: rank 0's connection is closed, or torchrun's store
GONE = "rank 0 ({}) has ended"


@pytest.mark.chaos
@pytest.mark.parametrize("backend", ["static", "c10d"])
@pytest.mark.parametrize(
    ("what", "rank", "where", "reason"),
    [
        ("raise", 0, "hashing", "rank 0 ({}) failed: ValueError: a fault of rank 0"),
        ("SIGKILL", 0, "hashing", GONE),
        ("node", 0, "hashing", GONE),
        *((what, 1, "hashing", "rank 1 ({}) has ended") for what in ("node", "exit0")),
        ("oom", 1, "hashing", "rank 1 ({}) failed: OutOfMemoryError: Tried to allocate too much"),
        ("orphan", 1, "hashing", "rank 1 ({}) has lost its torchrun before its first iteration"),
    ],
)
def test_every_way_to_end_before_joining_is_named_on_the_other_machine(
    config, tmp_path, backend, what, rank, where, reason
):
    fault = f"{what} {rank} {where}"
    ended = launch(config, tmp_path / "out", backend, FAULT=fault)
    status, seconds, output = ended[1 - rank]
    assert status == 1 and seconds < END_SECONDS
    before, _, behind = reason.partition("{}")
    if reason != GONE or "torchrun of the machine of rank 0 has ended" not in without_places(output):
        says(output, before, behind)


def without_places(output: str) -> str:
    """'rank 0 (host, process 17)' as 'rank 0'."""
    return re.sub(r"(rank \d+) \([^()]*, process \d+\)", r"\1", output)


@pytest.mark.chaos
@pytest.mark.parametrize(
    ("what", "where"),
    [("raise", "start"), ("raise", "hashing"), ("SIGKILL", "hashing"), ("raise", "3"), ("raise", "saving")],
)
def test_one_of_64_processes_on_8_machines_ends_all_others_within_a_minute_and_is_named(
    config, tmp_path, what, where
):
    """Before joining, during hashing, after joining, while saving."""
    env = {"FAULT": f"{what} 63 {where}"}
    ended = launch(config, tmp_path / "out", machines=8, processes=8, seconds=600, **env)
    slowest = max(seconds for _, seconds, _ in ended)
    print(f"\n8 x 8 processes, {env['FAULT']}: all have ended after {slowest:.1f} s")
    assert slowest < END_SECONDS and all(status for status, _, _ in ended)
    for _, _, output in ended:  # torchrun of a killed rank says "rank      : 63 (local_rank: 7)"
        says(re.sub(r"rank +: ", "rank ", output), "rank 63 (")
