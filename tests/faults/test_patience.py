"""Thresholds of patience, each from both sides: when a run hangs, a rank is slow, a warm-up is over. And that
no number of signals costs the checkpoint."""

import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.helpers import TINY

from training.checkpoints.saver import Save
from training.checkpoints.train_state import Progress
from training.configuration.keys import TrainConfig
from training.faults import watchdog as watchdog_module
from training.faults.stragglers import StragglerDetector
from training.faults.watchdog import Stopped, Watchdog
from training.hardware.peaks import Peak
from training.optimization.precision import LossScale
from training.process import world
from training.process.work_timer import WorkTimer
from training.process.world import ALONE
from training.records.clock import Clock
from training.records.rows import Logger, Reading

CPU = torch.device("cpu")


# --- when a run hangs ---


@pytest.fixture
def watchdog(monkeypatch, tmp_path):
    """A watchdog without its thread; `ended` has what would have ended the process."""
    config = TrainConfig(out_dir=str(tmp_path), timeout_minutes=10.0, start_timeout_minutes=60.0)
    made = Watchdog()
    made.begin(config)
    made.join(ALONE)
    made.ended = []
    monkeypatch.setattr(watchdog_module, "leave_now", made.ended.append)
    monkeypatch.setattr(made, "_end_hanging_run", lambda minutes, ticks: made.ended.append(minutes))
    return made


def ends_after(watchdog, seconds: float) -> bool:
    """Whether a tick ends the run that has made no progress for so long."""
    watchdog.ended.clear()
    watchdog.stalled_seconds = seconds
    watchdog._tick(1)
    return bool(watchdog.ended)


def test_iterations_may_take_the_timeout_and_what_compiles_the_longer_one(watchdog):
    assert not ends_after(watchdog, 3599) and ends_after(watchdog, 3601), "starting"
    assert watchdog.ended == [60.0]
    for iteration in range(100, 120):  # a resume begins at 100
        watchdog.check(iteration)
        limit = 3600 if iteration < 112 else 600
        assert not ends_after(watchdog, limit - 1) and ends_after(watchdog, limit + 1), iteration
    assert watchdog.ended == [10.0]


def test_an_evaluation_may_take_the_longer_timeout_and_each_check_begins_anew(watchdog):
    watchdog.check(0)
    watchdog.check(50)
    watchdog.stalled_seconds = 500.0
    with pytest.raises(ZeroDivisionError), watchdog.during("evaluation"):
        assert watchdog.stalled_seconds == 0.0 and watchdog.phase == "evaluation"
        assert not ends_after(watchdog, 3599) and ends_after(watchdog, 3601)
        watchdog.check()
        assert watchdog.stalled_seconds == 0.0 and watchdog.phase == "evaluation"
        raise ZeroDivisionError
    assert watchdog.stalled_seconds == 0.0 and watchdog.phase == "training"
    assert not ends_after(watchdog, 599) and ends_after(watchdog, 601)


@pytest.mark.parametrize(
    ("timeout", "start_timeout", "starting", "training"),
    [(0.0, 60.0, False, False), (10.0, 0.0, False, True), (10.0, 60.0, True, True)],
)
def test_a_timeout_of_0_is_none(watchdog, timeout, start_timeout, starting, training):
    watchdog.config = TrainConfig(timeout_minutes=timeout, start_timeout_minutes=start_timeout)
    assert ends_after(watchdog, 1e9) == starting
    watchdog.check(0)
    watchdog.check(50)
    assert ends_after(watchdog, 1e9) == training
    assert (world._timeout(watchdog.config) == world.NO_LIMIT) == (not starting), "of a collective"


def test_time_in_which_the_process_was_suspended_does_not_count(watchdog, monkeypatch):
    """Ticks after 1 s, 1.5 s, an hour, and 1 s; between ticks of 0.4 s nothing happens."""
    times = iter([0.0, 1.0, 2.5, 2.9, 3602.5, 3603.5])
    counted = []

    def tick(ticks):
        counted.append((ticks, watchdog.stalled_seconds))
        if ticks == 4:
            watchdog.closed.set()

    monkeypatch.setattr(watchdog_module.time, "monotonic", lambda: next(times))
    monkeypatch.setattr(watchdog.signals, "receive", lambda timeout: b"")
    monkeypatch.setattr(watchdog, "_tick", tick)
    watchdog._supervise()
    assert counted == [(1, 1.0), (2, 2.5), (3, 4.5), (4, 5.5)]


# --- signals ---


@pytest.fixture
def clock(monkeypatch):
    """clock.now is what the watchdog takes for the time."""
    clock = SimpleNamespace(now=1000.0)
    fake = SimpleNamespace(monotonic=lambda: clock.now, sleep=time.sleep)
    monkeypatch.setattr(watchdog_module, "time", fake)
    return clock


def asked(watchdog) -> int:
    return int(watchdog.consensus.asked["stop"])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP])
