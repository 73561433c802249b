"""Before the ranks have joined: a rank, a machine or a store that is gone ends all others, with its name
and its reason. A machine is a torchrun of its own on this machine."""

import contextlib
import dataclasses
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist
from support.faults import WORKER, prepare, processes_of
from support.helpers import ROOT, start_train

from common.errors import UserError
from training.configuration.keys import TrainConfig
from training.faults import liveness as module
from training.faults.liveness import DEAD_TICKS, WAITING, Liveness, Process, this_process
from training.faults.watchdog import BUSY_SECONDS, Watchdog
from training.process import agreement as agreement_module
from training.process import world as world_module
from training.process.agreement import check_same_settings
from training.process.world import World, meet

pytestmark = pytest.mark.dead_rank

SECONDS = 90  # for a machine
END_SECONDS = 60  # from a rank's end to that of all others
# DEAD_TICKS instead of the usual 50 s, and longer than a busy machine needs to import a library, which holds
# the interpreter, so a rank that is well publishes nothing meanwhile
SOON = "8"


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return prepare(tmp_path_factory.mktemp("starts"))


# --- what one rank sees of the others ---


@pytest.fixture
def ranks(monkeypatch):
    """ranks(size, machines): what each sees, over one store; rank r is on machine r modulo `machines`."""
    store = dist.HashStore()

    def make(size: int, machines: int = 1) -> list[Liveness]:
        monkeypatch.setattr(module, "machine_number", lambda: (0, machines))
        made = [Liveness() for _ in range(size)]
        for rank, one in enumerate(made):
            one.rank, one.size, one.store = rank, size, store
            one.processes = {rank: Process("node", 100 + rank, rank % machines, "")}
            one.met.set()
            for watched in one._watched():
                store.compare_set(f"progress/{watched}", "", "")
        return made

    return make


def say(*those: Liveness) -> None:
    """They have started."""
    for one in those:
        one.store.set(f"process/{one.rank}", json.dumps(one.processes[one.rank]))
        one.publish(1, -1, "starting")


def after(ticks: int, one: Liveness, meanwhile=lambda tick: None) -> str | None:
    """What it says at the last of so many ticks; before, it must not end anything."""
    for tick in range(ticks - 1):
        meanwhile(tick)
        assert one.dead() is None, tick
    meanwhile(ticks - 1)
    return one.dead()


def test_a_rank_that_falls_silent_is_named_by_rank_0_at_which_alone_the_others_look(ranks):
    first, second, third = ranks(3)
    say(first, second, third)
    assert first.dead() is None and second.dead() is None, "all have just spoken"
    assert after(2 * DEAD_TICKS, second, lambda tick: first.publish(tick, -1, "starting")) is None
    said = after(DEAD_TICKS, first, lambda tick: second.publish(tick, -1, "starting"))
    assert said.startswith("rank 2 (node, process 102) is silent for 50 s before all ranks had joined")
    assert after(DEAD_TICKS, second).startswith("rank 0 (node, process 100) is silent for 50 s")


def test_a_machine_of_which_no_process_appears_is_named(ranks):
    """An import that fails on it: nothing of ours ever runs there."""
    first, _, third, _ = ranks(4, machines=2)
    say(first, third)
    said = after(DEAD_TICKS, first, lambda tick: third.publish(tick, -1, "starting"))
    assert "rank 1, rank 3 are not there after 50 s, nor is any other process of torchrun's node 1" in said


def test_a_rank_that_is_slow_to_start_is_left_to_the_torchrun_of_its_machine(ranks):
    first, second, third, _ = ranks(4, machines=2)
    say(first, second, third)
    alive = (second, third)
    assert after(4 * DEAD_TICKS, first, lambda n: [one.publish(n, -1, "starting") for one in alive]) is None


@pytest.mark.parametrize("event", [lambda first, second: second.leave(), lambda first, second: first.join()])
def test_a_rank_that_has_done_its_work_is_not_dead_nor_one_that_is_silent_after_all_have_joined(ranks, event):
    """A dry run does not join."""
    first, second = ranks(2)
    say(first, second)
    event(first, second)
    assert after(3 * DEAD_TICKS, first) is None


def test_a_lost_store_ends_the_wait_and_a_slow_one_does_not(ranks):
    _, second = ranks(2)

    class Slow:
        def multi_get(self, keys):
            raise dist.DistStoreError("too slow")

    class Closed:
        def __getattr__(self, name):
            raise dist.DistNetworkError("Connection was likely closed")

    second.store = Slow()
    assert after(DEAD_TICKS - 1, second) is None
    second.store = Closed()
    assert "torchrun of the machine of rank 0 has ended, or that machine is gone" in second.dead()


