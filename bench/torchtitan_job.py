"""Our configuration as torchtitan's: the JobConfig of a run, and its model's arguments for our shape.

torchtitan 0.2.2 has Qwen3, with a feed-forward of any width, tied or not, and LLaMA 3, whose heads share the
width equally and whose output head is never tied. Its LLaMA multiplies 8/3 of the width by a factor and
rounds the result up to a multiple; llama_factor() gives the factor that makes our width, with the multiple 1.
"""

from __future__ import annotations

from typing import Any

from model_config import ModelConfig
from training.configuration.keys import TrainConfig
from training.optimization.schedule import warmup_and_decay_iters

NAME, FLAVOR = "nanomfu", "ours"  # under which its trainer finds the model
FLOAT8 = "quantize.linear.float8"  # torchao's linear layers, scaled by tensor
HEAD = "output"  # what its documentation of float8 leaves in bfloat16
RECOMPUTATION = {"none": "none", "full": "full"}  # every other level of ours: each second block
DECAYS = {"1-sqrt": "sqrt"}  # where its name is another one


def make_job(job: Any, config: TrainConfig, world_size: int) -> Any:
    """`job`, a JobConfig with torchtitan's defaults, with our batch, optimizer and schedule, and with the
    settings that are fastest: torch.compile of each block and of the loss, fused AdamW, nothing recomputed,
    and in FSDP weights that stay gathered after the forward, unless ours ask for less memory."""
    job.job.dump_folder = config.out_dir
    job.metrics.log_freq = config.log_interval
    job.metrics.disable_color_printing = True
    job.model.name, job.model.flavor = NAME, FLAVOR
    job.debug.seed = config.seed
    # --- batch ---
    job.training.local_batch_size = config.micro_batch
    job.training.global_batch_size = config.samples_per_iter(world_size)
    job.training.seq_len = config.block_size
    job.training.steps = config.max_iters
    # --- optimizer ---
    job.training.max_norm = config.grad_clip or float("inf")  # it always clips
    job.optimizer.name, job.optimizer.implementation = "AdamW", "fused"
    job.optimizer.lr, job.optimizer.weight_decay = config.learning_rate, config.weight_decay
    job.optimizer.beta1, job.optimizer.beta2 = config.beta1, config.beta2
    set_schedule(job.lr_scheduler, config)
    # --- system ---
    job.training.mixed_precision_param = config.dtype
    job.compile.enable = config.compile
    job.activation_checkpoint.mode = RECOMPUTATION.get(config.activation_checkpointing, "selective")
    job.parallelism.data_parallel_shard_degree = -1  # FSDP over all processes; one process has none
    job.parallelism.fsdp_reshard_after_forward = "always" if config.reshard_after_forward else "never"
    if config.low_precision == "fp8_tensorwise":
        job.model.converters = [FLOAT8]
        float8 = job.quantize.linear.float8
        float8.filter_fqns = [HEAD]
        float8.enable_fsdp_float8_all_gather = world_size > 1
        float8.precompute_float8_dynamic_scale_for_fsdp = world_size > 1
    return job


def set_schedule(scheduler: Any, config: TrainConfig) -> None:
    """Our schedule; a stable part before the decay is a decay_ratio below 1 in theirs."""
    warmup, end = warmup_and_decay_iters(config)
    scheduler.warmup_steps = warmup
    scheduler.total_steps = max(end, config.max_iters)  # theirs has no rate beyond it
    scheduler.min_lr_factor = config.min_lr / config.learning_rate if config.learning_rate else 0.0
    decay = config.lr_schedule
    if decay == "constant":
        scheduler.decay_ratio = 0.0
    elif decay == "wsd":
        scheduler.decay_ratio = config.wsd_decay_fraction
        scheduler.decay_type = DECAYS.get(config.wsd_decay_shape, config.wsd_decay_shape)
    else:
        scheduler.decay_type = decay


def qwen3_arguments(model: ModelConfig) -> dict[str, Any]:
    """For its Qwen3ModelArgs."""
    return {
        **_common(model),
        "head_dim": model.head_dim,
        "hidden_dim": model.d_ff,
        "qk_norm": True,
        "enable_weight_tying": model.weight_tying,
    }


def llama_arguments(model: ModelConfig) -> dict[str, Any]:
    """For its LLaMA's TransformerModelArgs; rope_scaling_args are scaling_arguments()."""
    factor = llama_factor(model.n_embd, model.d_ff)
    return {**_common(model), "multiple_of": 1, "ffn_dim_multiplier": factor}


def scaling_arguments(model: ModelConfig) -> dict[str, Any]:
    """For its RoPEScalingArgs. It always scales: by 1 where ours does not."""
    if model.rope_scaling is None:
        return {"scaling_factor": 1.0}
    fields = model.rope_scaling.to_dict()
    names = ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    return {"scaling_factor": fields["factor"], **{name: fields[name] for name in names}}


def llama_factor(n_embd: int, d_ff: int) -> float:
    """The ffn_dim_multiplier m with int(m x int(8 x n_embd / 3)) = d_ff. The half keeps the product away from
    whole numbers, at which a rounding error would change the result."""
    return (d_ff + 0.5) / int(2 * (4 * n_embd) / 3)


def _common(model: ModelConfig) -> dict[str, Any]:
    return {
        "dim": model.n_embd,
        "n_layers": model.n_layer,
        "n_heads": model.n_head,
        "n_kv_heads": model.n_kv_head,
        "vocab_size": model.vocab_size,
        "norm_eps": model.norm_eps,
        "rope_theta": model.rope_theta,
        "max_seq_len": model.block_size,
    }