@pytest.mark.parametrize("pause", [0.0, 0.5, 2.0, 100.0])
def test_a_signal_that_is_repeated_never_ends_the_process(watchdog, clock, number, pause):
    """Slurm and torchrun repeat it; the checkpoint may be half written."""
    watchdog.check(7)
    for _ in range(4):
        watchdog._handle_signal(number)
        clock.now += pause
    assert watchdog.ended == [] and asked(watchdog) == number
    with pytest.raises(Stopped, match="before iteration 8") as stop:
        watchdog.check(8)
    assert stop.value.status == 128 + number
    watchdog._handle_signal(number)
    assert watchdog.ended == [] and watchdog.stop_asked_at == 1000.0


@pytest.mark.parametrize(("pause", "ends"), [(0.0, False), (0.9, False), (1.1, True), (100.0, True)])
@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_ends_at_once_if_a_stop_was_asked_for_a_second_ago(watchdog, clock, first, pause, ends):
    watchdog.check(7)
    watchdog._handle_signal(first)
    assert watchdog.ended == []
    clock.now += pause
    watchdog._handle_signal(signal.SIGINT)
    assert watchdog.ended == ([130] if ends else [])


def test_a_signal_before_the_first_iteration_ends_at_once_and_one_at_the_end_does_nothing(watchdog, clock):
    """And a run that is over has a minute for the last barrier."""
    watchdog._handle_signal(signal.SIGTERM)
    assert watchdog.ended == [143]
    watchdog.ended.clear()
    watchdog.first = 0  # as the leave_now of the test has returned
    watchdog.end(0)
    for _ in range(3):
        watchdog._handle_signal(signal.SIGINT)
        clock.now += 5
    assert watchdog.ended == [] and not ends_after(watchdog, 59) and ends_after(watchdog, 61)
    assert watchdog.ended == [0]


def test_a_store_that_is_lost_before_the_first_iteration_is_named(watchdog, monkeypatch):
    """After all have joined, too: a large model takes minutes to build."""
    said = []
    monkeypatch.setattr(watchdog_module, "print_last", said.append)
    monkeypatch.setattr(watchdog.liveness, "size", 2)
    monkeypatch.setattr(watchdog_module.time, "sleep", lambda seconds: None)
    watchdog.liveness.joined = watchdog.liveness.broken = True
    watchdog._handle_signal(signal.SIGTERM)
    (text,) = said
    assert text.startswith("error: torchrun's store, ") and "that machine is gone" in text


def test_ranks_whose_torchrun_has_gone_ask_once_and_other_numbers_in_the_socket_ask_nothing(
    watchdog, monkeypatch
):
    monkeypatch.setattr(watchdog_module, "is_launched", lambda: True)
    watchdog.check(7)
    watchdog._tick(1)
    for number in (0, int(signal.SIGCHLD), int(signal.SIGWINCH)):
        watchdog._handle_signal(number)
    assert not asked(watchdog) and watchdog.stop_asked_at is None, "torchrun is there"
    watchdog.launcher = -1
    watchdog._tick(2)
    assert asked(watchdog) == signal.SIGTERM and watchdog.stop_asked_at
    monkeypatch.setattr(watchdog, "_handle_signal", None)  # it is not asked again
    watchdog._tick(3)


# --- when a rank is slow ---


def named(seconds: list[float], times: int) -> list[tuple[int, str]]:
    detector, news = StragglerDetector(len(seconds)), []
    for _ in range(times):
        news += [(change.rank, change.kind) for change in detector.changes(seconds)]
    return news


@pytest.mark.parametrize(
    ("own", "usual", "slow"),
    [
        *((0.149, 0.1, False), (0.151, 0.1, True)),  # at most half as long again
        *((0.019 + 0.02, 0.02, False), (0.021 + 0.02, 0.02, True)),  # by less and more than 20 ms
        *((1.49, 1.0, False), (1.51, 1.0, True)),
    ],
)
def test_a_straggler_takes_half_as_long_again_and_20_ms_more(own, usual, slow):
    assert named([usual, usual, own, usual], 20) == ([(2, "straggler")] if slow else [])


def test_a_rank_is_named_after_8_slow_iterations_in_a_row():
    assert named([0.1, 0.1, 0.2], 7) == [] and named([0.1, 0.1, 0.2], 8) == [(2, "straggler")]
    detector = StragglerDetector(3)
    for _ in range(5):  # 7 slow ones, and one that is not
        assert [change for _ in range(7) for change in detector.changes([0.1, 0.2, 0.1])] == []
        assert detector.changes([0.1, 0.1, 0.1]) == []
    assert named([0.1, 0.0, 0.3], 20) == [], "one is not measured yet"
    assert sorted(named([0.1, 0.3, 0.1, 0.3], 8)) == [(1, "straggler"), (3, "straggler")]


# --- warm-up windows ---


def test_work_is_timed_after_5_iterations_and_told_after_10_more_without_the_waits_for_others(monkeypatch):
    """Up to the end of the forward."""
    now = iter(range(10**6))
    monkeypatch.setattr("training.process.work_timer.time.perf_counter", lambda: float(next(now)))
    timer, found = WorkTimer(on_gpu=False), []
    for i in range(30):
        timer.begin_batch()
        for _ in range(100 if i < 5 else 0):  # the first five are slow
            timer._now()
        timer.begin_wait()
        timer.end_wait()
        timer.end_forward()
        timer.begin_wait()  # an evaluation's
        timer.end_wait()
        found.append(timer.seconds())
    assert found == [0.0] * 15 + [3.0 - 1.0] * 15, "the running one is not complete"


