"""Knows which settings are possible on this machine, and how much memory they need by the estimate."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import importlib.util
import multiprocessing
import platform
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TypeVar

import torch

import model_builder
from common.errors import UserError
from tools.tune.dimensions import ALLOWABLE, DIMENSIONS, PRECISIONS, TUNED, Dimension, Keys, Option, option_of
from training.configuration.batch import divisors, is_auto
from training.configuration.keys import TrainConfig
from training.configuration.rules import check, cuda_graphs_obstacle
from training.hardware.capability import NATIVE, Capability, capability, low_precision_support
from training.hardware.description import describe_hardware
from training.hardware.gpu_memory import (
    DeviceMemory,
    card_capability,
    card_memory,
    device_memory,
    find_card,
)
from training.process.memory import GIB
from training.records.memory_estimate import needed_memory
from training.records.micro_batch import MOST_TOKENS, SMALLEST_PART, choose

Found = TypeVar("Found")

# Of a trial's iteration, on each GPU, if the config's own is not smaller: enough micro-steps that the
# optimizer's part in the time hardly depends on the micro-batch.
TRIAL_TOKENS = 131_072
OWN_GIB = 3.0  # of a GPU: the driver, and the context of the process that asks
FIRST_SHARE, FIRST_TOKENS = 4, 8_192  # the climb begins with a quarter of what fits, at most so many tokens


@dataclass(frozen=True)
class Machine:
    """What trials run on."""

    memory: DeviceMemory  # of one process
    can: Capability
    versions: dict[str, str | None]  # of software, for the header and to know results of other software
    gpus: int  # 0 on a CPU


def look_at(config: TrainConfig, processes: int, card: str | None = None) -> Machine:
    """The machine, or one with GPUs of the name `card`. A GPU is looked at in a process of its own: its
    context would stay in the GPU's memory, beside the trials. Raises UserError if it has too few GPUs."""
    if config.device == "cpu":
        if card:
            raise UserError(
                f"--gpu={card} and device='cpu' contradict each other; leave --gpu out, or add --device=cuda"
            )
        return _describe("cpu", processes)
    if card:
        found = find_card(card)
        return Machine(card_memory(found), card_capability(found), {"gpu_name": found.device}, processes)
    gpus = torch.cuda.device_count()
    if processes > gpus:
        fix = f"use --nproc={gpus} or fewer" if gpus else "use --device=cpu, or a plan: --dry --gpu=H100"
        raise UserError(f"--nproc={processes} needs as many GPUs, but torch sees {gpus}; {fix}")
    return _in_another_process(_describe, "cuda", processes)


def require_free_gpus(processes: int) -> None:
    """Raises UserError if others use a GPU: trials would run out of memory, and be slow, because of them."""
    for number, used in enumerate(_in_another_process(_used_gib, processes)):
        if used > OWN_GIB:
            raise UserError(
                f"GPU {number} is in use: {used:.1f} GiB of its memory are taken, and trials would compete "
                "with whoever has them; wait, stop them (nvidia-smi), or choose others (CUDA_VISIBLE_DEVICES)"
            )


def _used_gib(processes: int) -> list[float]:
    found = (torch.cuda.mem_get_info(number) for number in range(processes))
    return [(total - free) / GIB for free, total in found]


def _in_another_process(function: Callable[..., Found], *arguments: object) -> Found:
    with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def _describe(kind: str, processes: int) -> Machine:
    device = torch.device(kind, 0) if kind == "cuda" else torch.device(kind)
    facts = describe_hardware(device)
    versions = {name: facts[name] for name in ("gpu_name", "driver", "cuda", "torch")}
    gpus = torch.cuda.device_count() if kind == "cuda" else 0
    versions |= {"python": platform.python_version()}
    return Machine(device_memory(device, processes), capability(device), versions, gpus)


