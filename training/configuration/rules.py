"""What a value may be, what may go together, and what falls back where it cannot work: every rule that needs
no device, checked before a device or a process group is touched. Choices and least values are those that each
key's line in keys.py states.
"""

from __future__ import annotations

import difflib
import importlib.util
import math
import os
import re
from collections.abc import Iterable

from common.arguments import target_losses
from common.errors import UserError
from common.text import shorten, shown
from model_config import ModelConfig
from training.configuration.batch import check_batch
from training.configuration.choices import find, is_module, names_of
from training.configuration.key_line import YEAR, Key
from training.configuration.keys import FACTORS, GUARDED, KEYS, RECOMPUTING, TrainConfig
from training.configuration.other_names import OTHER_VALUES, REMOVED_VALUES

PATHS = ("out_dir", "dataset")  # keys that name folders
TRACKERS = ("wandb", "tensorboard", "trackio")  # each is also the name of its package
OF_FSDP = ("fsdp_sharding", "reshard_after_forward")
BF16_MAX_BETA = 0.99  # a moment decays by 1 - beta an iteration; bf16 hides a change of less than 2^-8
# keys that only some recipes or optimizers read
OF_CHOICES = {
    "low_precision": ("fp8_gradients", "amax_history", "amax_algorithm"),
    "optimizer": ("adam_dtype", "muon_momentum"),
}


def check(config: TrainConfig, world_size: int) -> None:
    """Every rule that needs no device. Raises UserError naming the settings in conflict."""
    values = config.to_dict()
    for name, known in KEYS.items():
        _check_value(name, known, values[name])
    for name in PATHS:
        _check_path(name, values[name])
    try:
        model = config.model_config()
    except ValueError as error:
        raise UserError(shorten(str(error), 300)) from None
    check_batch(config, world_size)
    checkpoint_interval(config)
    check_schedule(config)
    try:
        target_losses(config.loss_targets)
    except ValueError as error:
        told = f"loss_targets={shown(config.loss_targets)}: {error}"
        raise UserError(f"{told}; write each held-out loss once, such as '3.5,3.28'") from None
    for name in filter(None, (config.allow_changes or "").split(",")):
        if name not in (*GUARDED, *FACTORS):
            hint = did_you_mean(name, (*GUARDED, *FACTORS))
            raise UserError(f"allow_changes: {shown(name)} is not one of {', '.join(GUARDED)}{hint}")
    for names, (has_effect, without, needed) in _needs(config).items():
        for name in names:
            if values[name] != (default := KEYS[name].default) and not has_effect:
                told = f"{name}={shown(values[name])} does nothing with {without}"
                raise UserError(f"{told}; set {needed}, or {name}={default!r}")
    for message, wrong in _conflicts(config, model, world_size).items():
        if wrong:
            raise UserError(message)
    for name in tracker_names(config):
        require_tracker(name)


def _check_value(name: str, known: Key, value: object) -> None:
    if known.choices and value not in known.choices and not (known.modules and is_module(value)):
        if instead := REMOVED_VALUES.get((name, str(value))):
            raise UserError(f"{name}={shown(value)} was removed: {instead}")
        theirs = OTHER_VALUES.get((name, str(value)))
        hint = f"; {theirs}" if theirs else did_you_mean(str(value), map(str, known.choices))
        listed = ", ".join(map(repr, known.choices)) + ", nor a package.module" * known.modules
        raise UserError(f"{name}={shown(value)} is not one of {listed}{hint}")
    if known.words and isinstance(value, str) and value not in known.words:
        listed = ", ".join(map(repr, known.words))
        raise UserError(f"{name}={shown(value)} is neither a number nor {listed}")
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return
    if known.minimum is not None and not value >= known.minimum:  # also catches NaN
        raise UserError(f"{name}={shown(value)} must be at least {known.minimum}")
    if known.below is not None and not value < known.below:
        raise UserError(f"{name}={shown(value)} must be below {known.below}")
    if isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"{name}={value} is not a finite number")
    most = known.most(value)
    if abs(value) > most:
        raise UserError(f"{name}={shown(value)} is beyond {'-' * (value < 0)}{most:,}, the limit")


