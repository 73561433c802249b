"""Configuration. One frozen dataclass holds every key; what a value may be and what may go together is
checked here, before a device or a process group is touched. training/configuration/files_and_flags.py reads files and flags.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib.util
import math
import re
import typing
from dataclasses import dataclass
from pathlib import Path

import torch

from model_config import ModelConfig, model_config
from training.configuration.errors import UserError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class TrainConfig:
    # --- run ---
    out_dir: str = "out"  # run records, logs and checkpoints go here
    max_iters: int = 25000  # optimizer updates in total, also after a resume
    eval_interval: int = 1000  # iterations between evaluations; 0 never evaluates
    eval_iters: int = 100  # evaluation batches of batch_size sequences, per split, over all GPUs together
    eval_only: bool = False  # evaluate once and stop
    eval_at_start: bool = False  # evaluate before the first update, too
    log_interval: int = 10  # iterations between log rows; the only place where the GPU is waited for
    gradient_log_interval: int = 100  # iterations between gradient mean and std in the rows; 0 never
    always_save_checkpoint: bool = True  # save at every evaluation and at the end; False: only a new best
    checkpoint_interval: int | str | None = None  # iterations, or a time ('30m', '2h'); None: see above only
    async_checkpoint: bool = True  # write checkpoints while training goes on; needs host memory for a copy
    keep_last: int = 2  # newest checkpoints that are kept, beside the best
    keep_all_checkpoints: bool = False  # True deletes none
    init_from: str = "scratch"  # 'scratch', 'resume' (a checkpoint of out_dir) or 'auto' (either)
    resume_from: str = "latest"  # 'latest' (the newest that verifies), 'best' or a name: 'step-00001000'
    allow_changes: str | None = None  # settings that may differ from the checkpoint's: 'seed,batch_size'
    save_log_to_json: bool = True  # write out_dir/run_*.json
    log_save_interval: int = 100  # iterations between rewrites of the JSON, 1 % of the time at most
    wandb_log: bool = False  # mirror rows to Weights & Biases
    wandb_project: str = "nanomfu"
    wandb_run_name: str | None = None  # None: the run's own name
    seed: int = 1337  # initial weights, data order and dropout
    dry_run: bool = False  # build on the meta device, print the start-up report, stop

    # --- data ---
    dataset: str = "quickstart"  # a folder in data/, or a path to one; 'a:0.7,b:0.3' mixes several by weight
    verify_data: str = "hash"  # files not yet read whole: 'hash' reads them once, 'size' trusts their sizes
    batch_size: int = 12  # sequences per GPU per micro-step
    gradient_accumulation_steps: int = 1  # micro-steps per iteration, per GPU
    block_size: int = 1024  # tokens per sequence
    doc_masking: bool = False  # documents of a window do not see each other, and positions begin again
    packing: str = "stream"  # windows: 'stream' (tokens cut anywhere) or 'truncate' (whole documents)
    use_dataloader: bool = False  # worker processes read the batches; the batches are the same
    dataloader_num_workers: int = 2  # processes
    dataloader_prefetch_factor: int = 2  # iterations read ahead, per worker

    # --- model; None means what arch_preset says (model_config.py) ---
    arch_preset: str = "gpt2"  # 'gpt2', 'llama', 'llama3' or 'qwen3': the style and vocabulary
    n_layer: int = 12
    n_head: int = 12  # query heads
    n_embd: int = 768  # model width
    num_key_value_heads: int | None = None  # None: n_head
    d_ff: int | None = None  # feed-forward width; alias intermediate_size; None: 4x, or 8/3x for swiglu
    vocab_size: int | None = None
    normalization: str | None = None  # 'layernorm' or 'rmsnorm'
    norm_eps: float | None = None
    activation: str | None = None  # 'gelu' (tanh approximation) or 'silu'
    position_encoding: str | None = None  # 'learned' or 'rope'
    rope_theta: float | None = None
    ffn_type: str | None = None  # 'mlp' or 'swiglu'
    bias: bool | None = None  # on Linear layers and LayerNorm
    dropout: float = 0.0
    weight_tying: bool | None = None
    qk_norm: bool | None = None

    # --- attention ---
    attention_backend: str = "sdpa"  # flash_attn_3 > flash_attn_2 > sdpa > manual; falls back rightwards

    # --- optimizer ---
    learning_rate: float = 3e-4  # peak
    min_lr: float = 3e-5  # at the end of the decay
    decay_lr: bool = True  # False: constant after warm-up
    lr_schedule: str = "cosine"  # 'cosine', 'wsd', 'linear' or 'constant', after a linear warm-up
    warmup_iters: int = 2000  # iterations
    lr_decay_iters: int = 25000  # iteration at which min_lr is reached
    wsd_decay_fraction: float = 0.2  # share of lr_decay_iters that wsd spends decaying
    weight_decay: float = 0.1  # on matrices only
    beta1: float = 0.9
    beta2: float = 0.95
    grad_clip: float = 1.0  # global gradient norm; 0 does not clip
    adam_dtype: str = "float32"  # storage of the Adam moments: 'float32' or 'bfloat16'

    # --- bad numbers ---
    on_nonfinite: str = "stop"  # a loss or gradient that is not finite: 'stop' the run, or 'skip' the update
    skip_spikes: float = 0.0  # skip an update if its loss or gradient norm is this many sigmas high; 0: never
    spike_window: int = 128  # accepted iterations that the mean and sigma of skip_spikes are taken over
    max_skips: int = 10  # updates skipped in a row, by either key, that end the run
    drift_check_interval: int = 1000  # iterations between comparisons of what ranks hold in common; 0 never

    # --- system ---
    device: str = "cuda"  # 'cuda' or 'cpu'
    dtype: str = "bfloat16"  # compute: 'float32', 'bfloat16' or 'float16' (with loss scaling)
    param_dtype: str = "float32"  # storage of the weights that Adam updates: 'float32' or 'bfloat16'
    low_precision: str = "none"  # 'none', or 'fp8_tensorwise': fp8 matmuls, one scale per tensor
    low_precision_scope: str = "layers"  # 'layers' (Linear layers of the blocks) or 'layers_and_head'
    compile: bool = True  # torch.compile
    compile_scope: str = "regional"  # 'regional' (each block by itself) or 'whole' (the model; one process)
    use_cuda_graphs: bool = False  # capture an iteration and replay it; one process or DDP
    loss_chunks: int = 1  # parts that the tokens are split into for logits and loss; more needs less memory
    activation_checkpointing: str = "none"  # recompute: 'none', 'selective' (every second block) or 'full'
    use_zero1: bool = False  # shard the optimizer state over the processes
    use_fsdp: bool = False  # shard weights, gradients and optimizer state (FSDP2)
    fsdp_sharding: str = "full"  # over 'full' (all processes) or 'hybrid' (those of one machine, replicated)
    reshard_after_forward: bool = False  # FSDP frees gathered weights after each forward: less memory, slower
    reduce_dtype: str = "float32"  # gradients on their way between processes: 'float32' or 'bfloat16'
    use_sparse_specs: bool = False  # count MFU against the 2:4-sparse peak; marks every record
    peak_tflops: float | str | None = None  # dense TFLOPS of one GPU; 'measure' times a GEMM; None: the table
    backend: str | None = None  # process group: None picks nccl for cuda, gloo for cpu
    timeout_minutes: float = 10.0  # an iteration that takes longer hangs: the run ends, naming who; 0: never
    start_timeout_minutes: float = 60.0  # the same for what may take long: compilation, evaluation, saving

    def model_config(self) -> ModelConfig:
        """The model's shape. Raises ValueError."""
        return model_config(
            self.arch_preset,
            n_layer=self.n_layer,
            n_head=self.n_head,
            n_embd=self.n_embd,
            n_kv_head=self.num_key_value_heads,
            d_ff=self.d_ff,
            vocab_size=self.vocab_size,
            block_size=self.block_size,
            normalization=self.normalization,
            norm_eps=self.norm_eps,
            activation=self.activation,
            position_encoding=self.position_encoding,
            rope_theta=self.rope_theta,
            ffn_type=self.ffn_type,
            bias=self.bias,
            dropout=self.dropout,
            weight_tying=self.weight_tying,
            qk_norm=self.qk_norm,
        )

    def samples_per_iter(self, world_size: int) -> int:
        """Sequences that one update sees, over all GPUs."""
        return self.batch_size * self.gradient_accumulation_steps * world_size

    def to_dict(self) -> dict:
        """{key: value}. Redact it before it is written anywhere (training/process/redaction.py)."""
        return dataclasses.asdict(self)


