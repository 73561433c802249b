"""Records the memory of one iteration, for tools.profile --memory: a table by part of its fullest moment, and
on a GPU a snapshot for torch's viewer.

On a GPU, torch's caching allocator records what is allocated and freed, with the Python frames that were
running. On a CPU, torch.profiler does. training/records/memory_parts.py sorts memory into parts.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from torch._C._profiler import _ExtraFields_Allocation, _ExtraFields_PyCall, _ProfilerEvent
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile

from common.durable_file import write_bytes, write_json
from ops.linear import Linear
from training.checkpoints.train_state import TrainState
from training.configuration.keys import TrainConfig
from training.process.memory import GIB
from training.records import memory_parts
from training.records.clock import Clock
from training.records.memory_estimate import BYTES, estimate_memory
from training.records.memory_parts import Allocation, Frame

# Iteration of a process. The first ones compile, and a CUDA graph is captured later
# (training/cuda_graphs/graphed_step.py); a replay allocates nothing.
RECORDED = 6
ITERATIONS = RECORDED + 2  # that a run needs, because the recording ends before the next iteration
MAX_EVENTS = 1_000_000  # of one iteration; each has some hundred bytes of host memory


def table_path(out_dir: Path, rank: int) -> Path:
    return out_dir / f"memory_rank{rank}.json"


def snapshot_path(out_dir: Path, rank: int) -> Path:
    return out_dir / f"memory_rank{rank}.pickle"


class MemorySnapshot:
    """profile='memory'. Every rank writes its own files."""

    def __init__(self, config: TrainConfig, state: TrainState, clock: Clock, start: int):
        self.config, self.state, self.clock, self.start = config, state, clock, start
        self.recording: Recording | None = None

    def before(self, iteration: int) -> None:
        """Called before the batch of each iteration is taken. All ranks."""
        number = iteration - self.start
        if number == RECORDED:
            with self.clock.paused():
                self.recording = _recording(self.state)
        elif number == RECORDED + 1 and self.recording:
            with self.clock.paused():
                self._write(self.recording)
            self.recording = None

    def _write(self, recording: Recording) -> None:
        events = recording.stop()
        world, out_dir = self.state.world, Path(self.config.out_dir)
        alive = memory_parts.alive_at_peak(recording.base, events)
        addresses = {at: part for part, at, _ in tensors_at_rest(self.state)} | recording.workspaces
        model_config = self.config.model_config()
        tokens = self.config.micro_batch * self.config.block_size
        item_sizes = ([1] if self.config.low_precision.startswith("fp8") else []) + [BYTES[self.config.dtype]]
        widths = memory_parts.widths_of(model_config, tokens, item_sizes)
        table = memory_parts.sort_into_parts(alive, addresses, widths)
        parameters = self.state.strategy.module.count_parameters()["total"]
        facts: dict[str, Any] = {
            "rank": world.rank,
            "device": world.device.type,
            "iteration": self.start + RECORDED,
            "peak_gib": sum(block.size for block in alive) / GIB,
            "parts": {name: size / GIB for name, size in table.parts.items()},
            "unknown": {name: size / GIB for name, size in table.unknown.items()},
            "estimate": estimate_memory(model_config, parameters, self.config, world.size),
            "snapshot": None,
        }
        if recording.snapshot is not None:
            path = snapshot_path(out_dir, world.rank)
            write_bytes(path, pickle.dumps(recording.snapshot))
            facts["snapshot"] = path.name
            facts["max_allocated_gib"] = torch.cuda.max_memory_allocated() / GIB
            facts["max_reserved_gib"] = torch.cuda.max_memory_reserved() / GIB
            free, total = torch.cuda.mem_get_info()
            facts["outside_gib"] = (total - free - torch.cuda.memory_reserved()) / GIB
        write_json(table_path(out_dir, world.rank), facts)


def tensors_at_rest(state: TrainState) -> Iterator[tuple[str, int, int]]:
    """(part, address, bytes) of everything that lives as long as the run, each storage once."""
    seen: set[int] = set()
    for part, tensor in _named_tensors(state):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen and storage.nbytes():
            seen.add(storage.data_ptr())
            yield part, storage.data_ptr(), storage.nbytes()


def _named_tensors(state: TrainState) -> Iterator[tuple[str, torch.Tensor]]:
    """The optimizer's own weights come first: where the model computes with the same tensors, they are
    those."""
    strategy = state.strategy
    for shard in strategy.shards:
        yield memory_parts.WEIGHTS, shard.local.detach()
        for moment in state.optimizer.state[shard.local].values():
            yield memory_parts.ADAM, moment
        if shard.local.grad is not None:
            yield memory_parts.GRADIENTS, shard.local.grad
    for parameter in strategy.module.parameters():
        if not isinstance(parameter, DTensor):  # which is FSDP's own part, above
            yield memory_parts.WORKING, parameter.detach()
    for module in strategy.module.modules():
        weight_grad = getattr(module, "weight_grad", None)
        if weight_grad is not None:
            yield memory_parts.GRADIENTS, weight_grad
        if isinstance(module, Linear) and module.low_precision is not None:
            for tensor in module.low_precision.weight:
                if tensor is not None:
                    yield memory_parts.FP8, tensor
        for buffer in module.buffers(recurse=False):
            yield memory_parts.OTHER, buffer


# --- recording ---


class Recording(Protocol):
    """Begins when it is made."""

    base: list[Allocation]  # what was there before
    workspaces: dict[int, str]  # address -> part, of memory that libraries keep; known after stop()
    snapshot: dict[str, Any] | None  # for torch's viewer; known after stop()

    def stop(self) -> list[Allocation]:
        """What was allocated and freed, in order."""


def _recording(state: TrainState) -> Recording:
    return CudaRecording(state.world.device) if state.world.device.type == "cuda" else CpuRecording(state)


class CudaRecording:
    def __init__(self, device: torch.device):
        self.device = torch.cuda.current_device() if device.index is None else device.index
        self.workspaces: dict[int, str] = {}
        self.snapshot: dict[str, Any] | None = None
        self.base = [Allocation(at, size) for at, size in self._blocks().items()]
        torch.cuda.memory._record_memory_history(context="alloc", stacks="python", max_entries=MAX_EVENTS)

    def stop(self) -> list[Allocation]:
        self.snapshot = torch.cuda.memory._snapshot()
        torch.cuda.memory._record_memory_history(enabled=None)
        before = self._blocks()
        torch._C._cuda_clearCublasWorkspaces()  # cuBLAS takes new ones when it needs them
        gone = before.keys() - self._blocks().keys()
        self.workspaces = dict.fromkeys(gone, memory_parts.WORKSPACES)
        return list(read_trace(self.snapshot["device_traces"][self.device]))

    def _blocks(self) -> dict[int, int]:
        """Address -> bytes of what is allocated."""
        blocks = {}
        for segment in torch.cuda.memory_snapshot():
            if segment["device"] != self.device:
                continue
            address = segment["address"]
            for block in segment["blocks"]:
                if block["state"] == "active_allocated":
                    blocks[address] = block["size"]
                address += block["size"]
        return blocks


def read_trace(trace: list[dict[str, Any]]) -> Iterator[Allocation]:
    """The allocator's trace. Memory counts as freed when that is asked for, as in max_memory_allocated."""
    for entry in trace:
        if entry["action"] == "alloc":
            frames = tuple((f["filename"], f["line"], f["name"]) for f in entry.get("frames", ()))
            yield Allocation(entry["addr"], entry["size"], frames)
        elif entry["action"] == "free_requested":
            yield Allocation(entry["addr"], -entry["size"])


