"""Sets up processes and devices: no other file starts a process group."""

from __future__ import annotations

import base64
import contextlib
import datetime
import itertools
import os
import threading
import time
import uuid
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import torch
import torch.distributed as dist

from common.errors import UserError
from training.configuration.keys import TrainConfig
from training.process.launch import launch_info, machine_size, store_address
from training.process.torch_build import no_gpu_reason

# torch 2.13 renamed these two and warns about the old names.
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

TORCHRUN = ("torchrun", "torch.distributed.run", "torch/distributed/run.py")  # in its command line
C10D_PORT = 29400  # torchrun's, if its --rdzv_endpoint names none
CLOSED = b"closed\x94\x88"  # torchrun's pickled state has the attribute `closed`, and it is True
NO_LIMIT = datetime.timedelta(days=365)  # torch must be given some
# A collective's own timeout comes so much later than the watchdog's, which ends the process first.
WATCHDOG_FIRST_MINUTES = 2


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


CpuGroup: TypeAlias = "dist.ProcessGroup | None"  # None: one process
ALONE = World(0, 0, 1, torch.device("cpu"))


def check_device(config: TrainConfig) -> None:
    """Raises UserError if this process cannot have the device that the configuration names."""
    if config.device != "cuda":
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of an old driver: the error says more
        available = torch.cuda.is_available()
    if not available:
        raise UserError(f"device='cuda' but {no_gpu_reason()}")
    _, local_rank, _ = launch_info()
    if local_rank >= torch.cuda.device_count():
        raise UserError(
            f"process {local_rank} of this machine has no GPU: torch sees {torch.cuda.device_count()}; "
            f"start with --nproc_per_node={torch.cuda.device_count()} or fewer"
        )
    if config.dtype == "bfloat16" and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise UserError(f"{torch.cuda.get_device_name()} has no bfloat16; use --dtype=float16")


def init_world(config: TrainConfig, store: dist.Store | None = None) -> World:
    """Picks this process's device and, under torchrun, joins the process group. All ranks. store: meet()'s,
    if this process has met the others before."""
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
            _record_collectives(Path(config.out_dir), rank)
        _limit_every_group(config)
        store = store or meet(rank, _timeout(config))
        store.set_timeout(_timeout(config))
        dist.init_process_group(
            backend,
            store=store,
            rank=rank,
            world_size=size,
            timeout=_timeout(config),
            device_id=bind,
            pg_options=nccl_options(config) if backend == "nccl" else None,
        )
        dist.barrier()
    return World(rank, local_rank, size, device, machine_size())


def nccl_options(config: TrainConfig):
    """Of the group of all processes, which every strategy but fsdp_sharding='hybrid' communicates in. None if
    all are NCCL's own."""
    if not config.nccl_goes_first:
        return None
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = _timeout(config)  # torch warns if it differs from init_process_group's
    return options


def meet(rank: int, timeout: datetime.timedelta = NO_LIMIT, about: str = "") -> dist.Store:
    """torchrun's store under a prefix that no earlier attempt has used. After a restart (--max-restarts) the
    dead processes' addresses are still in the store (github.com/pytorch/pytorch/issues/135712).

    Rank 0 makes up the prefix and confirms it to every rank that asks, in a thread. A prefix that is not
    confirmed comes from a rank 0 that is dead; torchrun's count of restarts differs between machines. The
    other ranks wait here for rank 0. about: what this rank says of itself, under process/RANK.
    """
    hosts = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"  # else: torchrun hosts it
    # without waiting for the other ranks: one of them may never come
    store = dist.TCPStore(
        *store_address(), is_master=hosts, timeout=timeout, wait_for_workers=False, multi_tenant=True
    )
    mine = uuid.uuid4().hex
    if rank == 0:
        store.set(f"{mine}/process/0", about)
        store.set("launch", mine)
        threading.Thread(target=_confirm, args=(another_connection(store), mine), daemon=True).start()
        return dist.PrefixStore(mine, store)
    name = None
    while name is None or not store.check([f"{name}/confirmed/{mine}"]):
        newest = store.get("launch").decode()
        if newest != name:
            name = newest
            store.set(f"{name}/asks/{store.add(f'{name}/asking', 1)}", mine)
        time.sleep(0.02)
    store.set(f"{name}/process/{rank}", about)
    return dist.PrefixStore(name, store)


