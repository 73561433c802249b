"""Names that are no keys: aliases, which set a key; keys and values of earlier versions, and nanoGPT's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from common.errors import UserError
from training.configuration.keys import KEYS


class Alias(NamedTuple):
    """A name that is no key, but sets one."""

    types: tuple[type, ...]
    help: str
    sets: Callable[[Any, dict[str, Any]], dict[str, Any]]  # its value, what is stated so far -> {key: value}
    neutral: object = None  # its value that sets nothing in checkpoints of the time when it was a key
    adds: bool = False  # to what its key has, so that both may be stated


def _decay_lr(value: bool, stated: dict[str, Any]) -> dict[str, Any]:
    if value and stated.get("lr_schedule") == "constant":
        raise UserError(
            "decay_lr=True contradicts the constant learning rate that lr_schedule='constant' or "
            "decay_lr=False states before it; write lr_schedule='cosine' in its place"
        )
    return {} if value else {"lr_schedule": "constant"}


def _wandb_log(value: bool, stated: dict[str, Any]) -> dict[str, Any]:
    others = [name.strip() for name in stated.get("trackers", "").split(",") if name.strip() != "wandb"]
    return {"trackers": ",".join(filter(None, [*others, "wandb" if value else ""]))}


def _keep_all(value: bool, stated: dict[str, Any]) -> dict[str, Any]:
    return {"keep_last": None if value else stated.get("keep_last") or KEYS["keep_last"].default}


ALIASES = {
    "intermediate_size": Alias(KEYS["d_ff"].types, "the same as d_ff", lambda value, _: {"d_ff": value}),
    "flash_attn": Alias(
        (bool,),
        "True is attention_backend='flash_attn_2'",
        lambda value, _: {"attention_backend": "flash_attn_2"} if value else {},
    ),
    "decay_lr": Alias((bool,), "False is lr_schedule='constant'", _decay_lr, neutral=True),
    "keep_all_checkpoints": Alias((bool,), "True is keep_last=None", _keep_all, neutral=False),
    "wandb_log": Alias((bool,), "True adds 'wandb' to trackers", _wandb_log, neutral=False, adds=True),
}


class Removed(NamedTuple):
    """A key of an earlier version."""

    default: object
    instead: str


REMOVED_KEYS = {  # on 2026-11-25
    "compile_scope": Removed("regional", "blocks are compiled one by one"),
    "gradient_accumulation_fusion": Removed(None, "FSDP's matmuls add to float32 sums where that gains"),
    "matmul_algorithms": Removed("cublas", "cuBLASLt's own choice runs"),
    "nccl_high_priority_stream": Removed(None, "FSDP asks NCCL for it where that gains"),
    "nccl_max_ctas": Removed(None, "NCCL chooses; NCCL_MAX_CTAS in the environment limits it"),
    "overlap_param_gather": Removed(False, "no run was faster with it"),
    "sm_carveout": Removed(0, "no run was faster with it"),
    "spike_window": Removed(128, "skip_spikes looks at the last 128 accepted iterations"),
}
# {the last word of a flag of nanochat, litgpt or torchtitan: the key}: the nearest name would be another key
OTHER_FLAGS = {
    name: key
    for key, names in {
        "batch_size": "device_batch_size micro_batch_size local_batch_size",
        "tokens_per_iter": "total_batch_size global_batch_size",
        "block_size": "max_seq_len max_seq_length seq_len",
        "max_iters": "num_iterations steps max_tokens",
        "eval_interval": "eval_every",
        "learning_rate": "lr",
        "n_layer": "depth",
        "arch_preset": "model_name",
        "wandb_run_name": "run",
        "use_fsdp": "data_parallel_shard_degree",
    }.items()
    for name in names.split()
}
GPT2 = "weights of others are --init_weights=hf:openai-community/{}, with init_from='scratch'"
OTHER_VALUES = {  # nanoGPT's
    **{("init_from", f"gpt2{size}"): GPT2.format(f"gpt2{size}") for size in ("", "-medium", "-large", "-xl")},
    ("device", "mps"): "it is not supported; on a Mac: --device=cpu --dtype=float32 --compile=False",
}
REMOVED_VALUES = {
    ("low_precision", "fp8_blockwise"): "use 'fp8_tensorwise', which is faster and has the same loss",
    ("profile", "memory"): "docs/profile.md, Memory, says how torch records what is allocated",
}


def todays_settings(saved: dict[str, Any]) -> dict[str, Any]:
    """The settings of a checkpoint or record of any version, with those that are aliases today resolved, and
    with what None meant."""
    stated = {name: value for name, value in saved.items() if name not in ALIASES}
    for name, alias in ALIASES.items():
        if name in saved and saved[name] != alias.neutral:
            stated |= alias.sets(saved[name], stated)
    if "batch_size" in saved and saved.get("eval_batch_size") is None:  # until 2026-11-28
        stated["eval_batch_size"] = saved["batch_size"]
    return stated


def removed_settings(saved: dict[str, Any]) -> list[str]:
    """A line for each setting of a checkpoint that did something and is gone."""
    return [
        f"{name}={saved[name]!r} was removed: {removed.instead}"
        for name, removed in REMOVED_KEYS.items()
        if saved.get(name, removed.default) != removed.default
    ]