def _check_path(name: str, value: str) -> None:
    if not value:
        raise UserError(f"{name} is empty; name a folder")
    if "://" in value:
        raise UserError(f"{name}={shown(value)} is a URL; name a folder")
    if any(ord(c) < 32 for c in value):  # it would steer the terminal, and break lines of the log
        raise UserError(f"{name}={shown(value)} has a line break or another control character")
    try:
        os.fsencode(value)
    except UnicodeEncodeError:
        raise UserError(f"{name}={shown(value)} is no text that can name a folder") from None


# --- what goes together ---


def _needs(config: TrainConfig) -> dict[tuple[str, ...], tuple[bool, str, str]]:
    """{keys: (whether they do anything, what is set, what they need)}."""
    recipe, stored = config.low_precision, (config.param_dtype, config.adam_dtype)
    asked, begin = f"low_precision={recipe!r}", config.init_from
    evaluates = config.eval_interval > 0 or config.eval_only
    rounds = f"param_dtype={stored[0]!r} and adam_dtype={stored[1]!r}"
    return {
        ("gpu",): (config.dry_run, "dry_run=False, which takes the GPU that it finds", "--dry_run=True"),
        ("resume_from",): (begin == "resume", f"init_from={begin!r}", "--init_from=resume"),
        ("trackers",): (config.save_log_to_json, "save_log_to_json=False", "save_log_to_json=True"),
        OF_FSDP: (config.use_fsdp, "use_fsdp=False", "use_fsdp=True"),
        ("loss_targets",): (evaluates, "eval_interval=0", "--eval_interval=250"),
        ("low_precision_skip_first", "low_precision_skip_last"): (recipe != "none", asked, "a recipe"),
        **_of_choices(config),
        ("weight_rounding",): ("bfloat16" in stored, rounds, "one of them to 'bfloat16'"),
    }


def _of_choices(config: TrainConfig) -> dict[tuple[str, ...], tuple[bool, str, str]]:
    """Of keys that only some recipes or optimizers read, those that are set: only then are these imported."""
    found: dict[tuple[str, ...], tuple[bool, str, str]] = {}
    for key, names in OF_CHOICES.items():
        for name in names:
            if getattr(config, name) == KEYS[name].default:
                continue
            needed = [f"--{key}={one}" for one in names_of(key) if name in find(key, one).settings]
            chosen = getattr(config, key)
            reads = name in find(key, chosen).settings
            found[(name,)] = reads, f"{key}={chosen!r}", " or ".join(needed)
    return found


def check_schedule(config: TrainConfig) -> None:
    """Compares what is stated. A default is chosen later, when it is known where the run starts
    (training/optimization/schedule.py)."""
    decays = config.lr_schedule != "constant" and not config.eval_only
    if decays and config.min_lr > config.learning_rate:
        raise UserError(f"min_lr={config.min_lr} is above learning_rate={config.learning_rate}")
    warmup, end = config.warmup_iters, config.lr_decay_iters
    if decays and warmup is not None and end is not None and warmup >= end:
        raise UserError(
            f"warmup_iters={warmup} is not below lr_decay_iters={end}; the rate would have no time to decay: "
            "lower warmup_iters, or raise lr_decay_iters"
        )