def wait_until_a_torchrun_ends() -> bool:
    """Returns True once a torchrun of this run has ended for good. False if that is not known: torchruns keep
    a membership with --rdzv_backend=c10d alone, and only their command line says where."""
    from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint
    from torch.distributed.run import parse_args

    with contextlib.suppress(OSError, ValueError, RuntimeError, SystemExit):  # no torchrun, or no /proc
        words = Path(f"/proc/{os.getppid()}/cmdline").read_text().split("\0")[:-1]
        (begin,) = (i for i, word in enumerate(words, 1) if word.endswith(TORCHRUN))
        options = parse_args(words[begin:])
        if options.rdzv_backend == "c10d":
            address = parse_rendezvous_endpoint(options.rdzv_endpoint, C10D_PORT)
            store = dist.TCPStore(*address, is_master=False, wait_for_workers=False)
            state = f"torch.rendezvous.{os.environ['TORCHELASTIC_RUN_ID']}"
            # a pickle, which is searched and not loaded: loading it could execute code
            while CLOSED not in base64.b64decode(store.get(state)):
                time.sleep(1)
            return True
    return False


def another_connection(store: dist.Store) -> dist.Store:
    """To the same store: a call that waits in one connection does not block another."""
    return store.clone()  # type: ignore[attr-defined]  # no stub


def _confirm(store: dist.Store, name: str) -> None:
    """Answers the ranks in the order in which they ask, until this process ends."""
    with contextlib.suppress(RuntimeError):  # the store has ended
        for number in itertools.count(1):
            store.set(f"{name}/confirmed/{store.get(f'{name}/asks/{number}').decode()}", "")


def _limit_every_group(config: TrainConfig) -> None:
    """Also torch itself makes groups, such as those of a device mesh. It would give them its own limits of 10
    or 30 minutes, so that a collective could end the process before the watchdog says why."""
    dist.distributed_c10d.default_pg_timeout = _timeout(config)
    dist.distributed_c10d.default_pg_nccl_timeout = _timeout(config)


def _timeout(config: TrainConfig) -> datetime.timedelta:
    limits = config.timeout_minutes, config.start_timeout_minutes
    if not all(limits):  # 0: never
        return NO_LIMIT
    return datetime.timedelta(minutes=max(limits) + WATCHDOG_FIRST_MINUTES)


FLIGHT_RECORDER = "flight_recorder_rank_"  # a file in out_dir, followed by the rank; for torchfrtrace


def _record_collectives(out_dir: Path, rank: int) -> None:
    """Sets up NCCL's flight recorder: the last collectives of each rank are written to out_dir when one times
    out. torch warns where TORCH_NCCL_TRACE_BUFFER_SIZE is set, the size's earlier name; a user's counts."""
    dump = out_dir / f"{FLIGHT_RECORDER}{rank}"
    if os.path.lexists(dump) and (dump.is_symlink() or dump.stat().st_nlink > 1):
        dump.unlink()  # NCCL would write through it
    if "TORCH_NCCL_TRACE_BUFFER_SIZE" not in os.environ:
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
    for name in ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"):
        os.environ.setdefault(name, str(out_dir.absolute() / FLIGHT_RECORDER))
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")


def cpu_group(world: World) -> CpuGroup:
    """A process group for numbers on the CPU, whose communication does not wait for a GPU. All ranks."""
    if world.size == 1:
        return None
    try:
        return dist.new_group(backend="gloo")
    except RuntimeError as error:
        raise UserError(
            f"the processes cannot reach each other by gloo, which carries stop requests: {error}; "
            "name the network interface between the machines: GLOO_SOCKET_IFNAME=eth0"
        ) from error


def mean_over_ranks(value: torch.Tensor, world: World) -> torch.Tensor:
    """The mean of a device tensor over all ranks. All ranks; does not wait for the device."""
    return sum_over_ranks(value, world) / world.size


def sum_over_ranks(value: torch.Tensor, world: World) -> torch.Tensor:
    """The sum of a device tensor over all ranks. All ranks; does not wait for the device."""
    value = value.detach().clone()
    if world.size > 1:
        dist.all_reduce(value)
    return value


class Waits(Protocol):
    """A communication in progress. On a GPU, the current stream waits for it and not the host."""

    def wait(self) -> object: ...


def start_together(
    collective: Callable, arguments: list[tuple[torch.Tensor, ...]], works: list[Waits], **options: object
) -> None:
    """Starts a collective for each of the arguments, and adds what to wait for to `works`. NCCL computes them
    in one kernel. gloo gets them one by one: with several coalesced all-gathers under way, it writes beyond
    its memory (torch 2.13). All ranks."""
    if dist.get_backend() != "nccl":
        works += [collective(*each, async_op=True, **options) for each in arguments]
        return
    with dist._coalescing_manager(async_ops=True) as together:
        for each in arguments:
            collective(*each, **options)
    works.append(together)


def gather_objects(value: object, world: World) -> list:
    """[value of rank 0, value of rank 1, ...] on every rank. All ranks."""
    if world.size == 1:
        return [value]
    values = [None] * world.size
    dist.all_gather_object(values, value)
    return values


def from_rank_0(value: Any, world: World) -> Any:
    """Rank 0's value, on every rank: gather_objects() would move as much for each rank. All ranks."""
    values = [value]
    if world.size > 1:
        dist.broadcast_object_list(values, src=0)
    return values[0]
