"""What one rank sees of the others, over one store: who is late, who has ended, who is behind."""

import base64
import json
import pickle
import threading
import time
from collections import Counter

import pytest
import torch.distributed as dist
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _RendezvousState

from training.configuration.keys import TrainConfig
from training.faults import liveness as module
from training.faults import watchdog as watchdog_module
from training.faults.liveness import WAITING, Liveness, Process
from training.faults.watchdog import BUSY_SECONDS, Watchdog
from training.process import world

pytestmark = pytest.mark.dead_rank


@pytest.fixture
def ranks(monkeypatch):
    """ranks(size, machines): what each sees; ranks are numbered machine by machine, as torchrun does it."""
    store = dist.HashStore()

    def make(size: int, machines: int = 1) -> list[Liveness]:
        monkeypatch.setattr(module, "machine_number", lambda: (0, machines))
        monkeypatch.setattr(module, "machine_size", lambda: size // machines)
        made = [Liveness() for _ in range(size)]
        for rank, one in enumerate(made):
            one.rank, one.size, one.store = rank, size, store
            one.processes = {rank: Process("node", 100 + rank)}
            first = rank - rank % (size // machines)
            one.local_ranks = range(first, first + size // machines)
            one.met.set()
            for what in ("process", "progress"):
                store.compare_set(f"{what}/{rank}", "", "")
        return made

    return make


def say(*those: Liveness, phase: str = "starting") -> None:
    """They have started."""
    for one in those:
        one.store.set(f"process/{one.rank}", json.dumps(one.processes[one.rank]))
        one.publish(1, -1, phase)


def look(one: Liveness, ticks: int, meanwhile=lambda tick: None) -> None:
    """For so long it ends nothing."""
    for tick in range(ticks):
        meanwhile(tick)
        assert one.why_not_all_join(ready=True) is None, tick


# --- who is late ---


def test_a_rank_that_is_silent_or_absent_is_late_and_not_dead(ranks, monkeypatch):
    first, second, third = ranks(3)
    say(first, second)
    look(first, 500, lambda tick: second.publish(tick, -1, "starting"))
    assert first.silent == {1: 0, 2: 500} and first.ended() == []
    look(second, 1)
    look(second, 500)
    assert second.silent == {0: 500}, "the others look at rank 0 alone"
    # a store that does not answer is no sign of life
    monkeypatch.setattr(first, "_try", lambda action: None)
    look(first, 3)
    assert first.silent == {1: 3, 2: 503}
    assert first.late() == "rank 1, rank 2: starting"


def test_those_that_are_waited_for_are_named_with_their_machine(ranks, monkeypatch):
    first, second, third, fourth = ranks(4, machines=2)
    say(first, second, fourth, phase=WAITING)
    look(first, 1)
    assert first.late() == "rank 2 of machine 1: not started"
    say(third, phase="starting")
    look(first, 1)
    assert first.late() == "rank 2 (node, process 102): starting"
    say(third, phase=WAITING)
    look(first, 1)
    assert first.late() == ""
    monkeypatch.setattr(module, "machine_size", lambda: 3)
    first.processes.clear()
    assert first.name(3) == "rank 3", "not all machines have as many processes"


@pytest.fixture
def waiting(ranks, monkeypatch, tmp_path):
    """waiting(rank): a watchdog of this rank, of 2 machines of 2, which is ready to join. `said` has its
    lines, and `ended` what ends it."""
    said, ended = [], []
    everyone = ranks(4, machines=2)
    monkeypatch.setattr(watchdog_module.log, "warning", said.append)

    def make(rank: int) -> Watchdog:
        watchdog = Watchdog()
        watchdog.begin(TrainConfig(out_dir=str(tmp_path), start_timeout_minutes=10.0))
        watchdog.liveness, watchdog.phase = everyone[rank], WAITING
        monkeypatch.setattr(watchdog, "_end_hanging_run", lambda minutes, ticks: ended.append(minutes))
        watchdog.said, watchdog.ended = said, ended
        return watchdog

    return make


def test_the_line_about_those_that_are_waited_for_comes_at_growing_intervals(waiting):
    watchdog, when = waiting(0), []
    for tick in range(1, 500):
        watchdog._tick(tick)
        when += [tick] * (len(watchdog.said) - len(when))
    assert when == [30, 60, 120, 240, 480]
    assert watchdog.said[0].startswith("waiting for rank 1 of machine 0, ")


@pytest.mark.parametrize(("rank", "speaks"), [(1, True), (2, True), (3, False)])
def test_one_rank_of_each_machine_says_that_it_waits_for_rank_0(waiting, rank, speaks):
    watchdog = waiting(rank)
    for tick in range(31):
        watchdog._tick(tick)
    assert watchdog.said == ["waiting for rank 0 of machine 0: not started"] * speaks


@pytest.mark.parametrize("rank", [0, 1])
def test_a_wait_for_a_silent_rank_ends_after_start_timeout_minutes_and_one_for_a_busy_rank_does_not(
    waiting, rank
):
    watchdog, others = waiting(rank), [waiting(other).liveness for other in range(4)]
    for tick in range(1500):
        for one in others:
            one.publish(tick, -1, "starting")
        watchdog._tick(tick)
    assert watchdog.ended == []
    for tick in range(601):
        watchdog._tick(tick)
    assert watchdog.ended == [10.0]


@pytest.mark.hang
def test_a_rank_that_reads_data_has_not_stalled_and_one_that_does_nothing_has(monkeypatch):
    watchdog = Watchdog()
    for used, stalled in ((BUSY_SECONDS / 2, True), (2 * BUSY_SECONDS, False)):
        now = iter([100.0 + used] * 2)
        monkeypatch.setattr("training.faults.watchdog.time.process_time", lambda now=now: next(now))
        watchdog.cpu_seconds, watchdog.stalled_seconds = 100.0, 5.0
        watchdog._look_at_start()
        assert bool(watchdog.stalled_seconds) == stalled


# --- who has ended ---


def test_a_rank_that_has_done_its_work_has_not_failed_but_ends_a_rank_that_wants_to_join(ranks):
    """A dry run does not join: all ranks of one end well, and no rank waits for it."""
    first, second = ranks(2)
    say(first, second)
    second.end_without_joining()
    first.lost.add(1)
    assert first.ended() == [] and first.reason_to_end() is None
    assert first.why_not_all_join(ready=False) is None, "it may do a dry run, too"
    told = "rank 1 (node, process 101) has ended without joining (a dry run?): start all with the same flags"
    assert first.why_not_all_join(ready=True) == told
    first.join()
    assert first.ended() == [1], "after joining, none may leave"


def test_a_rank_that_leaves_does_not_publish_any_more(ranks, monkeypatch):
    _, second = ranks(2)
    watchdog = Watchdog()
    watchdog.liveness = second
    monkeypatch.setattr(watchdog_module, "TICK_S", 0.001)
    with watchdog:
        time.sleep(0.1)
    assert second.store.get("progress/1") == b"ended"


def test_a_lost_store_ends_the_wait_and_a_slow_one_does_not(ranks):
    _, second = ranks(2)

    class Slow:
        def multi_get(self, keys):
            raise dist.DistStoreError("too slow")

        check = multi_get

    class Closed:
        def __getattr__(self, name):
            raise dist.DistNetworkError("Connection was likely closed")

    second.store = Slow()
    look(second, 100)
    assert not second.broken
    second.store = Closed()
    assert second.why_not_all_join(ready=True) is None and second.broken
    assert "torchrun of the machine of rank 0 has ended, or that machine is gone" in (
        second.why_not_all_join(ready=True)
    )


def test_two_threads_ask_a_store_that_does_not_answer_and_neither_waits_for_ever(ranks, monkeypatch):
    monkeypatch.setattr(module, "ANSWER_TIMEOUT_S", 0.2)
    _, second = ranks(2)
    back, began = threading.Event(), threading.Event()

    def hangs(store):
        began.set()
        back.wait(30)

    threading.Thread(target=lambda: second._try(hangs), daemon=True).start()
    assert began.wait(5)
    other = threading.Thread(target=lambda: second._try(lambda store: None), daemon=True)
    other.start()
    other.join(5)
    assert not other.is_alive()
    back.set()


def test_a_rank_whose_connection_is_closed_has_ended_and_the_first_reason_to_end_is_everyones(ranks):
    first, second, third = ranks(3)
    say(second, third)
    assert first.ended() == [] and first.reason_to_end() is None
    first.lost.add(2)
    assert first.ended() == [2]
    said = "rank 2 (node, process 102) has ended"
    assert first.reason_to_end() == second.reason_to_end() == said, "rank 0 has told it"
    assert second.end_all("rank 1 failed") == first.end_all("lost contact") == said


# --- what torchrun says ---


class Parent:
    """torchrun's command line, of this process's parent."""

    def __init__(self, *words):
        self.text = "\0".join(("python", "-m", "torch.distributed.run", *words, "")).encode()

    def __call__(self, path):
        return self

    def read_text(self):
        return self.text.decode()


def test_a_torchrun_that_has_left_for_good_is_read_from_their_own_store(monkeypatch):
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a run")
    where = ["--rdzv-backend", "c10d", f"--rdzv_endpoint=127.0.0.1:{server.port}"]
    monkeypatch.setattr(world, "Path", Parent("--nnodes=2", *where, "train.py", "--dataset=text"))
    state, found = _RendezvousState(), []
    for closed in (False, True):
        state.closed = closed
        server.set("torch.rendezvous.a run", base64.b64encode(pickle.dumps(state)))
        if not closed:
            ask = threading.Thread(
                target=lambda: found.append(world.wait_until_a_torchrun_ends()), daemon=True
            )
            ask.start()
            time.sleep(0.5)
            assert ask.is_alive()
    ask.join(20)
    assert found == [True]


@pytest.mark.parametrize(
    "words", [["--nnodes=2", "--node_rank=1", "train.py"], ["--standalone", "train.py"], []]
)
def test_without_a_membership_nothing_is_known(monkeypatch, words):
    monkeypatch.setattr(world, "Path", Parent(*words))
    assert world.wait_until_a_torchrun_ends() is False


def test_a_rank_that_never_started_ends_all_if_its_torchrun_has_left(ranks):
    first, second, *_ = ranks(4, machines=2)
    say(first, second, phase=WAITING)
    look(first, 1)
    first.a_torchrun_has_ended = True
    said = first.why_not_all_join(ready=False)
    assert "before all ranks had joined (rank 2 of machine 1, rank 3 of machine 1: not started)" in said


# --- who is behind ---


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


def test_without_a_word_of_rank_0_it_is_behind(ranks):
    *_, last = ranks(4, machines=2)
    last.met.clear()
    assert last.who_is_behind(1, -1, WAITING) == "rank 0 of machine 0 is not started"


# --- what it costs ---


def test_joining_asks_the_store_once_and_so_does_the_report_of_a_hang(ranks, monkeypatch):
    """Not twice for each rank, by each rank."""
    first, *others = ranks(64)
    say(first, *others)
    asked: Counter[str] = Counter()

    class Counted:
        def __getattr__(self, name):
            asked[name] += 1
            return getattr(others[0].store, name)

    first.store = Counted()
    first.join()
    assert asked == {"multi_get": 1} and first.name(63) == "rank 63 (node, process 163)"
    monkeypatch.setattr(module.time, "sleep", lambda seconds: None)
    first.who_is_behind(1, 0, "training")
    assert asked["multi_get"] == 3