def make_logger(clock, start=0, record=None):
    flops = {"calculation_method": "", "flops_per_token": 1, "flops_per_token_causal": 1}
    model = {"architecture": {"arch": "", "n_head": 1, "n_kv_head": 1}, "total_params": 1}
    info = {"flops": flops, "hardware": {"gpu_name": "", "precision": ""}, "model": model}
    peak = Peak(None, "", reason="none")
    return Logger(TrainConfig(**TINY), ALONE, record, clock, peak, info, Progress(start, 0))


@pytest.mark.parametrize("start", [0, 100])
def test_rows_with_any_of_the_first_5_iterations_are_warm_up(start):
    """loss ... optimizer_ms, seconds, verdicts."""
    logger, rest = make_logger(Clock(CPU), start), (1.0, 1.0, None, 1.0, 1.0, 1.0, 1.0, [])
    rows = [logger._row(Reading(first + 3, first, *rest), 0.0) for first in range(start, start + 8)]
    assert [row["warmup"] for row in rows] == [True] * 5 + [False] * 3


@pytest.fixture
def seconds(monkeypatch):
    """seconds.now is what a Clock takes for the time."""
    seconds = SimpleNamespace(now=0.0)
    monkeypatch.setattr("training.records.clock.time.perf_counter", lambda: seconds.now)
    return seconds


def test_the_clock_leaves_pauses_out_and_one_within_another_once(seconds):
    clock = Clock(CPU)
    seconds.now = 5.0
    with clock.paused():
        seconds.now = 104.0
    with clock.paused():
        seconds.now = 105.0
    seconds.now = 107.0
    assert clock.lap() == (7.0, [(0.0, 5.0), (104.0, 104.0), (105.0, 107.0)])
    with pytest.raises(ValueError), clock.paused():
        seconds.now = 200.0
        raise ValueError
    seconds.now = 201.0
    assert clock.lap().seconds == 1.0
    # a save waits, in its pause, for the checkpoint before, which is then recorded in a pause of its own
    with clock.paused():
        seconds.now = 203.0
        with clock.paused():
            seconds.now = 206.0
        seconds.now = 211.0
    seconds.now = 212.0
    assert clock.lap() == (1.0, [(201.0, 201.0), (211.0, 212.0)])


class Queue:
    """A device that computes what is queued while the host goes on, and a record that takes the host 10 s to
    rewrite."""

    trackers, run_lock = None, SimpleNamespace(check=lambda: None)

    def __init__(self, monkeypatch):
        self.now = self.busy_until = 0.0
        self.rewrites = 0
        monkeypatch.setattr("training.records.clock.time.perf_counter", lambda: self.now)
        monkeypatch.setattr(torch.cuda, "synchronize", self.wait)

    def launch(self, seconds):
        self.busy_until = max(self.now, self.busy_until) + seconds

    def wait(self):
        self.now = max(self.now, self.busy_until)

    def save(self, at_once=False):
        self.now += 10.0
        self.rewrites += 1

    def add(self, section, entry): ...


def test_only_time_in_which_the_gpu_had_nothing_to_do_is_left_out_of_a_row(monkeypatch):
    """A checkpoint is complete while the GPU has 30 s of iterations to compute."""
    queue = Queue(monkeypatch)
    logger = make_logger(Clock(torch.device("cuda")), record=queue)
    saved = Save(Path("checkpoints"), Progress(8, 8), "", False)
    for rewrites in (1, 2):
        queue.launch(30.0)
        queue.now += 1.0
        logger.saved(saved)
        queue.wait()  # as the row's read does
        lap = logger.clock.lap()
        assert lap.seconds == 30.0
        reading = Reading(9, 5, 1.0, 1.0, None, 1.0, 1.0, 1.0, lap.seconds, [], lap.intervals)
        logger.write(reading, 0.0, 0)
        assert queue.rewrites == rewrites, "the checkpoint is in the record at the next row"
    queue.launch(30.0)
    with logger.clock.paused():  # whatever the host does, the GPU first computes what it has
        queue.now += 10.0
    assert logger.clock.lap().seconds == 30.0


def test_a_loss_scale_doubles_after_2000_good_iterations_and_halves_after_a_bad_one():
    scale = LossScale(True, CPU)
    good, bad = torch.zeros(()), torch.ones(())
    for i in range(4000):
        assert scale.scale.item() == (65536.0 if i < 2000 else 131072.0)
        scale.update(good)
    assert scale.scale.item() == 262144.0
    for _ in range(1999):
        scale.update(good)
    scale.update(bad)
    assert scale.scale.item() == 131072.0 and scale.growth_tracker.item() == 0
    fixed = LossScale(False, CPU)
    for found in (good, bad):
        fixed.update(found)
    assert fixed.scale.item() == 1.0 and fixed.state() == {}