class Space:
    """The settings of one config. A setting has a value for each of TUNED."""

    def __init__(
        self,
        base: TrainConfig,
        processes: int,
        machine: Machine,
        allowed: Collection[str] = (),
        fixed: Collection[str] = (),
    ):
        """allowed: options that change numbers, by name. fixed: keys that stay as they are in `base`."""
        self.base, self.processes, self.machine = base, processes, machine
        self.allowed, self.fixed = tuple(allowed), set(fixed)
        self._check_allowed()
        model = model_builder.build_model(base.model_config())  # on the meta device
        self.parameters = model.count_parameters()["total"]
        own, _ = choose(base, processes, machine.memory)  # 'auto' as numbers
        self.eval_batch = own.eval_batch_size or own.micro_batch  # losses of evaluations stay comparable
        if is_auto(base):
            assert base.tokens_per_iter, base
            self.tokens = base.tokens_per_iter
        else:
            self.tokens = base.samples_per_iter(processes) * base.block_size
        self.as_it_is: Keys = {key: getattr(own, key) for key in TUNED} | {"loss_chunks": own.logit_parts}
        self.sequences = self.tokens // (base.block_size * processes)  # of a GPU, in an iteration
        self.batches = divisors(self.sequences)
        if self.fixed & {"batch_size", "gradient_accumulation_steps"}:
            self.batches = [self.batch_size(self.as_it_is)]

    def _check_allowed(self) -> None:
        for name in self.allowed:
            if name not in ALLOWABLE:
                raise UserError(f"--allow: {name!r} is not one of {', '.join(ALLOWABLE)}")
            recipe = name.removesuffix("+head")
            can = self.machine.can
            if recipe in PRECISIONS and low_precision_support(recipe, can) != NATIVE:
                raise UserError(
                    f"--allow={name}: {can.name} cannot compute {recipe}, or only emulates it with no gain "
                    "in speed; leave it out"
                )
            if name == "bf16" and not can.bf16:
                raise UserError(f"--allow=bf16: {can.name} has no bfloat16; leave it out")

    # --- dimensions ---

    def dimensions(self) -> list[Dimension]:
        """Those that exist here, with the options that are allowed."""
        found = []
        for one in DIMENSIONS:
            if (one.several and self.processes == 1) or (one.gpu and self.base.device != "cuda"):
                continue
            if any(self.fixed & option.keys.keys() for option in one.options):
                continue
            if one.changes_numbers:
                options = tuple(option for option in one.options if option.name in self.allowed)
                if not options:
                    continue
                one = dataclasses.replace(one, options=options)
            found.append(one)
        return found

    def obstacle(self, setting: Keys) -> str | None:
        """Why these values do not go together; None if nothing speaks against them."""
        try:
            config = self.config(setting)
            check(config, self.processes)
        except UserError as error:
            return str(error).splitlines()[0]
        if config.use_cuda_graphs and (reason := cuda_graphs_obstacle(config)):
            return reason
        if config.ffn_backend == "quack" and not self.machine.can.quack:
            return f"its kernels are not for {self.machine.can.name}"
        if config.ffn_backend == "quack" and importlib.util.find_spec("quack") is None:
            return "needs QuACK: pip install -r requirements-quack.txt"
        return None

    def with_option(self, setting: Keys, option: Option) -> Keys:
        return self.divided({**setting, **option.keys})

    def divided(self, setting: Keys) -> Keys:
        """The setting with loss_chunks that divide the tokens of its micro-batch."""
        tokens, parts = self.batch_size(setting) * self.base.block_size, setting["loss_chunks"]
        assert isinstance(parts, int)
        while parts > 1 and (tokens % parts or tokens // parts < SMALLEST_PART):
            parts //= 2
        return {**setting, "loss_chunks": max(parts, 1)}

    @staticmethod
    def batch_size(setting: Keys) -> int:
        size = setting["batch_size"]
        assert isinstance(size, int)
        return size

    def smaller(self, setting: Keys) -> Keys:
        """With half of the micro-batch, or the next smaller one that is possible."""
        half = max(1, self.batch_size(setting) // 2)
        return self.divided({**setting, "batch_size": max(size for size in self.batches if size <= half)})

    def micro_step_s(self, setting: Keys, tokens_per_sec: float) -> float:
        return self.batch_size(setting) * self.base.block_size * self.processes / tokens_per_sec

    # --- as configurations ---

    def config(self, setting: Keys) -> TrainConfig:
        """What a run with this setting trains with: exactly the tokens per iteration of the config."""
        steps = self.sequences // self.batch_size(setting)
        return dataclasses.replace(self.base, **{**setting, "gradient_accumulation_steps": steps})  # type: ignore[arg-type]  # keys are fields

    def trial_keys(self, setting: Keys) -> Keys:
        """The keys of a trial: as config(), but not more micro-steps than a measurement needs."""
        size = self.batch_size(setting)
        wanted = max(2, round(TRIAL_TOKENS / (size * self.base.block_size)))
        steps = min(self.sequences // size, wanted)
        return {**setting, "gradient_accumulation_steps": steps, "tokens_per_iter": None}

    # --- memory ---

    def needed(self, setting: Keys) -> float:
        """GiB that a process must have free, by the estimate with its reserve."""
        return needed_memory(self.base.model_config(), self.parameters, self.config(setting), self.processes)

    def fits(self, setting: Keys) -> bool:
        return self.needed(setting) <= self.machine.memory.gib

    def largest(self, setting: Keys, most: int) -> Keys | None:
        """The setting with the largest micro-batch up to `most` that fits by the estimate."""
        for size in reversed([size for size in self.batches if size <= most]):
            candidate = self.divided({**setting, "batch_size": size})
            if self.fits(candidate):
                return candidate
        return None

    def is_short(self, setting: Keys) -> bool:
        """Whether memory is: what spends the most, with the usual micro-batch, does not fit."""
        usual = [size for size in self.batches if size <= self.usual_most] or self.batches[:1]
        setting = {**setting, "batch_size": max(usual)}
        for one in self.dimensions():
            if one.spends_room:
                setting |= one.options[-1].keys
        return not self.fits(self.divided(setting))

    @property
    def usual_most(self) -> int:
        """Sequences of a micro-batch above which none was faster on large GPUs."""
        return max(1, MOST_TOKENS // self.base.block_size)

    # --- where the climb begins ---

    def first(self) -> Keys:
        """The most careful setting: each dimension's first option, and a small micro-batch. If it does not
        fit, options that make room come in. Raises UserError if nothing fits."""
        setting = dict(self.as_it_is) | {"batch_size": self.batches[0]}
        dimensions = self.dimensions()
        for one in dimensions:
            if one.options and not one.changes_numbers:
                setting |= one.options[0].keys
        if found := self._careful(setting):
            return found
        roomy = (one for one in dimensions if one.makes_room)
        for one in sorted(roomy, key=lambda one: one.changes_numbers):
            for option in one.options:
                if found := self._careful(setting | option.keys):
                    return found
            setting |= one.options[-1].keys  # what needs the least comes with those of the next dimension
        needs, has = self.needed(self.divided(setting)), self.machine.memory.gib
        least = ", ".join(f"{key}={value}" for key, value in setting.items() if value != self.as_it_is[key])
        raise UserError(
            f"no setting fits: the smallest ({least or 'as it is'}) needs {needs:.1f} GiB by the estimate, "
            f"and {self.machine.memory.device} has {has:.1f} GiB; use more GPUs, or allow less precise "
            "weights and moments: --allow=weights_bf16,adam_bf16"
        )

    def _careful(self, setting: Keys) -> Keys | None:
        """With a small part of the largest micro-batch that fits; None if none does."""
        largest = None if self.obstacle(setting) else self.largest(setting, max(self.batches))
        if largest is None:
            return None
        most = min(self.batch_size(largest) // FIRST_SHARE, FIRST_TOKENS // self.base.block_size)
        return self.largest(largest, max(self.batches[0], most))

    def name(self, setting: Keys) -> str:
        """Every dimension's option in a few words."""
        names = []
        for one in DIMENSIONS:
            option = option_of(one, setting) if one.options else None
            if option and not ((one.several and self.processes == 1) or (one.gpu and not self.machine.gpus)):
                names.append(f"{one.name} {option.name}" if len(option.name) <= 4 else option.name)
        return ", ".join(names)
