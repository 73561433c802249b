"""Estimates the memory that a run will need on each GPU, item by item, from its configuration."""

from __future__ import annotations

from model_config import ModelConfig
from training.configuration.keys import TrainConfig
from training.configuration.rules import shards_optimizer
from training.optimization.compile import is_recomputed
from training.process.memory import GIB
from training.process.world import machine_size

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def estimate_memory(
    model: ModelConfig, parameters: int, config: TrainConfig, world_size: int
) -> dict[str, float]:
    """Estimated GiB per GPU by item, at the fullest moment: the end of the last forward, or the backward of a
    block that is recomputed. The allocator's reserve and short-lived temporaries are not included. Assumes a
    fused attention kernel and compiled blocks; without compile, more is needed."""
    shards = world_size
    if config.use_fsdp and config.fsdp_sharding == "hybrid":
        shards = min(machine_size(), world_size)
    stored, adam, compute = (BYTES[name] for name in (config.param_dtype, config.adam_dtype, config.dtype))
    adam_shards = shards if config.use_zero1 or config.use_fsdp else 1  # shards is 1 on one process
    logits = compute * config.micro_batch * config.block_size / config.logit_parts * model.vocab_size
    head = model.vocab_size * model.n_embd
    sizes = {
        f"weights ({config.param_dtype})": stored * parameters / adam_shards,
        f"Adam moments ({config.adam_dtype})": 2 * adam * parameters / adam_shards,
        **_weights_and_gradients(model, parameters, config, shards),
    }
    if config.low_precision != "none":
        with_head = config.low_precision_scope == "layers_and_head"
        sizes["fp8 weights, both layouts"] = 2 * (model.n_layer * _block_weights(model) + with_head * head)
        logits *= 1 + with_head * 2 / compute  # their gradient in fp8, both layouts
    after_forward, in_backward = _activation_bytes(model, config)
    moments: tuple[dict[str, float], ...] = (
        {"activations": after_forward, "logits": logits, "head's gradient (float32)": 4 * head},
        {"activations": in_backward},
    )
    fullest = max(moments, key=lambda moment: sum(moment.values()))
    return {name: size / GIB for name, size in (sizes | fullest).items()}


def _weights_and_gradients(model: ModelConfig, parameters: int, config: TrainConfig, shards: int) -> dict:
    """Bytes of the working weights, if they are not the optimizer's own tensors, and of the gradients."""
    stored, compute = BYTES[config.param_dtype], BYTES[config.dtype]
    if not config.use_fsdp:
        rounded = 0 if config.param_dtype == "float32" else stored / (shards if config.use_zero1 else 1)
        sizes = {"gradient sums (float32)": (4 + rounded) * parameters}  # the sums, and the optimizer's copy
        if shards_optimizer(config, shards) or config.dtype != config.param_dtype:
            sizes[f"working weights ({config.dtype})"] = compute * parameters
        return sizes
    gathered = parameters
    if config.reshard_after_forward:  # two blocks, one of them just being gathered, and what is in no block
        gathered -= max(0, model.n_layer - 2) * _block_weights(model)
    sizes = {
        f"gradients ({config.param_dtype})": stored * parameters / shards,
        f"gathered weights ({config.dtype})": compute * gathered,
        "head's gradient, again": (4 + compute) * model.vocab_size * model.n_embd,  # scaled, and rounded
    }
    if config.micro_steps > 1:
        sizes[f"whole gradients ({config.reduce_dtype})"] = BYTES[config.reduce_dtype] * parameters
    return sizes


def _block_weights(model: ModelConfig) -> int:
    """Elements of one block's matrices."""
    attention = 2 * model.n_embd * (model.attention_width + model.n_kv_head * model.head_dim)
    return attention + (3 if model.ffn_type == "swiglu" else 2) * model.n_embd * model.d_ff


def _activation_bytes(model: ModelConfig, config: TrainConfig) -> tuple[float, float]:
    """Bytes that the forward of all blocks keeps for the backward, and the most that are there during the
    backward. A recomputed block keeps only its two inputs, and has all its activations in its backward."""
    compute, tokens = BYTES[config.dtype], config.micro_batch * config.block_size
    C, A, F = model.n_embd, model.attention_width, model.d_ff
    qkv = A + 2 * model.n_kv_head * model.head_dim
    heads = 2 * qkv if model.position_encoding == "rope" else qkv  # as projected, and as input of attention
    up = 2 * F if model.ffn_type == "swiglu" else F
    inputs = 2 * C + F  # inputs of qkv, up and down; the input of out is the context below
    layer = 2 * C + A + heads + up  # two residuals and the context
    if config.low_precision == "none":
        layer = compute * (layer + inputs)
    else:
        layer = compute * layer + inputs + A  # inputs in fp8, and an fp8 copy of the context
    kept, backward = 0, 0
    for i in range(model.n_layer):
        if is_recomputed(i, config.activation_checkpointing):
            kept += 2 * compute * C  # the stream and what is to be added to it
            backward = max(backward, kept + layer)
        else:
            kept += layer
            backward = max(backward, kept)
    gradients = compute * (2 * C + F)  # of the stream, of what is added, and of the input of down
    return tokens * kept, tokens * (backward + gradients)
