"""Which settings of a config fit this machine. A setting has a value for each key of TUNED.

How much is recomputed, and in how many parts the loss is, follows from the micro-batch and the strategy: the
least that fits by the estimate of memory, which is within 0.1 % of what runs need (docs/tuning.md#memory).
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import multiprocessing
from collections.abc import Iterator
from typing import Any, Final

import torch

from common.errors import UserError
from training.configuration.batch import divisors, is_auto
from training.configuration.choices import find
from training.configuration.keys import TrainConfig
from training.configuration.rules import check, cuda_graphs_obstacle
from training.memory.estimate import needed_memory
from training.memory.gpus import DeviceMemory, device_memory
from training.memory.micro_batch import SMALLEST_PART, choose
from training.process.memory import GIB

Setting = dict[str, Any]  # {key of TUNED: value}

QUACK: Final = "quack"
RECOMPUTATION = ("none", "memory_bound", "attention", "selective", "full")  # from the fastest
PARTS = (1, 4, 8)  # of the loss; fewer are faster
STRATEGIES: dict[str, Setting] = {
    "DDP": {"use_zero1": False, "use_fsdp": False, "reshard_after_forward": False},
    "ZeRO-1": {"use_zero1": True, "use_fsdp": False, "reshard_after_forward": False},
    "FSDP": {"use_zero1": False, "use_fsdp": True, "reshard_after_forward": False},
    "FSDP, reshard": {"use_zero1": False, "use_fsdp": True, "reshard_after_forward": True},
}
TUNED = (
    *("batch_size", "activation_checkpointing", "loss_chunks"),
    *STRATEGIES["DDP"],
    *("use_cuda_graphs", "ffn_backend"),
)
# Of a trial's iteration, on each GPU, if the config's own is not smaller: enough micro-steps that the
# optimizer's part in the time hardly depends on the micro-batch.
TRIAL_TOKENS = 131_072
CAREFUL_TOKENS, MOST_TOKENS = 8_192, 65_536  # of the first micro-batch; above the last none was faster
OWN_GIB = 3.0  # of a GPU: the driver, and the context of the process that asks


def look_at(config: TrainConfig, processes: int) -> DeviceMemory:
    """What a process has. A GPU is looked at in a process of its own, whose context would otherwise stay in
    its memory beside the trials. Raises UserError if there are too few GPUs, or others use them."""
    if config.device == "cpu":
        return device_memory(torch.device("cpu"), processes)
    if processes > torch.cuda.device_count():
        raise UserError(
            f"--nproc={processes} needs as many GPUs, but torch sees {torch.cuda.device_count()}; use fewer, "
            "or --device=cpu. train.py --dry_run=True --gpu=H100 says what fits a GPU that is not here"
        )
    with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_look_at_gpus, processes).result()


def _look_at_gpus(count: int) -> DeviceMemory:
    for number in range(count):
        free, total = torch.cuda.mem_get_info(number)
        if total - free > OWN_GIB * GIB:
            raise UserError(
                f"GPU {number} is in use: {(total - free) / GIB:.1f} GiB of its memory are taken, and trials "
                "would compete with whoever has them; wait, stop them (nvidia-smi), or choose others "
                "(CUDA_VISIBLE_DEVICES)"
            )
    return device_memory(torch.device("cuda", 0), count)


class Settings:
    """The settings of one config. `fixed`: keys that the user states as flags, which stay."""

    def __init__(self, base: TrainConfig, processes: int, memory: DeviceMemory, fixed: set[str]):
        self.base, self.processes, self.memory, self.fixed = base, processes, memory, fixed
        own, found = choose(base, processes, memory)  # 'auto' as numbers
        self.runs_as_it_is = found.fits or not is_auto(base)  # else train.py would refuse it
        # of an iteration; they stay
        stated = base.tokens_per_iter if is_auto(base) else None
        self.tokens = stated or base.samples_per_iter(processes) * base.block_size
        self.as_it_is: Setting = {key: getattr(own, key) for key in TUNED} | {"loss_chunks": own.logit_parts}
        self.sequences = self.tokens // (base.block_size * processes)  # of a GPU, in an iteration
        most = max(MOST_TOKENS // base.block_size, own.micro_batch)
        self.batches = [size for size in divisors(self.sequences) if size <= most]
        if fixed & {"batch_size", "gradient_accumulation_steps"}:
            self.batches = [own.micro_batch]
        one_way = processes == 1 or fixed & STRATEGIES["DDP"].keys()
        as_stated = {key: self.as_it_is[key] for key in STRATEGIES["DDP"]}
        self.strategies = {"as it is": as_stated} if one_way else STRATEGIES
        self.has_quack = all(find("ffn_backend", QUACK).versions().values())

    def fit(self, setting: Setting, batch: int) -> Iterator[Setting]:
        """This setting with another micro-batch, in each way that fits, the fastest first: with the least
        recomputation, then the fewest parts of the loss."""
        tokens = batch * self.base.block_size
        equal = tuple(n for n in PARTS if n == 1 or tokens % n == 0 and tokens // n >= SMALLEST_PART)
        for level in self._choices("activation_checkpointing", RECOMPUTATION):
            for parts in self._choices("loss_chunks", equal):
                made = {"batch_size": batch, "activation_checkpointing": level, "loss_chunks": parts}
                if self.is_possible(setting | made):
                    yield setting | made

    def _choices(self, key: str, values: tuple) -> tuple:
        return (self.as_it_is[key],) if key in self.fixed else values

    def careful(self) -> Setting:
        """A small micro-batch with all blocks recomputed and the loss in most parts; sharded only if that is
        needed. Raises UserError if nothing fits."""
        most = min(CAREFUL_TOKENS // self.base.block_size, self.batches[-1] // 4)
        small = [size for size in self.batches if size <= most]
        for strategy in self.strategies.values():
            for batch in reversed(small or self.batches[:1]):
                if found := list(self.fit(self.as_it_is | strategy, batch)):
                    return found[-1]
        raise UserError(
            f"no setting of this config fits {self.memory.device} with {self.memory.gib:.1f} GiB; "
            "train.py --dry_run=True names settings that do"
        )

    def is_possible(self, setting: Setting) -> bool:
        """Whether these values go together here, and fit by the estimate of memory."""
        config = self.config(setting)
        try:
            check(config, self.processes)
        except UserError:
            return False
        captures = not config.use_cuda_graphs or cuda_graphs_obstacle(config) is None
        return captures and self.needed(setting) <= self.memory.gib

    def needed(self, setting: Setting) -> float:
        """GiB that a process must have free, by the estimate with its reserve."""
        return needed_memory(self.config(setting), self.processes)

    def config(self, setting: Setting) -> TrainConfig:
        steps = self.sequences // setting["batch_size"]
        return dataclasses.replace(self.base, **{**setting, "gradient_accumulation_steps": steps})

    def trial_keys(self, setting: Setting) -> Setting:
        """Of a trial: as config(), but not more micro-steps than a measurement needs."""
        wanted = max(2, round(TRIAL_TOKENS / (setting["batch_size"] * self.base.block_size)))
        steps = min(self.sequences // setting["batch_size"], wanted)
        return {**setting, "gradient_accumulation_steps": steps, "tokens_per_iter": None}

    def name(self, setting: Setting) -> str:
        """'16 x 2048, recomputation none, loss in 4 parts, ZeRO-1, CUDA Graphs'."""
        level, parts = setting["activation_checkpointing"], setting["loss_chunks"]
        words = [f"{setting['batch_size']} x {self.base.block_size}", f"recomputation {level}"]
        words.append(f"loss in {parts} part{'s' * (parts != 1)}")
        strategies = STRATEGIES.items() if self.processes > 1 else ()
        words += [name for name, keys in strategies if keys.items() <= setting.items()]
        words += ["CUDA Graphs"] * setting["use_cuda_graphs"] + ["QuACK"] * (setting["ffn_backend"] == QUACK)
        return ", ".join(words)
