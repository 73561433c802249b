"""train.py in this process, with an account of what its first iteration compiled. bench/startup.py starts it.

Its arguments are a file, then those of train.py. Into the file (JSON) go the seconds that torch spent on
tracing and compiling (torch._dynamo's own metrics), and those of the Triton kernels that are called directly
and not through Inductor (Triton's compilation listener).
"""

from __future__ import annotations

import contextlib
import json
import runpy
import sys
from pathlib import Path

from training.configuration.keys import ROOT
from training.process.exit_status import leave_now


class OwnKernels:
    """What Triton says of each kernel that this process compiled, or read from the cache."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}  # of each kernel, all its specializations
        self.compiled = self.read = 0
        with contextlib.suppress(ImportError):  # no Triton: a CPU
            from triton import knobs

            knobs.compilation.listener = self._compiled

    def _compiled(self, *, src, metadata, metadata_group, times, cache_hit) -> None:
        self.seconds[src.name] = self.seconds.get(src.name, 0.0) + times.total / 1e6
        self.read += cache_hit
        self.compiled += not cache_hit


def account(kernels: OwnKernels) -> dict:
    """Of this process: {'inductor_s', 'inductor_phases_s', 'own_kernels_s', ...}."""
    from torch._dynamo.utils import compilation_time_metrics

    phases = {name: sum(seconds) for name, seconds in compilation_time_metrics.items()}
    forward, backward = (
        "_compile.compile_inner",
        "backward._backward_impl",
    )  # the backward's is compiled later
    return {
        "inductor_s": phases.get(forward, 0.0) + phases.get(backward, 0.0),
        "inductor_phases_s": phases,
        "own_kernels_s": sum(kernels.seconds.values()),
        "own_kernels_compiled": kernels.compiled,
        "own_kernels_read": kernels.read,
        "kernels_s": dict(sorted(kernels.seconds.items(), key=lambda item: -item[1])),
    }


def main(path: Path, argv: list[str]) -> int:
    kernels = OwnKernels()
    train = runpy.run_path(str(ROOT / "train.py"), run_name="train")
    status = train["run"](argv)
    path.write_text(json.dumps(account(kernels)))
    return status


if __name__ == "__main__":
    leave_now(main(Path(sys.argv[1]), sys.argv[2:]))