class CpuRecording:
    """What was there before is what the run is known to keep: a CPU's allocator has no list."""

    def __init__(self, state: TrainState):
        self.workspaces: dict[int, str] = {}
        self.snapshot: dict[str, Any] | None = None
        self.base = [Allocation(at, size) for _, at, size in tensors_at_rest(state)]
        self.profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True, with_stack=True)
        self.profiler.start()

    def stop(self) -> list[Allocation]:
        self.profiler.stop()
        assert self.profiler.profiler is not None  # it was started
        results = self.profiler.profiler.kineto_results
        assert results is not None  # it was stopped
        found = list(_allocations(results.experimental_event_tree()))
        found.sort(key=lambda timed: timed[0])
        return [allocation for _, allocation in found]


def _allocations(roots: list[_ProfilerEvent]) -> Iterator[tuple[int, Allocation]]:
    """(when, what), in no order."""
    todo = list(roots)
    while todo:
        event = todo.pop()
        fields = event.extra_fields
        if isinstance(fields, _ExtraFields_Allocation):
            yield event.start_time_ns, Allocation(fields.ptr, fields.alloc_size, tuple(_frames(event)))
        todo.extend(event.children)


def _frames(event: _ProfilerEvent) -> Iterator[Frame]:
    parent = event.parent
    while parent is not None:
        if isinstance(parent.extra_fields, _ExtraFields_PyCall):
            called = parent.extra_fields.callsite
            yield called.file_name, called.line_number, called.function_name
        else:
            yield "", 0, parent.name
        parent = parent.parent
