"""Records and replays CUDA graphs, and keeps the conditions that both need.
training/cuda_graphs/graphed_step.py decides when to capture and whether to trust a capture."""

from __future__ import annotations

import contextlib
import gc
import logging
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from training.optimization.step import StepResult
from training.process.memory import GIB

log = logging.getLogger("nanomfu")


class Obstacle(Exception):
    """Why the iteration cannot be captured, or its capture cannot be trusted."""


class CudaGraphs:
    """The captures and their memory. Every eager iteration before them runs on the stream that will be
    captured, so that nothing is initialized during a capture and activations are kept for only one stream."""

    def __init__(self):
        self.stream, self.pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()
        self.graphs: list[torch.cuda.CUDAGraph] = []
        self.refused: list[torch.cuda.CUDAGraph] = []  # the allocator may still refer to them

    def check(self) -> None:
        """Raises Obstacle if this process group cannot be captured."""
        if dist.is_initialized() and dist.get_backend() != "nccl":
            raise Obstacle(f"backend={dist.get_backend()!r} communicates through the host; use nccl")

    def eager(self, run: Callable[[], StepResult]) -> StepResult:
        current = torch.cuda.current_stream()
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            result = run()
        current.wait_stream(self.stream)
        return result

    def eager_with_waits(self, run: Callable[[], StepResult]) -> tuple[StepResult, list[str]]:
        """Runs an eager iteration and lists where it waited for the GPU. A wait would break a capture, and a
        capture that CUDA breaks off leaves torch in an inconsistent state; this test does not."""
        mode = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                result = self.eager(run)
            finally:
                torch.cuda.set_sync_debug_mode(mode)
        waits = [w for w in caught if "called a synchronizing" in str(w.message)]
        return result, ["/".join(Path(w.filename).parts[-2:]) + f":{w.lineno}" for w in waits]

    def capture(self, run: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        """Records run() without executing it. The returned function executes it and copies its result."""
        eager = torch.cuda.memory_reserved()
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # frees eager activations for captured ones
        with torch.cuda.stream(self.stream), _no_collection():
            graph, output = self._record(run)
        self.graphs.append(graph)
        reserved = torch.cuda.memory_reserved()
        log.info(f"CUDA Graph: captured; {eager / GIB:.2f} GiB reserved before, {reserved / GIB:.2f} after")

        def replay():
            graph.replay()
            return output.clone()

        return replay

    def _record(self, run: Callable[[], torch.Tensor]) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        graph = torch.cuda.CUDAGraph()
        output: torch.Tensor | None = None
        failure: Exception | None = None
        # thread_local: NCCL's own threads and a loader's pinning thread may call CUDA during the capture
        graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
        try:
            output = run()
        except Exception as error:
            failure = error
        try:
            graph.capture_end()
        except Exception as error:
            self._clean_up(graph)
            failure = failure or error
        if failure is not None or output is None:
            graph.reset()
            raise failure or Obstacle("the iteration gave no result")
        return graph, output

    def _clean_up(self, graph: torch.cuda.CUDAGraph) -> None:
        """After a capture that CUDA broke off. Without it, torch would still allocate from the pool, and its
        generator would refuse to draw outside of captures (CUDAGraph.cpp, "all kinds of weird states")."""
        self.refused.append(graph)
        device = torch.cuda.current_device()
        with contextlib.suppress(RuntimeError):  # a later torch may do this itself
            torch._C._cuda_endAllocateToPool(device, self.pool)
            torch._C._cuda_releasePool(device, self.pool)
        generator = torch.cuda.default_generators[device]
        generator.graphsafe_set_state(torch.Generator(generator.device).graphsafe_get_state())

    def close(self) -> None:
        torch.cuda.synchronize()
        for graph in self.graphs:
            graph.reset()
        self.graphs.clear()
        gc.collect()  # an error's traceback refers to what was recorded before it
        torch.cuda.empty_cache()


@contextlib.contextmanager
def _no_collection():
    """Stops garbage collection: freeing an old event or graph is not allowed during a capture."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
