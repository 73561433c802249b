"""Traces as torch.profiler writes them, made by hand: what a GPU would leave, for machines that have none."""

import gzip
import json
from pathlib import Path

from training.records.profiler import PLACES, TIMES, facts_path, trace_path


class GpuTrace:
    """One window: operators on the host, and the kernels that they launch, in microseconds."""

    def __init__(self, first: float = 1e6):
        self.events, self.correlation, self.start = [], 0, first

    def operator(self, name, begin, end, shapes=(), thread=1):
        """A stretch of the host; begin and end count from the window's start, as all times do."""
        args = {"Input Dims": [list(shape) for shape in shapes]}
        self._add("cpu_op", name, begin, end, thread, args)

    def kernel(self, name, launched, begin, end, stream=7, thread=1, grid=(1, 1, 1), category="kernel"):
        self.correlation += 1
        self._add("cuda_runtime", "cudaLaunchKernel", launched, launched + 1, thread, self._launch())
        args = {**self._launch(), "stream": stream, "grid": list(grid)}
        self._add(category, name, begin, end, stream, args)

    def mark(self, launched, begin):
        """Where an iteration begins."""
        self.kernel("at::cuda::(anonymous namespace)::spin_kernel(long)", launched, begin, begin)

    def _launch(self):
        return {"correlation": self.correlation}

    def _add(self, category, name, begin, end, thread, args):
        event = {"ph": "X", "cat": category, "name": name, "tid": thread, "args": args}
        self.events.append({**event, "ts": self.start + begin, "dur": end - begin})

    def write(self, path: Path):
        with gzip.open(path, "wt") as file:
            json.dump({"traceEvents": self.events}, file)


def write_rank(out_dir: Path, places: GpuTrace, times: GpuTrace, iterations: int, seconds: float, rank=0):
    """What training/records/profiler.py leaves of a rank. `seconds`: all iterations by the host's clock."""
    places.write(trace_path(out_dir, PLACES, rank))
    times.write(trace_path(out_dir, TIMES, rank))
    measured = {"iterations": list(range(22, 22 + iterations)), "seconds": seconds}
    windows = {PLACES: {"iterations": [6], "seconds": 0.1}, TIMES: measured}
    facts = {"rank": rank, "device": "cuda", "windows": windows}
    facts_path(out_dir, rank).write_text(json.dumps(facts))
