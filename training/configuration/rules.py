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

from common.errors import UserError
from common.text import shorten, shown
from ops.recipes import DELAYED, ONE_SCALE
from training.configuration.batch import check_batch
from training.configuration.key_line import YEAR, Key
from training.configuration.keys import FACTORS, GUARDED, KEYS, TrainConfig
from training.configuration.other_names import REMOVED_VALUES
from training.configuration.recomputation import check_recomputation

PATHS = ("out_dir", "dataset")  # keys that name folders
TRACKERS = ("wandb", "tensorboard", "trackio")  # each is also the name of its package


def check(config: TrainConfig, world_size: int) -> None:
    """Every rule that needs no device. Raises UserError naming the settings in conflict."""
    values = config.to_dict()
    for name, known in KEYS.items():
        if known.choices and values[name] not in known.choices:
            if instead := REMOVED_VALUES.get((name, values[name])):
                raise UserError(f"{name}={shown(values[name])} was removed: {instead}")
            hint = did_you_mean(str(values[name]), map(str, known.choices))
            listed = ", ".join(map(repr, known.choices))
            raise UserError(f"{name}={shown(values[name])} is not one of {listed}{hint}")
        if known.words and isinstance(values[name], str) and values[name] not in known.words:
            listed = ", ".join(map(repr, known.words))
            raise UserError(f"{name}={shown(values[name])} is neither a number nor {listed}")
        _check_size(name, known, values[name])
    for name in PATHS:
        _check_path(name, values[name])
    for name in ("beta1", "beta2"):
        if not 0 <= values[name] < 1:
            raise UserError(f"{name}={values[name]} is not in [0, 1)")
    try:
        config.model_config()
    except ValueError as error:
        raise UserError(shorten(str(error), 300)) from None
    check_batch(config, world_size)
    if config.gpu is not None and not config.dry_run:
        raise UserError(
            f"gpu={shown(config.gpu)} asks about a GPU that need not be here, so it belongs to a dry run; "
            "add --dry_run=True, or leave gpu out: a run takes the GPU that it finds"
        )
    _check_checkpoints(config)
    check_schedule(config)
    _check_sharding(config, world_size)
    _check_precision(config)
    _check_ffn_backend(config)
    check_recomputation(config)
    _check_system(config)


