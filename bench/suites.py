"""The suites that bench.throughput runs, as plain data: each variant becomes one row of its table.

A variant is a config file of train.py and the keys that replace some of its values, so whatever train.py can
do can be compared: to add a comparison, add a line. The variants of a suite differ in one thing only.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Literal

ALL_GPUS: Final = "all"  # as many processes as this machine has GPUs, two or more

QUICKSTART, GPT2_124M = "config/quickstart.py", "config/train_gpt2_124m.py"
LLAMA3_LARGE, QWEN3 = "config/full_llama3_2.2b_chinchilla.py", "config/full_qwen3_1.8b_optimal.py"
MODELS = {
    "GPT-2 1.36B": "config/full_gpt2_1.36b.py",
    "LLaMA 1.36B": "config/full_llama_1.36b.py",
    "LLaMA 3 1.5B": "config/full_llama3_1.5b_optimal.py",
    "LLaMA 3 2.2B": LLAMA3_LARGE,
    "Qwen3 1.8B": QWEN3,
}

# The same batch for every variant on every machine; what 'auto' chooses depends on the memory.
BATCH: dict[str, object] = {"batch_size": 16, "gradient_accumulation_steps": 4}
ONE_STEP = {"gradient_accumulation_steps": 1}
TWO_STEPS = {**BATCH, "gradient_accumulation_steps": 2}  # few, so that communication is a large part
STRATEGIES: dict[str, dict[str, object]] = {"DDP": {}, "ZeRO-1": {"use_zero1": True}}
STRATEGIES |= {"FSDP": {"use_fsdp": True}}
# How gradients travel.
COMMUNICATION: dict[str, dict[str, object]] = {"defaults": {}, "bf16": {"reduce_dtype": "bfloat16"}}
FP8_HEAD = {"low_precision": "fp8_tensorwise", "low_precision_scope": "layers_and_head"}


@dataclass(frozen=True)
class Variant:
    """One row: a config file, the keys that differ from it, and its number of processes, one for each GPU."""

    name: str
    config: str  # path from the repository's root
    overrides: dict[str, object] = field(default_factory=dict)
    processes: int | Literal["all"] = 1


SUITES: dict[str, tuple[Variant, ...]] = {
    # shows in a minute, on a laptop's CPU, whether the benchmark itself works
    "quick": (
        Variant("sdpa", QUICKSTART, {"attention_backend": "sdpa"}),
        Variant("manual", QUICKSTART, {"attention_backend": "manual"}),
    ),
    "models": tuple(
        Variant(
            name, config, {**BATCH, "batch_size": 12 if config == LLAMA3_LARGE else 16, "dtype": "bfloat16"}
        )
        for name, config in MODELS.items()
    ),
    "micro_batch": tuple(Variant(f"{n} x 2048", QWEN3, {**BATCH, "batch_size": n}) for n in (12, 16, 22, 32)),
    # fastest first; the first one needs 95 GiB
    "recomputation": tuple(
        Variant(level, QWEN3, {**BATCH, "activation_checkpointing": level})
        for level in ("none", "memory_bound", "attention", "selective", "full")
    ),
    "strategies": (
        Variant("one GPU", QWEN3, BATCH),
        *(Variant(name, QWEN3, {**BATCH, **keys}, ALL_GPUS) for name, keys in STRATEGIES.items()),
    ),
    # with any flag of train.py behind --suite, such as --gradient_accumulation_steps=4, for all of them
    "communication": (
        Variant("one GPU", QWEN3, TWO_STEPS),
        *(
            Variant(f"{strategy}, {name}", QWEN3, {**TWO_STEPS, **sharding, **keys}, ALL_GPUS)
            for strategy, sharding in STRATEGIES.items()
            for name, keys in COMMUNICATION.items()
        ),
        Variant("one GPU, fp8", QWEN3, {**TWO_STEPS, **FP8_HEAD}),
        *(
            Variant(f"{strategy}, fp8", QWEN3, {**TWO_STEPS, **FP8_HEAD, **sharding}, ALL_GPUS)
            for strategy, sharding in STRATEGIES.items()
        ),
    ),
    "attention": tuple(
        Variant(backend, QWEN3, {**BATCH, "attention_backend": backend})
        for backend in ("sdpa", "flash_attn_2", "flash_attn_3", "flash_attn_4")
    ),
    # steps of a few milliseconds, where launching the kernels takes a large part of the time
    "graphs": tuple(
        Variant(f"{n} x 1024, {name}", GPT2_124M, {**ONE_STEP, "batch_size": n, "use_cuda_graphs": graphs})
        for n in (1, 4)
        for name, graphs in (("eager launches", False), ("CUDA graph", True))
    ),
}
