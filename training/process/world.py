"""Processes and devices. The only file that reads torchrun's environment or starts a process group."""

from __future__ import annotations

import datetime
import json
import logging
import os
import sys
import threading
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from training.configuration.errors import UserError
from training.configuration.keys import TrainConfig

# torch 2.13 renamed these two and warns about the old names.
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

START_TIMEOUT = datetime.timedelta(hours=6)  # of joining: one rank may have a large dataset to scan first
AFTER_THE_WATCH = (
    2  # minutes; a collective times out by itself only if training/faults/watchdog.py has not ended it
)
FLUSH_SECONDS = 2.0  # for what was printed, at the end of a process; a hanging file system may never take it


@dataclass(frozen=True)
class World:
    """This process among all of them."""

    rank: int
    local_rank: int  # among the processes of this machine
    size: int
    device: torch.device
    local_size: int = 1  # processes of this machine

    @property
    def is_main(self) -> bool:
        return self.rank == 0


def launch_info() -> tuple[int, int, int]:
    """(rank, local_rank, world_size) as torchrun set them; (0, 0, 1) without it."""
    return tuple(int(os.environ.get(name, default)) for name, default in _LAUNCH_VARIABLES)


def machine_size() -> int:
    """Processes of this machine, as torchrun set it."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1))


_LAUNCH_VARIABLES = (("RANK", 0), ("LOCAL_RANK", 0), ("WORLD_SIZE", 1))


def restart_count() -> int:
    """How often torchrun has started these processes anew, because one had failed (--max-restarts)."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))


def may_restart() -> bool:
    """Whether torchrun would start these processes anew."""
    return int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0)) > 0


def is_launched() -> bool:
    """Whether torchrun started this process, and stops it."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def launch_record() -> dict | None:
    """Which torchrun started this process, and how often it had to."""
    return {"id": os.environ["TORCHELASTIC_RUN_ID"], "restarts": restart_count()} if is_launched() else None


def check_device(config: TrainConfig) -> None:
    """Raises UserError if this process cannot have the device that the configuration names."""
    if config.device != "cuda":
        return
    if not torch.cuda.is_available():
        raise UserError(
            f"device='cuda' but torch {torch.__version__} finds no CUDA GPU; "
            "use --device=cpu, or install a CUDA build of torch and check nvidia-smi"
        )
    _, local_rank, _ = launch_info()
    if local_rank >= torch.cuda.device_count():
        raise UserError(
            f"process {local_rank} of this machine has no GPU: torch sees {torch.cuda.device_count()}; "
            f"start with --nproc_per_node={torch.cuda.device_count()} or fewer"
        )
    if config.dtype == "bfloat16" and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise UserError(f"{torch.cuda.get_device_name()} has no bfloat16; use --dtype=float16")


def init_world(config: TrainConfig) -> World:
    """Picks this process's device and, under torchrun, joins the process group. All ranks."""
    rank, local_rank, size = launch_info()
    if config.device == "cuda":
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
    if size > 1:
        backend = config.backend or ("nccl" if config.device == "cuda" else "gloo")
        bind = device if backend == "nccl" else None
        if backend == "nccl":
            _record_collectives(Path(config.out_dir))
        store = _own_part_of(next(dist.rendezvous("env://", timeout=START_TIMEOUT))[0], rank, size)
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=size, timeout=START_TIMEOUT, device_id=bind
        )
        dist.barrier()
        dist.distributed_c10d._set_pg_timeout(_timeout(config))
    return World(rank, local_rank, size, device, machine_size())