KEYS = {field.name: field for field in dataclasses.fields(TrainConfig)}
TYPES = typing.get_type_hints(TrainConfig)

# alias -> what it sets, given its value
ALIASES = {
    "intermediate_size": lambda value: {"d_ff": value},
    "flash_attn": lambda value: {"attention_backend": "flash_attn_2"} if value else {},
}
ALIAS_TYPES = {"intermediate_size": TYPES["d_ff"], "flash_attn": bool}

CHOICES = {
    "init_from": ("scratch", "resume", "auto"),
    "verify_data": ("hash", "size"),
    "packing": ("stream", "truncate"),
    "device": ("cuda", "cpu"),
    "dtype": ("float32", "bfloat16", "float16"),
    "param_dtype": ("float32", "bfloat16"),
    "adam_dtype": ("float32", "bfloat16"),
    "reduce_dtype": ("float32", "bfloat16"),
    "on_nonfinite": ("stop", "skip"),
    "low_precision": ("none", "fp8_tensorwise"),
    "low_precision_scope": ("layers", "layers_and_head"),
    "compile_scope": ("regional", "whole"),
    "activation_checkpointing": ("none", "selective", "full"),
    "fsdp_sharding": ("full", "hybrid"),
    "lr_schedule": ("cosine", "wsd", "linear", "constant"),
    "attention_backend": ("flash_attn_3", "flash_attn_2", "sdpa", "manual"),
    "backend": (None, "nccl", "gloo"),
}
# What a resume may change only if allow_changes names it: which samples an iteration sees, and what an update
# does with them. 'processes' is no key, but how many there are.
GUARDED = (
    *("dataset", "seed", "batch_size", "gradient_accumulation_steps", "processes", "doc_masking", "packing"),
    *("learning_rate", "min_lr", "decay_lr", "lr_schedule", "warmup_iters", "lr_decay_iters"),
    *("wsd_decay_fraction", "weight_decay", "beta1", "beta2", "grad_clip"),
)
AT_LEAST = {
    "max_iters": 0,
    "keep_last": 1,
    "eval_interval": 0,
    "eval_iters": 1,
    "log_interval": 1,
    "gradient_log_interval": 0,
    "log_save_interval": 1,
    "seed": 0,
    "batch_size": 1,
    "gradient_accumulation_steps": 1,
    "loss_chunks": 1,
    "dataloader_num_workers": 0,
    "dataloader_prefetch_factor": 1,
    "warmup_iters": 0,
    "lr_decay_iters": 1,
    "learning_rate": 0,
    "min_lr": 0,
    "weight_decay": 0,
    "grad_clip": 0,
    "skip_spikes": 0,
    "spike_window": 16,
    "max_skips": 1,
    "drift_check_interval": 0,
    "timeout_minutes": 0,
    "start_timeout_minutes": 0,
}