def _conflicts(config: TrainConfig, model: ModelConfig, world_size: int) -> dict[str, bool]:
    """{what a user is told: whether the settings are so}."""
    c, peak, recipe = config, config.peak_tflops, config.low_precision
    first, last = c.low_precision_skip_first, c.low_precision_skip_last
    in_bf16 = c.gradient_dtype == "bfloat16"
    recomputes = f"activation_checkpointing={c.activation_checkpointing!r}"
    copies_q_k = model.position_encoding == "rope" and not c.doc_masking
    copies_q_k = copies_q_k and (model.qk_norm or model.head_dim.bit_count() > 1)
    on_gpu, repeats = c.device == "cuda", f"replay_check_interval={c.replay_check_interval}"
    no_peak = isinstance(peak, str) and peak != "measure" or isinstance(peak, float) and not peak > 0
    # what its kernels cannot compute anywhere; what is installed, and the GPU, are looked at later
    asked = c.ffn_backend
    kernels = {} if asked == "torch" else find("ffn_backend", asked).conflicts(c, model)
    return {
        **{f"ffn_backend={asked!r} {why}, or ffn_backend='torch'": wrong for why, wrong in kernels.items()},
        f"wsd_decay_fraction={c.wsd_decay_fraction} is not in (0, 1]": not 0 < c.wsd_decay_fraction <= 1,
        "use_zero1=True and use_fsdp=True both shard the optimizer state; set one of them to False": (
            c.use_zero1 and c.use_fsdp
        ),
        "use_fsdp=True shards over processes, but this run has one; start it with torchrun --standalone "
        "--nproc_per_node=N, or set --use_fsdp=False": c.use_fsdp and world_size == 1 and not c.dry_run,
        f"adam_dtype='bfloat16' rounds away what an iteration changes at beta1={c.beta1:g}, "
        f"beta2={c.beta2:g}; set both to at most {BF16_MAX_BETA}, or weight_rounding='stochastic', or "
        "adam_dtype='float32'": c.adam_dtype == "bfloat16"
        and c.weight_rounding == "nearest"
        and max(c.beta1, c.beta2) > BF16_MAX_BETA,
        f"param_dtype='bfloat16' stores less than dtype={c.dtype!r} computes with; set dtype='bfloat16', or "
        "param_dtype='float32'": c.param_dtype == "bfloat16" != c.dtype,
        f"low_precision={recipe!r} takes and gives bfloat16, but dtype={c.dtype!r}; set dtype='bfloat16', or "
        "low_precision='none'": recipe != "none" and c.dtype != "bfloat16",
        "gradient_dtype='bfloat16' is for one process, DDP and ZeRO-1; FSDP sums gradients in reduce_dtype; "
        "set reduce_dtype='bfloat16' and gradient_dtype='float32'": in_bf16 and c.use_fsdp,
        "gradient_dtype='bfloat16' saves nothing with param_dtype='float32', whose update needs an fp32 copy "
        "of them; set param_dtype='bfloat16', or gradient_dtype='float32'": in_bf16
        and c.param_dtype != "bfloat16",
        f"gradient_dtype='bfloat16' is not for low_precision={recipe!r}, whose matmuls add to sums in "
        "float32; set low_precision='none', or gradient_dtype='float32'": in_bf16 and recipe != "none",
        f"low_precision_skip_first={first} and low_precision_skip_last={last} leave none of the "
        f"n_layer={c.n_layer} blocks in low_precision={recipe!r}; skip fewer, or set low_precision='none'": (
            recipe != "none" and first + last >= c.n_layer and c.low_precision_scope == "layers"
        ),
        f"{recomputes} makes again what the layers of ffn_backend={c.ffn_backend!r} keep; set "
        "activation_checkpointing='selective', or ffn_backend='torch'": (
            c.activation_checkpointing in RECOMPUTING and c.ffn_backend != "torch"
        ),
        f"{recomputes} saves nothing here: in low precision, inputs of matmuls are kept quantized, and this "
        "model has no copies of q and k to make again; set activation_checkpointing='attention' or 'none'": (
            c.activation_checkpointing == "memory_bound"
            and recipe != "none"
            and not (first + last or copies_q_k)
        ),
        f"{repeats} needs the same random numbers twice, but a CUDA Graph draws new ones for "
        f"dropout={c.dropout}; set use_cuda_graphs=False, dropout=0.0, or replay_check_interval=0": (
            c.replay_check_interval > 0 and c.dropout > 0 and captures_cuda_graphs(c)
        ),
        f"{repeats} compares bits, but each compilation may choose another softmax for "
        "attention_backend='manual'; set compile=False, another backend, or replay_check_interval=0": (
            c.replay_check_interval > 0 and c.compile and c.attention_backend == "manual" and on_gpu
        ),
        "backend='nccl' needs device='cuda'; use --backend=gloo for device='cpu'": (
            c.backend == "nccl" and c.device == "cpu"
        ),
        f"peak_tflops={shown(peak)} is neither a positive number nor 'measure'": no_peak,
        "peak_tflops='measure' times a dense GEMM; set use_sparse_specs=False, or state the peak": (
            peak == "measure" and c.use_sparse_specs
        ),
    }