def _own_part_of(store: dist.Store, rank: int, size: int) -> dist.Store:
    """A part of torchrun's store that no earlier attempt has written to. After a restart (--max-restarts) the
    dead processes' addresses are still in the store (github.com/pytorch/pytorch/issues/135712).

    Rank 0 makes up a name and tells it to whoever asks. A name that nobody confirms is a dead rank 0's.
    """
    mine = uuid.uuid4().hex
    if rank == 0:
        store.set("launch", mine)
        for other in range(1, size):
            store.set(f"{mine}/confirmed/{store.get(f'{mine}/asks/{other}').decode()}", "")
        return dist.PrefixStore(mine, store)
    name = None
    while name is None or not store.check([f"{name}/confirmed/{mine}"]):
        newest = store.get("launch").decode()
        if newest != name:
            name = newest
            store.set(f"{name}/asks/{rank}", mine)
        time.sleep(0.02)
    return dist.PrefixStore(name, store)


def _timeout(config: TrainConfig) -> datetime.timedelta:
    minutes = max(config.timeout_minutes, config.start_timeout_minutes)
    return datetime.timedelta(minutes=minutes + AFTER_THE_WATCH) if config.timeout_minutes else START_TIMEOUT


FLIGHT_RECORDER = "flight_recorder_rank_"  # and the rank: a file in out_dir, for torchfrtrace


def _record_collectives(out_dir: Path) -> None:
    """NCCL's flight recorder: the last collectives of each rank, written to out_dir when one times out. Two
    of the variables had another name before."""
    for name in ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"):
        os.environ.setdefault(name, "2000")
    for name in ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"):
        os.environ.setdefault(name, str(out_dir.absolute() / FLIGHT_RECORDER))
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")


def cpu_group(world: World, config: TrainConfig) -> dist.ProcessGroup | None:
    """A group for numbers that are on the CPU anyway: nothing in it waits for a GPU. All ranks."""
    if world.size == 1:
        return None
    try:
        return dist.new_group(backend="gloo", timeout=_timeout(config))
    except RuntimeError as error:
        raise UserError(
            f"the processes cannot reach each other by gloo, which carries stop requests: {error}; "
            "name the network interface between the machines: GLOO_SOCKET_IFNAME=eth0"
        ) from error


def end_process(world: World, status: int = 0) -> None:
    """The last call of a run that ends in order. All ranks. Does not return if there are several.

    Ends them without tearing down: Python destroys a gloo group while it holds the interpreter lock, which
    the group's own thread may need to let go of a tensor, and then neither ends (seen with torch 2.13).
    """
    if world.size == 1:
        return
    dist.barrier()
    if dist.get_backend() == "nccl":
        dist.destroy_process_group()  # NCCL warns about groups that are left open
    leave_now(status)


def leave_now(status: int) -> None:
    """Ends this process at once, with what it has printed: no atexit and no destructor, which may wait."""
    within(FLUSH_SECONDS, _flush)
    os._exit(status)


def _flush() -> None:
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()


def within(seconds: float, action, *arguments) -> None:
    """Calls action and goes on after that time, whether it has returned or not; its errors are nobody's."""

    def run():
        try:
            action(*arguments)
        except Exception:
            pass

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)


def tell_launcher(message: str) -> None:
    """What torchrun's summary says of this process. The earliest of all is its root cause: call it at once,
    and only on a rank whose failure is its own."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        extra = {"py_callstack": message, "timestamp": str(int(time.time()))}
        Path(path).write_text(json.dumps({"message": {"message": message, "extraInfo": extra}}))


def mean_over_ranks(value: torch.Tensor, world: World) -> torch.Tensor:
    """The mean of a device tensor over all ranks. All ranks; does not wait for the device."""
    return sum_over_ranks(value, world) / world.size


def sum_over_ranks(value: torch.Tensor, world: World) -> torch.Tensor:
    """The sum of a device tensor over all ranks. All ranks; does not wait for the device."""
    value = value.detach().clone()
    if world.size > 1:
        dist.all_reduce(value)
    return value


def gather_objects(value: object, world: World) -> list:
    """[value of rank 0, value of rank 1, ...] on every rank. All ranks."""
    if world.size == 1:
        return [value]
    values = [None] * world.size
    dist.all_gather_object(values, value)
    return values