# --- what may go together ---


def check(config: TrainConfig, world_size: int) -> None:
    """Every rule that needs no device. Raises UserError naming the settings in conflict."""
    for name, allowed in CHOICES.items():
        value = getattr(config, name)
        if value not in allowed:
            near = difflib.get_close_matches(str(value), [str(a) for a in allowed], n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise UserError(f"{name}={value!r} is not one of {', '.join(map(repr, allowed))}{hint}")
    for name, minimum in AT_LEAST.items():
        if not getattr(config, name) >= minimum:  # also catches NaN
            raise UserError(f"{name}={getattr(config, name)} must be at least {minimum}")
    for name, value in config.to_dict().items():
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"{name}={value} is not a finite number")
    for name in ("out_dir", "dataset"):
        if not getattr(config, name):
            raise UserError(f"{name} is empty; name a folder")
        if "://" in getattr(config, name):
            raise UserError(f"{name}={getattr(config, name)!r} is a URL; name a folder")
    for name in ("beta1", "beta2"):
        if not 0 <= getattr(config, name) < 1:
            raise UserError(f"{name}={getattr(config, name)} is not in [0, 1)")
    try:
        config.model_config()
    except ValueError as error:
        raise UserError(str(error)) from None
    _check_checkpoints(config)
    _check_schedule(config)
    _check_system(config, world_size)