def test_rank_0_that_never_appears_ends_the_others(ranks):
    _, second = ranks(2)
    second.met.clear()
    assert after(DEAD_TICKS, second).startswith("torchrun's store, ")
    assert "has had no word of rank 0" in second.dead()


def test_rank_0_says_whom_it_waits_for(ranks):
    first, second, third = ranks(3)
    say(first, second, third)
    third.publish(2, -1, WAITING)
    first.dead()
    assert first.not_ready() == "rank 1 (node, process 101) is starting"
    second.publish(2, -1, WAITING)
    first.dead()
    assert first.not_ready() is None


@pytest.mark.hang
def test_a_rank_that_reads_data_has_not_stalled_and_one_that_does_nothing_has(monkeypatch):
    watchdog = Watchdog()
    for used, stalled in ((BUSY_SECONDS / 2, True), (2 * BUSY_SECONDS, False)):
        now = iter([100.0 + used] * 2)
        monkeypatch.setattr("training.faults.watchdog.time.process_time", lambda now=now: next(now))
        watchdog.cpu_seconds, watchdog.stalled_seconds = 100.0, 5.0
        watchdog._look_at_start(1)
        assert bool(watchdog.stalled_seconds) == stalled


# --- who is behind, who has ended ---


@pytest.mark.hang
def test_the_report_of_a_hang_names_the_silent_first_and_then_who_is_behind(ranks, monkeypatch):
    first, second, third, fourth = ranks(4)
    first.processes |= fourth.processes

    def publish(ticks):
        second.publish(ticks, 8, "evaluation")
        third.publish(ticks, 9, "training")

    first.publish(5, 9, "training")
    publish(5)
    fourth.publish(4, 7, "training")
    monkeypatch.setattr(module.time, "sleep", lambda seconds: publish(6))  # ranks 1 and 2 are alive
    assert first.who_is_behind(6, 9, "training") == (
        "rank 3 (node, process 103) is silent, last seen in iteration 7 (training); "
        "rank 1 is alive, in iteration 8 (evaluation); rank 0, rank 2 are alive, in iteration 9 (training)"
    )


def test_the_first_reason_to_end_is_everyones(ranks):
    first, second = ranks(2)
    assert first.reason_to_end() is None
    assert second.end_all("rank 1 failed") == "rank 1 failed"
    assert first.end_all("lost contact") == first.reason_to_end() == "rank 1 failed"


def test_a_process_that_has_ended_is_gone_and_one_that_lives_is_not(ranks):
    """Also before torchrun has asked how it ended."""
    ended, unasked = (subprocess.Popen(["true"], stdout=subprocess.PIPE) for _ in range(2))
    ended.wait()
    unasked.stdout.read()  # ends as the process does
    first, *_ = ranks(4)
    pids = enumerate([os.getpid(), ended.pid, os.getpid(), unasked.pid])
    first.processes = {rank: Process("node", pid, 0, "a namespace") for rank, pid in pids}
    first.join()
    until = time.monotonic() + 5
    while first.gone() != [1, 3] and time.monotonic() < until:
        time.sleep(0.01)
    assert first.gone() == [1, 3]
    unasked.wait()


# --- which processes see each other ---


def test_processes_of_one_host_name_are_not_taken_for_those_of_one_machine(ranks):
    """Two containers with the host's network, or images with one name: the other's pid means nothing here."""
    first, _, _, _ = ranks(4)
    nobody = subprocess.Popen(["true"])
    nobody.wait()
    me = this_process()
    elsewhere = {1: me._replace(machine=1), 2: me._replace(namespace="of another container"), 3: me}
    first.processes = {0: me} | {rank: one._replace(pid=nobody.pid) for rank, one in elsewhere.items()}
    first.join()
    assert first.gone() == [3]


def test_a_container_is_another_place():
    if not shutil.which("unshare") or subprocess.run(["unshare", "--pid", "--fork", "true"]).returncode:
        pytest.skip("this user may not make a namespace of process ids")
    code = "from training.faults.liveness import this_process; print(*this_process()[2:])"
    command = ["unshare", "--pid", "--fork", sys.executable, "-c", code]
    there = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    here = this_process()
    assert there.strip() != f"{here.machine} {here.namespace}"
    assert there.split()[1] == here.namespace.split()[0], "the same start of the same system"


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


def test_a_setting_that_differs_between_ranks_is_an_error_that_names_ranks_and_values(monkeypatch):
    with pytest.raises(UserError, match="learning_rate is 0.1 on rank 0, 2, 0.2 on rank 1. Start all"):
        settings_of(monkeypatch, *((0, {"learning_rate": rate}) for rate in (0.1, 0.2, 0.1)))


