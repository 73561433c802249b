"""Samples clock, power, temperature and throttling of the GPUs in a thread, and gives each log row the
samples that belong to it.

A GPU at its power limit lowers its clock, so two runs can be compared only if the clock is stated for both.
Two traps. Compilation, evaluations and checkpoints run at other clocks, so only samples from a row's timed
intervals count. And a driver may fail or hang: the training loop only takes what the thread has put into a
deque, it never calls NVML and never waits for the thread.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from training.hardware.nvml import FIELDS, GpuReading, Nvml, Unavailable
from training.process.world import World

INTERVAL_S = 0.2  # between two samples
FACTS_TIMEOUT_S = 2.0  # how long the start of a run waits for a driver that does not answer
CLOSE_TIMEOUT_S = 1.0  # the same for its end
MAX_SAMPLES = 36_000  # two hours; of a longer row the last two hours count


class Sample(NamedTuple):
    began: float  # of time.perf_counter(), as in training/records/clock.py
    ended: float
    gpus: list[GpuReading]


class GpuMonitor:
    """Samples the GPUs with these UUIDs, from its creation until close(). Where there is nothing to sample,
    `reason` says why."""

    def __init__(self, uuids: list[str], interval_s: float = INTERVAL_S, reason: str = "the run uses no GPU"):
        self.uuids, self.interval_s = uuids, interval_s
        self.samples: deque[Sample] = deque(maxlen=MAX_SAMPLES)  # that no row has taken
        self.reason: str | None = "NVML has not answered yet" if uuids else reason
        self._facts: dict[str, Any] | None = None
        self.answered, self.ended = threading.Event(), threading.Event()
        self.thread = threading.Thread(target=self._run, name="gpu monitor", daemon=True)
        if uuids:
            self.thread.start()

    # --- the main thread ---

    def facts(self) -> dict[str, Any] | None:
        """The limits of the GPUs; None if NVML does not answer."""
        if self.uuids:
            self.answered.wait(FACTS_TIMEOUT_S)
        return self._facts

    def take(self, intervals: Sequence[tuple[float, float]]) -> dict[str, Any]:
        """The fields of a log row: medians over the GPUs and over the samples inside these intervals (of
        time.perf_counter()), and why something is missing. Uses up all earlier samples."""
        taken: list[Sample] = []
        while self.samples and self.samples[0].began < intervals[-1][1]:
            sample = self.samples.popleft()
            if any(begin <= sample.began and sample.ended <= end for begin, end in intervals):
                taken.append(sample)
        readings = [gpu for sample in taken for gpu in sample.gpus]
        row: dict[str, Any] = {name: _median([getattr(gpu, name) for gpu in readings]) for name in FIELDS}
        row["throttle"] = _shares([gpu.throttle for gpu in readings if gpu.throttle is not None])
        missing = [name for name, value in row.items() if value is None]
        reason = None
        if not taken:
            seconds = sum(end - begin for begin, end in intervals)
            reason = self.reason or f"no sample in {seconds:.2g} s; there is one every {self.interval_s:g} s"
        elif missing:
            reason = f"NVML does not give {', '.join(missing)} on this machine"
        return {**row, "gpu_samples": len(taken), "gpu_reason": reason}

    def close(self) -> None:
        """Does not wait for a driver that hangs."""
        self.ended.set()
        if self.thread.is_alive():
            self.thread.join(CLOSE_TIMEOUT_S)

    # --- the thread ---

    def _run(self) -> None:
        try:
            self._sample()
        except Unavailable as error:
            self.reason = str(error)
        except Exception as error:  # whatever it is, training goes on
            self.reason = f"sampling the GPUs failed: {type(error).__name__}: {error}"
        finally:
            self.answered.set()

    def _sample(self) -> None:
        nvml = Nvml(self.uuids)
        self._facts = nvml.describe()
        self.answered.set()
        self.reason = None
        while not self.ended.wait(self.interval_s):
            began = time.perf_counter()
            gpus = nvml.read()
            if any(value is not None for gpu in gpus for value in gpu):
                self.samples.append(Sample(began, time.perf_counter(), gpus))
                self.reason = None
            else:
                self.reason = f"NVML no longer answers: {nvml.last_error}"


def watch_gpus(world: World) -> GpuMonitor:
    """On rank 0, of all GPUs that this run uses on rank 0's machine. Other ranks have one without GPUs."""
    if not world.is_main:
        return GpuMonitor([], reason="rank 0 samples")
    if world.device.type != "cuda":
        return GpuMonitor([])
    # by UUID: CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER give torch other numbers than NVML has
    count = min(world.local_size, torch.cuda.device_count())
    properties = [torch.cuda.get_device_properties(i) for i in range(count)]
    return GpuMonitor([str(each.uuid).removeprefix("GPU-") for each in properties])


def _median(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(statistics.median(known)) if known else None


def _shares(readings: list[tuple[str, ...]]) -> dict[str, float] | None:
    """{reason: share of the readings in which it lowered the clock}; None without readings."""
    if not readings:
        return None
    counts = Counter(name for names in readings for name in names)
    return {name: count / len(readings) for name, count in counts.most_common()}