def _check_size(name: str, known: Key, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return
    if known.minimum is not None and not value >= known.minimum:  # also catches NaN
        raise UserError(f"{name}={shown(value)} must be at least {known.minimum}")
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
            f"trackers={name!r} needs {name}: pip install -r requirements-trackers.txt, or leave {name} out "
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


def _check_checkpoints(config: TrainConfig) -> None:
    checkpoint_interval(config)
    for name in filter(None, (config.allow_changes or "").split(",")):
        if name not in (*GUARDED, *FACTORS):
            hint = did_you_mean(name, (*GUARDED, *FACTORS))
            raise UserError(f"allow_changes: {shown(name)} is not one of {', '.join(GUARDED)}{hint}")
    if config.resume_from != "latest" and config.init_from != "resume":
        raise UserError(
            f"resume_from={shown(config.resume_from)} says where to go on; add --init_from=resume"
        )


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
    if not 0 < config.wsd_decay_fraction <= 1:
        raise UserError(f"wsd_decay_fraction={config.wsd_decay_fraction} is not in (0, 1]")


BF16_MAX_BETA = 0.99  # a moment decays by 1 - beta an iteration; bf16 hides a change of less than 2^-8


def _check_precision(config: TrainConfig) -> None:
    stored = config.param_dtype, config.adam_dtype
    if config.weight_rounding == "stochastic" and "bfloat16" not in stored:
        raise UserError(
            f"weight_rounding='stochastic' rounds to bfloat16, but param_dtype={stored[0]!r} and "
            f"adam_dtype={stored[1]!r} store nothing in it; set one of them to 'bfloat16', or "
            "weight_rounding='nearest'"
        )
    loses_small_changes = config.adam_dtype == "bfloat16" and config.weight_rounding == "nearest"
    if loses_small_changes and max(config.beta1, config.beta2) > BF16_MAX_BETA:
        raise UserError(
            f"adam_dtype='bfloat16' rounds away what an iteration changes at beta1={config.beta1:g}, "
            f"beta2={config.beta2:g}; set both to at most {BF16_MAX_BETA}, or weight_rounding='stochastic', "
            "or adam_dtype='float32'"
        )
    if config.param_dtype == "bfloat16" and config.dtype != "bfloat16":
        raise UserError(
            f"param_dtype='bfloat16' stores less than dtype={config.dtype!r} computes with; "
            "set dtype='bfloat16', or param_dtype='float32'"
        )
    if config.low_precision != "none" and config.dtype != "bfloat16":
        raise UserError(
            f"low_precision={config.low_precision!r} takes and gives bfloat16, but dtype={config.dtype!r}; "
            "set dtype='bfloat16', or low_precision='none'"
        )
    _check_gradient_sums(config)
    _check_low_precision(config)


def _check_gradient_sums(config: TrainConfig) -> None:
    if config.gradient_dtype == "float32":
        return
    asked, back = "gradient_dtype='bfloat16'", "or gradient_dtype='float32'"
    if config.use_fsdp:
        raise UserError(
            f"{asked} is for one process, DDP and ZeRO-1; FSDP sums gradients in reduce_dtype; "
            f"set reduce_dtype='bfloat16' and gradient_dtype='float32'"
        )
    if config.param_dtype != "bfloat16":
        raise UserError(
            f"{asked} saves nothing with param_dtype='float32', whose update needs an fp32 copy of them; "
            f"set param_dtype='bfloat16', {back}"
        )
    if config.low_precision != "none":
        raise UserError(
            f"{asked} is not for low_precision={config.low_precision!r}, whose matmuls add to sums in "
            f"float32; set low_precision='none', {back}"
        )


def _check_low_precision(config: TrainConfig) -> None:
    """Settings that the recipe does not use, or that leave it no layer."""
    recipe = config.low_precision
    if config.fp8_gradients != "e5m2" and recipe not in ONE_SCALE:
        raise UserError(
            f"fp8_gradients={config.fp8_gradients!r} is for {' and '.join(ONE_SCALE)}, but "
            f"low_precision={recipe!r} has numbers of its own; leave fp8_gradients out, or change "
            "low_precision"
        )
    delayed = {"amax_history": config.amax_history, "amax_algorithm": config.amax_algorithm}
    for name, value in delayed.items():
        if recipe not in DELAYED and value != KEYS[name].default:
            raise UserError(
                f"{name}={value!r} is for low_precision='fp8_delayed', but low_precision={recipe!r} has no "
                f"history; leave {name} out, or set low_precision='fp8_delayed'"
            )
    first, last = config.low_precision_skip_first, config.low_precision_skip_last
    if (first or last) and recipe == "none":
        raise UserError(
            f"low_precision_skip_first={first} and low_precision_skip_last={last} keep blocks out of low "
            "precision, but low_precision='none'; leave them out, or choose a recipe"
        )
    if recipe != "none" and first + last >= config.n_layer and config.low_precision_scope == "layers":
        raise UserError(
            f"low_precision_skip_first={first} and low_precision_skip_last={last} leave none of the "
            f"n_layer={config.n_layer} blocks in low_precision={recipe!r}; skip fewer, or set "
            "low_precision='none'"
        )


QUACK_ACTIVATIONS = (("swiglu", "silu"), ("mlp", "gelu"))  # ffn_type, activation
QUACK_ALIGNMENT = 8  # columns of bf16: its kernels load and store rows at addresses of 16 bytes


def _check_ffn_backend(config: TrainConfig) -> None:
    """What QuACK's kernels cannot compute anywhere. What is installed, and the GPU, are looked at later
    (training/optimization/ffn_backend.py)."""
    if config.ffn_backend != "quack":
        return
    model = config.model_config()
    asked, back = "ffn_backend='quack'", "or ffn_backend='torch'"
    if config.dtype != "bfloat16":
        raise UserError(
            f"{asked} computes in bfloat16, but dtype={config.dtype!r}; set dtype='bfloat16', {back}"
        )
    if config.low_precision != "none":
        raise UserError(
            f"{asked} computes the layers in bfloat16, but low_precision={config.low_precision!r} does not; "
            f"set low_precision='none', {back}"
        )
    if (model.ffn_type, model.activation) not in QUACK_ACTIVATIONS:
        raise UserError(
            f"{asked} has kernels for ffn_type='swiglu' with activation='silu' and for 'mlp' with 'gelu', "
            f"but this model has {model.ffn_type!r} with {model.activation!r}; set one of these pairs, {back}"
        )
    if model.bias:
        raise UserError(
            f"{asked} adds no bias in the feed-forward layer, but bias=True; set bias=False, {back}"
        )
    for name, width in (("n_embd", model.n_embd), ("d_ff", model.d_ff)):
        if width % QUACK_ALIGNMENT:
            raise UserError(
                f"{asked} needs widths that are multiples of {QUACK_ALIGNMENT}, but {name}={width}; "
                f"change {name}, {back}"
            )


OF_FSDP = ("fsdp_sharding", "reshard_after_forward")


def _check_sharding(config: TrainConfig, world_size: int) -> None:
    if config.use_zero1 and config.use_fsdp:
        raise UserError(
            "use_zero1=True and use_fsdp=True both shard the optimizer state; set one of them to False"
        )
    if config.use_fsdp and world_size == 1 and not config.dry_run:
        raise UserError(
            "use_fsdp=True shards over processes, but this run has one; start it with "
            "torchrun --standalone --nproc_per_node=N, or set --use_fsdp=False"
        )
    for name in OF_FSDP:
        value, default = getattr(config, name), KEYS[name].default
        if value != default and not config.use_fsdp:
            raise UserError(
                f"{name}={value!r} does nothing with use_fsdp=False; set use_fsdp=True, or {name}={default!r}"
            )


def _check_system(config: TrainConfig) -> None:
    if config.backend == "nccl" and config.device == "cpu":
        raise UserError("backend='nccl' needs device='cuda'; use --backend=gloo for device='cpu'")
    for name in tracker_names(config):
        require_tracker(name)
        if not config.save_log_to_json:
            raise UserError(
                f"trackers={config.trackers!r} are sent what the run record has, but save_log_to_json=False; "
                "set save_log_to_json=True, or leave trackers out"
            )
    peak = config.peak_tflops
    if isinstance(peak, str) and peak != "measure" or isinstance(peak, float) and not peak > 0:
        raise UserError(f"peak_tflops={shown(peak)} is neither a positive number nor 'measure'")
    if peak == "measure" and config.use_sparse_specs:
        raise UserError(
            "peak_tflops='measure' times a dense GEMM; set use_sparse_specs=False, or state the peak"
        )


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