def checkpoint_interval(config: TrainConfig) -> tuple[int, float]:
    """(iterations, seconds) between checkpoints, one of them 0, or both. Raises UserError."""
    value = config.checkpoint_interval
    if isinstance(value, str):
        match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([smh])", value)
        seconds = float(match[1]) * {"s": 1, "m": 60, "h": 3600}[match[2]] if match else 0
        if not seconds:
            raise UserError(
                f"checkpoint_interval={value!r} is neither a number of iterations nor a time such as '30m'"
            )
        return 0, seconds
    if value is not None and value < 0:
        raise UserError(f"checkpoint_interval={value} must be at least 0")
    return value or 0, 0.0


def _check_checkpoints(config: TrainConfig) -> None:
    checkpoint_interval(config)
    for name in filter(None, (config.allow_changes or "").split(",")):
        if name not in GUARDED:
            near = difflib.get_close_matches(name, GUARDED, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise UserError(f"allow_changes: {name!r} is not one of {', '.join(GUARDED)}{hint}")
    if config.resume_from != "latest" and config.init_from != "resume":
        raise UserError(f"resume_from={config.resume_from!r} says where to go on; add --init_from=resume")


def _check_schedule(config: TrainConfig) -> None:
    decays = config.decay_lr and config.lr_schedule != "constant"
    if decays and config.min_lr > config.learning_rate:
        raise UserError(f"min_lr={config.min_lr} is above learning_rate={config.learning_rate}")
    if decays and config.warmup_iters >= config.lr_decay_iters:
        raise UserError(
            f"warmup_iters={config.warmup_iters} is not below lr_decay_iters={config.lr_decay_iters}; "
            "the rate would have no time to decay"
        )
    if not 0 < config.wsd_decay_fraction <= 1:
        raise UserError(f"wsd_decay_fraction={config.wsd_decay_fraction} is not in (0, 1]")


BF16_MAX_BETA = 0.99  # a moment decays by 1 - beta an iteration; bf16 hides a change of less than 2^-8


def _check_system(config: TrainConfig, world_size: int) -> None:
    if config.use_zero1 and config.use_fsdp:
        raise UserError(
            "use_zero1=True and use_fsdp=True both shard the optimizer state; set one of them to False"
        )
    for name in ("use_zero1", "use_fsdp"):
        if getattr(config, name) and world_size == 1 and not config.dry_run:
            raise UserError(
                f"{name}=True shards over processes, but this run has one; start it with "
                f"torchrun --standalone --nproc_per_node=N, or set --{name}=False"
            )
    for name, default in (("fsdp_sharding", "full"), ("reshard_after_forward", False)):
        value = getattr(config, name)
        if value != default and not config.use_fsdp:
            raise UserError(
                f"{name}={value!r} is a way of sharding, but use_fsdp=False; "
                f"set use_fsdp=True, or {name}={default!r}"
            )
    if config.adam_dtype == "bfloat16" and max(config.beta1, config.beta2) > BF16_MAX_BETA:
        raise UserError(
            f"adam_dtype='bfloat16' rounds away what an iteration changes at beta1={config.beta1:g}, "
            f"beta2={config.beta2:g}; set both to at most {BF16_MAX_BETA}, or adam_dtype='float32'"
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
    if config.compile and config.compile_scope == "whole" and world_size > 1:
        raise UserError(
            "compile_scope='whole' leaves no place between blocks for communication; "
            "set compile_scope='regional' for several processes"
        )
    if config.use_cuda_graphs and (config.use_zero1 or config.use_fsdp):
        raise UserError(
            "use_cuda_graphs=True captures one process or DDP; set it to False with use_zero1 or use_fsdp"
        )
    if config.use_cuda_graphs and config.device == "cpu":
        raise UserError("use_cuda_graphs=True needs device='cuda'; set it to False for device='cpu'")
    if config.backend == "nccl" and config.device == "cpu":
        raise UserError("backend='nccl' needs device='cuda'; use --backend=gloo for device='cpu'")
    if config.wandb_log and importlib.util.find_spec("wandb") is None:
        raise UserError("wandb_log=True needs wandb: pip install wandb, or set --wandb_log=False")
    peak = config.peak_tflops
    if isinstance(peak, str) and peak != "measure" or isinstance(peak, float) and not peak > 0:
        raise UserError(f"peak_tflops={peak!r} is neither a positive number nor 'measure'")
    if peak == "measure" and config.use_sparse_specs:
        raise UserError(
            "peak_tflops='measure' times a dense GEMM; set use_sparse_specs=False, or state the peak"
        )