def test_machines_may_have_their_data_at_other_paths_but_not_ranks_of_one_machine(monkeypatch):
    settings_of(monkeypatch, (0, {"dataset": "/a/text"}), (1, {"dataset": "/b/text"}))
    with pytest.raises(UserError, match="dataset is '/a' on rank 1, '/b' on rank 2"):
        settings_of(monkeypatch, (0, {"dataset": "/a"}), (1, {"dataset": "/a"}), (1, {"dataset": "/b"}))


# --- real launches ---


def launch(
    config, out, backend="static", machines=2, processes=1, flags=(), torchrun=(), seconds=SECONDS, **env
) -> list:
    """[(exit status, seconds since the fault, output)] of each machine. flags: of the last machine."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    at = {
        "static": lambda n: ["--master_addr=127.0.0.1", f"--master_port={port}", f"--node_rank={n}"],
        "c10d": lambda n: ["--rdzv_backend=c10d", f"--rdzv_endpoint=127.0.0.1:{port}", f"--rdzv_id={port}"],
    }[backend]
    consoles = [out.with_name(f"{out.name}-{n}.console") for n in range(machines)]
    started, ended, began = [], [], time.time()
    for n, path in enumerate(consoles):
        options = [f"--nnodes={machines}", *at(n), *torchrun]
        how = {"processes": processes, "torchrun": options, "script": WORKER, **env}
        own = flags if n == machines - 1 else ()
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
    here, there = launch(config, tmp_path / "out", FAULT="SIGKILL 1 hashing", DEAD_TICKS=SOON)
    assert here[0] == 1 and here[1] < END_SECONDS
    says(
        here[2], "[rank 0] error: rank 1 (", f"is silent for {SOON} s before all ranks had joined (starting)"
    )


def test_two_machines_train_after_a_restart(config, tmp_path):
    """Nothing that the first attempt has left in the store ends the second."""
    env = {"FAULT": "raise 1 hashing", "FAULT_ONCE": str(tmp_path / "fault"), "DEAD_TICKS": "20"}
    ended = launch(config, tmp_path / "out", "c10d", torchrun=["--max-restarts=1"], **env)
    assert [status for status, _, _ in ended] == [0, 0], ended[0][2][-3000:]
    says(ended[0][2] + ended[1][2], "FAULT", "Restart 1 by torchrun")


# whichever comes first: torchrun ends, or it is busy and rank 0 has been silent for too long
GONE = "torchrun of the machine of rank 0 ({}) has ended, or that machine is gone"
SILENT = f"rank 1 ({{}}) is silent for {SOON} s before all ranks had joined (starting)"


@pytest.mark.chaos
@pytest.mark.parametrize("backend", ["static", "c10d"])
@pytest.mark.parametrize(
    ("what", "rank", "where", "reason"),
    [
        ("raise", 0, "hashing", "rank 0 ({}) failed: ValueError: a fault of rank 0"),
        ("SIGKILL", 0, "hashing", GONE),
        ("node", 0, "hashing", GONE),
        *((what, 1, "hashing", SILENT) for what in ("node", "exit0", "SIGSTOP")),
        ("oom", 1, "hashing", "rank 1 ({}) failed: OutOfMemoryError: Tried to allocate too much"),
        ("raise", 1, "import", "nor is any other process of torchrun's node 1"),
        ("orphan", 1, "hashing", "rank 1 ({}) has lost its torchrun before its first iteration"),
    ],
)
def test_every_way_to_end_before_joining_is_named_on_the_other_machine(
    config, tmp_path, backend, what, rank, where, reason
):
    fault = f"{what} {rank} {where}"
    ended = launch(config, tmp_path / "out", backend, FAULT=fault, DEAD_TICKS=SOON)
    status, seconds, output = ended[1 - rank]
    assert status == 1 and seconds < END_SECONDS
    before, _, behind = reason.partition("{}")
    if reason != GONE or f"rank 0 is silent for {SOON} s" not in without_places(output):
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
    env = {"FAULT": f"{what} 63 {where}", "DEAD_TICKS": "30"}
    ended = launch(config, tmp_path / "out", machines=8, processes=8, seconds=600, **env)
    slowest = max(seconds for _, seconds, _ in ended)
    print(f"\n8 x 8 processes, {env['FAULT']}: all have ended after {slowest:.1f} s")
    assert slowest < END_SECONDS and all(status for status, _, _ in ended)
    for _, _, output in ended:  # torchrun of a killed rank says "rank      : 63 (local_rank: 7)"
        says(re.sub(r"rank +: ", "rank ", output), "rank 63 (")