# --- texts that are names or times ---


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """What an error ends with if one of the known names is near."""
    near = difflib.get_close_matches(name[:100], list(known), n=1)  # it takes long for a long text
    return f"; did you mean {near[0]!r}?" if near else ""


def tracker_names(config: TrainConfig) -> list[str]:
    """The trackers that get figures, each once. Raises UserError if one is unknown."""
    return named_trackers(config.trackers)


def named_trackers(text: str) -> list[str]:
    names = list(dict.fromkeys(filter(None, (name.strip() for name in text.split(",")))))
    for name in names:
        if name not in TRACKERS:
            hint = did_you_mean(name, TRACKERS)
            raise UserError(f"trackers={shown(text)}: {shown(name)} is none of {', '.join(TRACKERS)}{hint}")
    return names


def require_tracker(name: str) -> None:
    """Raises UserError if the package is missing."""
    found = importlib.util.find_spec(name)
    # a folder of this name, such as wandb/ with offline runs, is found as a package without an origin
    is_folder = found is not None and found.origin is None and found.submodule_search_locations is not None
    if found is None or is_folder:
        raise UserError(
            f"trackers={name!r} needs {name}: pip install -r requirements/trackers.txt, or leave {name} out "
            "of --trackers (--wandb_log=False does so for wandb)"
        )


def checkpoint_interval(config: TrainConfig) -> tuple[int, float]:
    """(iterations, seconds) between checkpoints, one of them 0, or both. Raises UserError."""
    value = config.checkpoint_interval
    if isinstance(value, str):
        match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([smh])", value)
        seconds = float(match[1]) * {"s": 1, "m": 60, "h": 3600}[match[2]] if match else 0
        if not 0 < seconds <= 60 * YEAR:
            raise UserError(
                f"checkpoint_interval={shown(value)} is neither a number of iterations nor a time such as "
                "'30m', of at most a year"
            )
        return 0, seconds
    if value is not None and value < 0:
        raise UserError(f"checkpoint_interval={shown(value)} must be at least 0")
    return value or 0, 0.0


# --- what falls back where it cannot work; the start-up report has a line about each ---


def shards_optimizer(config: TrainConfig, world_size: int) -> bool:
    """Whether ZeRO-1 is used: one process has nobody to share with, so there use_zero1 changes nothing."""
    return config.use_zero1 and world_size > 1


def cuda_graphs_obstacle(config: TrainConfig) -> str | None:
    """Why an iteration cannot be captured, so that the eager step runs; None if nothing known here speaks
    against it."""
    if config.device == "cpu":
        return "device='cpu' has no CUDA Graphs"
    if config.use_fsdp and config.fsdp_sharding == "hybrid":
        # deadlocks were seen (NCCL's user guide, "Using NCCL with CUDA Graphs")
        return "fsdp_sharding='hybrid' has two NCCL communicators, which may deadlock in a replay"
    return None


def captures_cuda_graphs(config: TrainConfig) -> bool:
    return config.use_cuda_graphs and cuda_graphs_obstacle(config) is None
