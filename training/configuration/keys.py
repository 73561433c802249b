"""Every key of a run, one line each: its type and choices, default, meaning with its unit, least and greatest
value, and whether a resume guards it. What else the program knows of a key is derived from its line, in KEYS.

`# --- NAME ---` opens a section, here and in `python train.py --help`. What values may go together is in
training/configuration/rules.py.
"""

from __future__ import annotations

import dataclasses
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from model_config import ModelConfig, config_key, model_config
from training.configuration.key_line import BATCH_MAX, READ_AHEAD_MAX, WORKERS_MAX, YEAR, key, read_line

ROOT = Path(__file__).resolve().parents[2]  # the checkout: config/ and data/ are in it
AUTO: Literal["auto"] = "auto"  # the run chooses: training/memory/micro_batch.py


@dataclass(frozen=True)
class TrainConfig:
    # --- run ---
    out_dir: str = key("out", "folder of run records, logs and checkpoints")
    max_iters: int = key(25000, "optimizer updates in total, also after a resume", minimum=0)
    max_epochs: float | None = key(None, "also end after so many passes through the training data", minimum=0)
    eval_interval: int = key(1000, "iterations between evaluations; also after the last; 0: never", minimum=0)
    eval_iters: int = key(
        100, "batches of eval_batch_size sequences per split, over all GPUs together", minimum=1
    )
    eval_batch_size: int | None = key(
        None, "sequences; None: 16, or as many as before a resume", minimum=1, maximum=BATCH_MAX
    )
    eval_only: bool = key(False, "evaluate once, write eval_*.json, and stop; accepts changed settings")
    eval_at_start: bool = key(False, "also evaluate before the first update")
    log_interval: int = key(10, "iterations between log rows; only a row waits for the GPU", minimum=1)
    gradient_log_interval: int = key(100, "iterations between gradient mean and std; 0: never", minimum=0)
    always_save_checkpoint: bool = key(True, "save at each evaluation and at the end; False: only a new best")
    checkpoint_interval: int | str | None = key(
        None, "also save every N iterations, or after a time: '30m', '2h'; 0: never"
    )
    async_checkpoint: bool = key(True, "save while training continues; needs host memory for a copy")
    keep_last: int | None = key(2, "newest checkpoints to keep, besides the best; None: all", minimum=1)
    init_from: Literal["scratch", "resume", "auto"] = key("scratch", "auto: resume if there is a checkpoint")
    resume_from: str = key("latest", "'latest' (the newest that verifies), 'best' or a name: 'step-00001000'")
    init_weights: str | None = key(
        None, "weights and model keys of a new run: 'hf:FOLDER' or 'hf:OWNER/NAME[@REVISION]' (Hugging Face)"
    )
    allow_changes: str | None = key(None, "keys that a resume may change, such as 'seed,batch_size'")
    save_log_to_json: bool = key(True, "write the run record, out_dir/run_*.json")
    log_save_interval: int = key(100, "iterations between record writes (at most 1 % of the time)", minimum=1)
    trackers: str = key("", "send figures also to 'wandb,tensorboard,trackio' (docs/trackers.md)")
    wandb_project: str = key("nanomfu", "the project in the trackers")
    wandb_run_name: str | None = key(None, "the name in the trackers; None: the run's own")
    seed: int = key(1337, "random seed of weights, data order and dropout", minimum=0, guarded=True)
    dry_run: bool = key(False, "build on the meta device, print the start-up report, and stop")
    gpu: str | None = key(None, "GPU that a dry run assumes, such as 'H100' or 'A100-40GB'")
    price: float | None = key(None, "of one GPU-hour; the start-up report then states the cost", minimum=0)

    # --- data ---
    dataset: str = key("quickstart", "folder in data/, or a path; 'a:0.7,b:0.3' mixes several", guarded=True)
    verify_data: Literal["hash", "size"] = key("hash", "check new files by reading them once, or by size")
    batch_size: int | Literal["auto"] = key(
        12,
        "sequences per GPU per micro-step; auto: the largest that fits, by the memory estimate",
        minimum=1,
        maximum=BATCH_MAX,
    )
    gradient_accumulation_steps: int | Literal["auto"] = key(
        1,
        "micro-steps per iteration, per GPU; auto: as many as give tokens_per_iter",
        minimum=1,
        maximum=BATCH_MAX,
    )
    tokens_per_iter: int | None = key(
        None,
        "tokens per update over all GPUs, which 'auto' reaches exactly; ignored if neither is 'auto'",
        minimum=1,
        guarded=True,
    )
    block_size: int = key(1024, "tokens per sequence")
    doc_masking: bool = key(False, "attention and positions stay inside each document", guarded=True)
    packing: Literal["stream", "truncate"] = key(
        "stream", "windows cut from the tokens anywhere, or filled with whole documents", guarded=True
    )
    use_dataloader: bool = key(False, "read batches in worker processes; the batches are the same")
    dataloader_num_workers: int = key(
        2, "worker processes of use_dataloader, per GPU; 0: none", minimum=0, maximum=WORKERS_MAX
    )
    dataloader_prefetch_factor: int = key(
        2, "iterations that each worker reads ahead", minimum=1, maximum=READ_AHEAD_MAX
    )

    # --- model; None: what arch_preset says (model_config.py) ---
    arch_preset: str = key(
        "gpt2", "'gpt2', 'llama', 'llama3', 'qwen2' or 'qwen3': the style and the vocabulary"
    )
    n_layer: int = key(12, "blocks of attention and feed-forward")
    n_head: int = key(12, "query heads")
    n_embd: int = key(768, "model width")
    num_key_value_heads: int | None = key(None, "key/value heads; None: n_head")
    head_dim: int | None = key(None, "width of a query, key or value head; None: n_embd / n_head")
    d_ff: int | None = key(None, "feed-forward width; None: 4 x n_embd, or about 8/3 x n_embd for swiglu")
    vocab_size: int | None = key(None, "number of token ids")
    normalization: str | None = key(None, "'layernorm' or 'rmsnorm'")
    norm_eps: float | None = key(None, "epsilon of the normalization")
    activation: str | None = key(None, "'gelu' (tanh approximation) or 'silu'")
    position_encoding: str | None = key(None, "'learned' or 'rope'")
    rope_theta: float | None = key(None, "base of the rope frequencies")
    rope_scaling: dict | None = key(
        None,
        "for longer sequences: {'rope_type': 'linear', 'factor': 2.0}; 'llama3' and 'yarn' have more fields "
        "(rope_scaling.py)",
    )
    ffn_type: str | None = key(None, "'mlp' or 'swiglu'")
    bias: bool | None = key(None, "biases in LayerNorm and in all Linear layers but the output head")
    qkv_bias: bool | None = key(None, "biases in the projections to q, k and v alone; not with bias=True")
    dropout: float = key(0.0, "probability, from 0 to below 1")
    weight_tying: bool | None = key(None, "the output head and the token embedding share their weights")
    qk_norm: bool | None = key(None, "RMSNorm on each query and key head")

    # --- attention ---
    attention_backend: Literal["flash_attn_4", "flash_attn_3", "flash_attn_2", "sdpa", "manual"] = key(
        "sdpa", "kernel of attention; if it cannot run here, the next one in this list does"
    )

    # --- feed-forward ---
    ffn_backend: str = key("torch", "quack: matmul and activation in one kernel, on Hopper, in bfloat16")

    # --- optimizer ---
    optimizer: str = key(
        "adamw", "muon: for matrices in blocks; AdamW for the rest (docs/time_to_loss.md)", guarded=True
    )
    muon_momentum: float = key(0.95, "Muon's Nesterov momentum", minimum=0, below=1, guarded=True)
    loss_targets: str = key("", "held-out losses; the run states when it reaches each: '3.5,3.28'")
    learning_rate: float = key(3e-4, "peak learning rate, after warm-up", minimum=0, guarded=True)
    min_lr: float = key(3e-5, "learning rate at the end of the decay", minimum=0, guarded=True)
    lr_schedule: Literal["cosine", "wsd", "linear", "constant"] = key(
        "cosine", "the decay after a linear warm-up; wsd: stable, then wsd_decay_shape", guarded=True
    )
    warmup_iters: int | None = key(
        None,
        "iterations of linear warm-up; 0: none; None: a tenth of lr_decay_iters, at most 2,000",
        minimum=0,
        guarded=True,
    )
    lr_decay_iters: int | None = key(
        None,
        "iteration at which min_lr is reached; None: the last one of the first attempt, also after a resume",
        minimum=1,
        guarded=True,
    )
    wsd_decay_fraction: float = key(0.2, "share of lr_decay_iters that wsd spends decaying", guarded=True)
    wsd_decay_shape: Literal["linear", "cosine", "1-sqrt"] = key("linear", "how wsd decays", guarded=True)
    weight_decay: float = key(0.1, "weight decay, on matrices only", minimum=0, guarded=True)
    beta1: float = key(0.9, "Adam's decay of the mean gradient", minimum=0, below=1, guarded=True)
    beta2: float = key(0.95, "Adam's decay of the mean squared gradient", minimum=0, below=1, guarded=True)
    grad_clip: float = key(1.0, "largest global gradient norm; 0: no clipping", minimum=0, guarded=True)
    adam_dtype: Literal["float32", "bfloat16", "8bit"] = key("float32", "storage of the Adam moments")

    # --- bad numbers ---
    on_nonfinite: Literal["stop", "skip"] = key("stop", "on NaN or Inf: stop the run, or skip the update")
    skip_spikes: float = key(
        0.0, "skip updates with loss or norm N sigmas above the mean; 0: never", minimum=0
    )
    max_skips: int = key(10, "end the run after so many skipped updates in a row", minimum=1)
    drift_check_interval: int = key(1000, "iterations between comparisons of replicas; 0: never", minimum=0)
    replay_check_interval: int = key(
        0, "iterations between micro-steps that run twice, to compare their bits; 0: never", minimum=0
    )

    # --- system ---
    device: Literal["cuda", "cpu"] = key("cuda", "where to train")
    dtype: Literal["float32", "bfloat16", "float16"] = key("bfloat16", "computation; float16 scales the loss")
    param_dtype: Literal["float32", "bfloat16"] = key("float32", "storage of the weights that Adam updates")
    gradient_dtype: Literal["float32", "bfloat16"] = key("float32", "sums of gradients over micro-steps")
    weight_rounding: Literal["nearest", "stochastic"] = key("nearest", "rounding of bf16 weights and moments")
    low_precision: str = key("none", "recipe of the matmuls (docs/low_precision.md)", guarded=True)
    low_precision_scope: Literal["layers", "layers_and_head"] = key("layers", "what it covers", guarded=True)
    low_precision_skip_first: int = key(0, "first blocks that stay in bfloat16", minimum=0, guarded=True)
    low_precision_skip_last: int = key(0, "last blocks that stay in bfloat16", minimum=0, guarded=True)
    fp8_gradients: Literal["e5m2", "e4m3"] = key(
        "e5m2", "format of gradients in fp8; those of the logits are always e5m2", guarded=True
    )
    amax_history: int = key(1024, "micro-steps whose magnitudes fp8_delayed keeps", minimum=1, guarded=True)
    amax_algorithm: Literal["max", "most_recent"] = key("max", "which of them sets the scale", guarded=True)
    compile: bool = key(True, "use torch.compile")
    use_cuda_graphs: bool = key(False, "capture an iteration and replay it (docs/tuning.md)")
    loss_chunks: int | Literal["auto"] = key(
        AUTO,
        "compute logits and loss in so many parts; auto: as few as fit, by the memory estimate",
        minimum=1,
        maximum=BATCH_MAX,
    )
    activation_checkpointing: Literal["none", "memory_bound", "attention", "selective", "full"] = key(
        "none",
        "what the backward computes again; memory_bound: norms, SwiGLU, q, k; attention: that and attention; "
        "selective: every 2nd block; full: all (docs/tuning.md)",
    )
    use_zero1: bool = key(False, "shard the optimizer state over the processes")
    use_fsdp: bool = key(False, "shard weights, gradients and optimizer state (FSDP2)")
    fsdp_sharding: Literal["full", "hybrid"] = key("full", "shard over all processes, or within a machine")
    reshard_after_forward: bool = key(False, "FSDP frees weights after each forward: less memory, slower")
    reduce_dtype: Literal["float32", "bfloat16"] = key("float32", "dtype of gradients sent between processes")
    use_sparse_specs: bool = key(False, "compute MFU from the 2:4-sparse peak; marks every record")
    peak_tflops: float | str | None = key(None, "dense TFLOPS of a GPU; 'measure': by a matmul; None: table")
    backend: Literal[None, "nccl", "gloo"] = key(None, "process group; None: nccl for cuda, gloo for cpu")
    profile: Literal[None, "time"] = key(
        None, "'time': record the kernels of a few iterations, or operators on a CPU, for tools.profile"
    )
    timeout_minutes: float = key(
        10.0,
        "end the run after so many minutes without progress; 0: never, also not at the start",
        minimum=0,
        maximum=YEAR,
    )
    start_timeout_minutes: float = key(
        60.0, "the same for minutes of compiling, evaluating or saving; 0: never", minimum=0, maximum=YEAR
    )

    def model_config(self) -> ModelConfig:
        """The model's shape. Raises ValueError."""
        fields = [field.name for field in dataclasses.fields(ModelConfig) if field.name != "arch"]
        return model_config(self.arch_preset, **{name: getattr(self, config_key(name)) for name in fields})

    @property
    def micro_batch(self) -> int:
        """batch_size as a number, once 'auto' is resolved."""
        assert self.batch_size != AUTO, self
        return self.batch_size

    @property
    def micro_steps(self) -> int:
        """gradient_accumulation_steps as a number, once 'auto' is resolved."""
        assert self.gradient_accumulation_steps != AUTO, self
        return self.gradient_accumulation_steps

    @property
    def logit_parts(self) -> int:
        """loss_chunks as a number: 'auto' is 1 wherever batch_size has not changed it."""
        return 1 if self.loss_chunks == AUTO else self.loss_chunks

    @property
    def fuses_sums(self) -> bool:
        """Whether FSDP's matmuls add weight gradients to float32 sums, as DDP's and ZeRO-1's do: where FSDP
        would keep such sums itself, so that it takes no memory."""
        return self.use_fsdp and self.micro_steps > 1 and self.reduce_dtype == "float32"

    @property
    def nccl_goes_first(self) -> bool:
        """Whether NCCL's kernels run before others on the GPU: where it gains (LOG.md, 2026-11-24), and where
        torch lets one set it."""
        uses_nccl = self.device == "cuda" and self.backend != "gloo"
        return uses_nccl and self.use_fsdp and self.fsdp_sharding == "full"

    def samples_per_iter(self, world_size: int) -> int:
        """Sequences that one update sees, over all GPUs."""
        return self.micro_batch * self.micro_steps * world_size

    def to_dict(self) -> dict[str, Any]:
        """{key: value}. Redact it before it is shown (training/process/redaction.py)."""
        return dataclasses.asdict(self)


# --- derived from the lines above ---

_HINTS = typing.get_type_hints(TrainConfig)
KEYS = {field.name: read_line(_HINTS[field.name], field) for field in dataclasses.fields(TrainConfig)}

# What a resume may change only if allow_changes names it: which samples an iteration sees, and what an update
# does with them. Errors list them in this order.
_SAMPLES = ("dataset", "seed", "tokens_per_iter")
GUARDED = (*_SAMPLES, *(name for name in KEYS if KEYS[name].guarded and name not in _SAMPLES))
# Tokens of an iteration: their product, with block_size. allow_changes may name those that changed, too.
FACTORS = ("batch_size", "gradient_accumulation_steps", "processes")  # 'processes': how many there are

# Levels of activation_checkpointing that make parts of every block again: ops/recompute.py
RECOMPUTING = ("memory_bound", "attention")
