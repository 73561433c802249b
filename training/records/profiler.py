"""Records a few iterations with torch.profiler, for tools.profile: where each kernel belongs, and its time.

Recording operators and shapes slows the host down, and a replayed CUDA graph has no operators. So a GPU's
iterations are recorded twice. The window "places" has operators, shapes and kernels of an iteration before
any capture: it tells where each kernel belongs. The window "times" has kernels alone, at a low cost. Both
compute the same kernels in the same order, so tools.profile gives each kernel of the second window the place
that it has in the first. On a CPU one window is enough: the times are those of the operators.
"""

from __future__ import annotations

import json
import logging
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from common.durable_file import write_bytes
from training.configuration.keys import TrainConfig
from training.hardware.capability import capability
from training.process.world import World
from training.records.clock import Clock

log = logging.getLogger("nanomfu")

PLACES, TIMES = "places", "times"
# Iterations of a process. The first five compile; a CUDA graph is checked against iterations 8 and 9
# (training/cuda_graphs/graphed_step.py). The first iteration of a window begins with an idle GPU, so the
# figures are of the others, where there are others.
PLACES_WINDOW, TIMES_WINDOW = range(6, 7), range(22, 25)
ITERATIONS = TIMES_WINDOW.stop + 1  # that a run needs, because a window ends before the next iteration
MARK = "iteration {}"


class Window(NamedTuple):
    """Iterations to record together."""

    name: str
    iterations: range
    activities: list[ProfilerActivity]
    operators: bool  # records them with their shapes


def make_profiler(config: TrainConfig, world: World, clock: Clock, start: int) -> Profiler:
    """What the loop calls. `start` is the first iteration of this process."""
    if config.profile is not None and config.max_iters - start < ITERATIONS:
        # no error: the run itself may be the end of a resumed one
        log.warning(
            f"profile={config.profile!r} records nothing: it needs {ITERATIONS} iterations, and {start} to "
            f"max_iters={config.max_iters} are too few; state --max_iters={start + ITERATIONS}"
        )
    return Profiler(config, world, clock, start)


def windows(on_gpu: bool) -> list[Window]:
    if not on_gpu:
        return [Window(TIMES, TIMES_WINDOW, [ProfilerActivity.CPU], True)]
    both = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    return [
        Window(PLACES, PLACES_WINDOW, both, True),
        Window(TIMES, TIMES_WINDOW, [ProfilerActivity.CUDA], False),
    ]


def trace_path(out_dir: Path, window: str, rank: int) -> Path:
    return out_dir / f"profile_{window}_rank{rank}.json.gz"


def facts_path(out_dir: Path, rank: int) -> Path:
    """What the traces of this rank do not say."""
    return out_dir / f"profile_rank{rank}.json"


class Profiler:
    """profile='time'; None records nothing. Every rank writes its own traces. It synchronizes the device only
    at both ends of a window."""

    def __init__(self, config: TrainConfig, world: World, clock: Clock, start: int):
        self.out_dir, self.world = Path(config.out_dir), world
        self.clock, self.start = clock, start
        self.on_gpu = world.device.type == "cuda"
        self.windows = windows(self.on_gpu) if config.profile else []
        self.began: float | None = None  # by the host's clock; None while nothing is recorded
        self.facts: dict[str, Any] = {"rank": world.rank, "device": world.device.type, "windows": {}}
        if self.windows and self.on_gpu:
            count = torch.cuda.get_device_properties(world.device).multi_processor_count
            self.facts |= {"capability": capability(world.device).compute, "multiprocessors": count}

    def before(self, iteration: int) -> None:
        """Called before the batch of each iteration is taken. All ranks."""
        if not self.windows:
            return
        window, number = self.windows[0], iteration - self.start
        if number == window.iterations.start - 1:
            with self.clock.paused():  # the first time, CUPTI needs seconds to start
                self.trace = profile(activities=window.activities, record_shapes=window.operators)
                self.trace.prepare_trace()
        elif number == window.iterations.start:
            with self.clock.paused():
                self.trace.start_trace()
            self.began = time.perf_counter()
        if self.began is not None:
            self._mark(iteration)
            if number == window.iterations.stop:
                self._close(window, self.began)

    def _mark(self, iteration: int) -> None:
        """Shows in the trace where an iteration begins: a GPU's stream gets a kernel that nothing else
        launches."""
        if self.on_gpu:
            torch.cuda._sleep(1)  # one clock cycle; 'spin_kernel' in the trace
        else:
            with record_function(MARK.format(iteration)):
                pass

    def _close(self, window: Window, began: float) -> None:
        with self.clock.paused():
            seconds = time.perf_counter() - began  # the device has done everything
            self.trace.stop_trace()
            iterations = [self.start + number for number in window.iterations]
            self.facts["windows"][window.name] = {"iterations": iterations, "seconds": seconds}
            self._write(window)
        self.windows, self.began = self.windows[1:], None

    def _write(self, window: Window) -> None:
        rank = self.world.rank
        with tempfile.TemporaryDirectory(prefix="nanomfu-") as folder:
            path = trace_path(Path(folder), window.name, rank)
            self.trace.export_chrome_trace(str(path))  # compressed, by the ending of the name
            write_bytes(trace_path(self.out_dir, window.name, rank), path.read_bytes())
        write_bytes(facts_path(self.out_dir, rank), json.dumps(self.facts, indent=2).encode())
