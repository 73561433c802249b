"""Estimates the memory that a run needs on each GPU, item by item, from its configuration.

How it works
    What is there at rest (weights, Adam moments, ...) comes from the strategy and the dtypes. On top of it, a
    few moments of an iteration are candidates for the fullest one, and the fullest counts: the loss, the
    backward of the head, the backward of a block, and the end of the backward. Each term below is a tensor
    that the code named beside it keeps, so a reader can check it by hand. The sum is what
    torch.cuda.max_memory_allocated will say; tests/unit/test_memory_estimate.py has a table of measured runs.
What it assumes
    A GPU, where the Triton kernels of ops/ and a fused attention kernel run: manual attention, whose scores
    grow with the square of block_size, needs more. Blocks are compiled one by one or not at all;
    compile_scope='whole' was not measured.
What comes on top
    needed_memory() adds what a GPU must have free besides: see there.

    C model width · A columns of all query heads · F feed-forward width · V vocabulary
"""

from __future__ import annotations

from dataclasses import dataclass

from model_config import ModelConfig
from ops.quantization import adamw_8bit
from training.configuration.keys import TrainConfig
from training.configuration.rules import captures_cuda_graphs, shards_optimizer
from training.optimization.compile import is_recomputed
from training.process.memory import GIB
from training.process.world import machine_size

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
MOMENT_BYTES = {**BYTES, "8bit": adamw_8bit.BYTES}  # the few that keep fp32 beside 8 bits do not count
# Bytes of an element of a quantized weight: two forms, in fp8 or bf16; nvfp4's two are one
QUANTIZED_WEIGHT = {"fp8_tensorwise": 2, "fp8_delayed": 2, "fp8_blockwise": 2, "mxfp8": 4, "nvfp4": 2}
MIB = 2**20

# cuBLAS has 32 MiB of its own on Hopper and Blackwell (8 MiB on older GPUs) for each thread that calls it:
# the forward runs in the main thread, the backward in autograd's (torch, ATen/cuda/CublasHandlePool.cpp)
WORKSPACES = 2 * 32 * MIB

Moment = dict[str, float]  # item -> bytes


def estimate_memory(
    model: ModelConfig, parameters: int, config: TrainConfig, world_size: int
) -> dict[str, float]:
    """Estimated GiB per GPU by item, at the fullest moment of a training iteration. An evaluation needs less:
    it keeps neither activations nor gradients."""
    sizes = _Sizes.of(model, parameters, config, world_size)
    moments = _sharded_moments(sizes) if config.use_fsdp else _replicated_moments(sizes)
    fullest = max(moments, key=lambda moment: sum(moment.values()))
    workspaces = WORKSPACES if config.device == "cuda" else 0
    items = _at_rest(sizes) | fullest | {"workspaces (cuBLAS)": workspaces}
    return {name: size / GIB for name, size in items.items() if size}


# --- sizes that several items are made of ---


@dataclass(frozen=True)
class _Sizes:
    """The configuration in numbers: bytes, unless the name says otherwise."""

    model: ModelConfig
    config: TrainConfig
    parameters: int  # elements
    block: int  # elements of one block's matrices
    head: int  # elements of the output head's matrix
    rest: int  # elements outside of the blocks: embeddings and head, once if they are tied
    shards: int  # into so many parts FSDP cuts everything; 1: whole
    adam_shards: int  # into so many parts the optimizer's weights and moments are cut
    stored: int  # of an element, in param_dtype
    compute: int  # of an element, in dtype
    reduce: int  # of an element, in reduce_dtype
    processes: int
    tokens: int  # of a micro-step, on this GPU

    @classmethod
    def of(cls, model: ModelConfig, parameters: int, config: TrainConfig, world_size: int) -> _Sizes:
        block = block_weights(model)
        shards = 1
        if config.use_fsdp:
            shards = min(machine_size(), world_size) if config.fsdp_sharding == "hybrid" else world_size
        return cls(
            model=model,
            config=config,
            parameters=parameters,
            block=block,
            head=model.vocab_size * model.n_embd,
            rest=parameters - model.n_layer * block,
            shards=shards,
            adam_shards=world_size if shards_optimizer(config, world_size) else shards,
            stored=BYTES[config.param_dtype],
            compute=BYTES[config.dtype],
            reduce=BYTES[config.reduce_dtype],
            processes=world_size,
            tokens=config.micro_batch * config.block_size,
        )

    @property
    def low_blocks(self) -> range:
        """The blocks in low precision."""
        if self.config.low_precision == "none":
            return range(0)
        return range(
            self.config.low_precision_skip_first, self.model.n_layer - self.config.low_precision_skip_last
        )

    @property
    def low_head(self) -> bool:
        return self.config.low_precision != "none" and self.config.low_precision_scope == "layers_and_head"

    @property
    def emulated(self) -> bool:
        """Whether operands in low precision are bf16 (ops/emulation.py), not fp8. fp8_blockwise is taken for
        native, as on Hopper."""
        return self.config.low_precision in ("mxfp8", "nvfp4")


def block_weights(model: ModelConfig) -> int:
    """Elements of one block's matrices: qkv, out, up (gate and up, if gated) and down."""
    attention = 2 * model.n_embd * (model.attention_width + model.n_kv_head * model.head_dim)
    return attention + (3 if model.ffn_type == "swiglu" else 2) * model.n_embd * model.d_ff


# --- at rest ---


def _at_rest(s: _Sizes) -> Moment:
    """What is there between two iterations, but for gradients and working weights, which are moments' own."""
    own = s.parameters / s.adam_shards
    items = {
        f"weights ({s.config.param_dtype})": s.stored * own,
        f"Adam moments ({s.config.adam_dtype})": 2 * MOMENT_BYTES[s.config.adam_dtype] * own,
    }
    if s.config.low_precision != "none":
        elements = len(s.low_blocks) * s.block + s.low_head * s.head
        items[f"quantized weights ({s.config.low_precision})"] = (
            QUANTIZED_WEIGHT[s.config.low_precision] * elements
        )
    return items


# --- one process, DDP and ZeRO-1 (training/strategies/replicated.py) ---


def _replicated_moments(s: _Sizes) -> list[Moment]:
    """The buckets live as long as the run."""
    config = s.config
    # the optimizer's copy of the sums, in its own dtype; in the sums' dtype it is the sums themselves
    summed = config.gradient_dtype
    rounded = 0 if summed == config.param_dtype else s.stored * s.parameters / s.adam_shards
    items = {f"gradient sums ({summed})": BYTES[summed] * s.parameters + rounded}
    if shards_optimizer(config, s.processes) or config.dtype != config.param_dtype:
        items[f"working weights ({config.dtype})"] = s.compute * s.parameters
    # in another dtype, gradients are copied to be sent; copies are kept until the end of the backward
    sent = s.reduce if s.processes > 1 and config.reduce_dtype != summed else 0
    # in float16 and of emulated operands, the head's gradient is first summed by itself
    # (ops/cross_entropy.py)
    by_itself = config.dtype == "float16" or (s.low_head and s.emulated)
    head_sum = {"head's gradient (float32)": 4 * s.head} if by_itself else {}
    moments = [
        {**_loss_moment(s), **head_sum},
        {**_head_backward(s), **head_sum},
        {**_block_backward(s), "gradients being sent": sent * (s.head + s.block)},
        {"activations": 0.0, "gradients being sent": sent * s.parameters},
    ]
    return [items | moment for moment in moments]


# --- FSDP (training/strategies/fsdp.py) ---


def _sharded_moments(s: _Sizes) -> list[Moment]:
    """Gradients of all but the last micro-step are summed whole, in reduce_dtype. The last backward reduces
    them to this rank's part: head, blocks, embeddings (with a tied head). Fused sums are always there."""
    config, tied = s.config, s.model.weight_tying
    several, fused = config.micro_steps > 1, config.gradient_accumulation_fusion
    gathered = f"gathered weights ({config.dtype})"
    whole = f"whole gradients ({'float32' if fused else config.reduce_dtype})"
    # After an all-gather, its buffer is kept until the next one. If weights stay gathered, there is none in
    # the second micro-step, which is fuller than the first
    buffer = 0 if several and not config.reshard_after_forward else s.compute * s.block
    resident = s.rest if config.reshard_after_forward else s.parameters
    sums, written = (4 * s.parameters, 0) if fused else (several * s.reduce * s.parameters, s.compute)
    in_forward = {gathered: s.compute * resident + buffer, whole: sums}
    # a block, and the block before it, which is gathered ahead
    in_backward = {gathered: s.compute * (resident + 2 * s.block * config.reshard_after_forward) + buffer}
    own, twice = 0 if fused else s.head, "head's gradient (float32), twice, and rounded"  # scaled, rounded
    # autograd's, and the copy that is reduced: the head's, until the first block's. Tied, it waits
    copied = s.reduce * (s.block if tied else max(s.head, s.block))
    block = sums + written * (s.block + s.head * tied) + copied
    last = s.rest if tied else s.rest - s.head
    summed = sums if fused else (max(s.reduce, s.compute) if several else s.compute) * last
    part = {f"gradients ({config.param_dtype})": s.stored * s.parameters / s.shards}
    moments = [
        {**in_forward, **_loss_moment(s), "head's gradient (float32)": 4 * own},
        {**in_forward, **_head_backward(s, 3 * s.compute), twice: (8 + s.compute) * own},
        {**in_backward, **_block_backward(s), whole: block},
        {"activations": 0.0, whole: summed + s.reduce * last, **part},  # the weights are freed before it
    ]
    if config.low_precision != "none" and not config.overlap_param_gather:  # publish() gathers into buffers
        again = {gathered: s.compute * (s.parameters + last), whole: sums * fused, "activations": 0.0}
        moments.append(again | part)
    return moments


# --- activations ---


def _loss_moment(s: _Sizes) -> Moment:
    """The fullest moment of the forward: the head has the logits of one part of the tokens, and all blocks
    keep their activations (ops/cross_entropy.py)."""
    C, chunks = s.model.n_embd, s.config.logit_parts
    part = s.tokens / chunks
    held = 3 + is_recomputed(s.model.n_layer - 1, s.config.activation_checkpointing)
    # x + delta, its norm, delta, and x, if the last block does not keep it anyway
    beside: float = s.tokens * s.compute * C * held
    logits, dx = part * s.compute * s.model.vocab_size, part * s.compute * C
    kept = {"activations": s.tokens * sum(_kept_by_blocks(s))}
    if not s.low_head:  # the logits are their own gradient by then, and dx is being computed from them
        scaled = 0 if s.config.use_fsdp or s.config.dtype == "float16" else dx  # the input for the sum
        return {**kept, "logits": logits, "head's inputs": beside + chunks * dx + scaled}
    operand = 2 * (s.compute if s.emulated else 1)  # bytes of an element in both forms
    beside += part * operand * C  # the part's input
    # their gradient, quantized, while they are there. The matmul adds to the head's sum; where it cannot
    # (ops/cublaslt.py), a product as large as the head comes after them, which is not counted here
    quantized = part * operand * s.model.vocab_size
    return {**kept, "logits": logits + quantized, "head's inputs": beside + (chunks - 1) * dx}


def _head_backward(s: _Sizes, wide: int = 8) -> Moment:
    """The head's backward scales dx in float32: dx, what it is scaled to (8 bytes) and x + delta."""
    inputs = s.tokens * s.model.n_embd * (2 * s.compute + wide)
    return {"activations": s.tokens * sum(_kept_by_blocks(s)), "head's inputs": inputs}


def _block_backward(s: _Sizes) -> Moment:
    """The backward of the block at which activations are the most: of the last one, or of one that has to be
    recomputed first."""
    kept, most = _kept_by_blocks(s), 0.0
    for i in range(s.model.n_layer):
        in_block = _kept_by_a_block(s, i)
        recomputed = 0.0
        if is_recomputed(i, s.config.activation_checkpointing):
            # a compiled block's backward takes all that was recomputed at once, which frees the inputs
            recomputed = in_block - (kept[i] if s.config.compile else 0)
        most = max(most, sum(kept[: i + 1]) + recomputed + _gradients_in_a_block(s, i))
    return {"activations": s.tokens * most}


def _kept_by_blocks(s: _Sizes) -> list[float]:
    """Bytes per token that each block's forward keeps for its backward. A recomputed block keeps its inputs,
    the stream and what is to be added to it; a block before it that is not recomputed keeps the stream."""
    level, C = s.config.activation_checkpointing, s.model.n_embd
    kept: list[float] = []
    for i in range(s.model.n_layer):
        if is_recomputed(i, level):
            shared = i > 0 and not is_recomputed(i - 1, level)
            kept.append(s.compute * C * (1 if shared else 2))
        else:
            kept.append(_kept_by_a_block(s, i))
    kept[0] += s.model.n_embd * (s.config.dropout > 0)  # the mask of the embedding's dropout
    return kept


def _kept_by_a_block(s: _Sizes, i: int) -> float:
    """Bytes per token that the forward of block i keeps for its backward (model.py, Block)."""
    model, config, compute, low = s.model, s.config, s.compute, i in s.low_blocks
    # inputs of matmuls: as they are; or in the form for the backward alone (ops/low_precision.py)
    operand = 1 if low and not s.emulated else compute
    C, A, F = model.n_embd, model.attention_width, model.d_ff
    qkv = A + 2 * model.n_kv_head * model.head_dim
    gated = model.ffn_type == "swiglu"
    size = 2 * compute * C  # the two residual sums, which the norms' backward needs
    size += 2 * operand * C  # the inputs of qkv and up
    size += compute * (qkv + _columns_of_rotated_copies(model))
    size += compute * A + 4 * model.n_head  # attention's output, and its log-sum-exp in float32
    size += operand * A if low else 0  # the input of out, if it is not that output
    size += compute * F * (2 if gated else 1) + operand * F  # the output of up, and the input of down
    if gated and model.activation != "silu" and not config.compile:
        size += compute * F  # the activated gate: ops/swiglu.py recomputes it, and so does compiled code
    if model.normalization == "layernorm":
        size += 2 * 2 * 4  # mean and deviation in float32, of two norms
    return size + 2 * C * (config.dropout > 0)  # two masks of one byte


def _columns_of_rotated_copies(model: ModelConfig) -> int:
    """Columns of q and k if they are kept beside the qkv that they were computed from, of which v is a part.

    Without norms, the backward of ops/heads.py's kernel needs nothing that was computed before, so qkv is
    freed. That kernel is for head widths that are a power of two.
    """
    D = model.head_dim
    if model.position_encoding != "rope" or (not model.qk_norm and D & (D - 1) == 0):
        return 0
    return model.attention_width + model.n_kv_head * D


def _gradients_in_a_block(s: _Sizes, i: int) -> float:
    """Bytes per token that the backward of the feed-forward layer, the fullest of a block, adds to what block
    i has kept: the gradient of its output, of the input of down, and of the output of up."""
    model, compute = s.model, s.compute
    F = model.d_ff
    up = F * (2 if model.ffn_type == "swiglu" else 1)
    gradients = compute * (model.n_embd + F + up)
    if i not in s.low_blocks:
        return gradients - compute * F  # the input of down is no longer needed
    if s.emulated:  # the gradient of up's output, and its two forms
        return compute * (model.n_embd + 3 * up)
    if not s.config.compile and model.ffn_type == "swiglu":
        # one function (LowPrecisionSwiGLU): at its end, the gradients of its output, of h, of up's output (in
        # fp8, both layouts) and of its input are there
        return compute * (2 * model.n_embd + F) + 2 * up
    return gradients - F


# --- what a GPU must have free ---

# Most that the allocator held above the peak in the measured runs of one process, DDP and ZeRO-1, with
# expandable segments (0.68 GiB, fp8 with loss_chunks=4)
RESERVE = 0.7 * GIB
# Not the allocator's: CUDA's context with the kernels of torch, cuBLAS, cuDNN and Triton (0.82 GiB on an H200
# with torch 2.11), and NCCL's buffers (544 MiB for two GPUs, 688 for more: nccl issue 964).
# `python -m tools.profile CONFIG --memory` shows what they are on a machine.
CONTEXT, NCCL = 0.9 * GIB, 0.7 * GIB


def needed_memory(model: ModelConfig, parameters: int, config: TrainConfig, world_size: int) -> float:
    """GiB that a GPU must have free for this run: the estimate, what the allocator holds beyond it, and what
    is not the allocator's. A limit by set_per_process_memory_fraction holds for the first two only."""
    context = CONTEXT + (NCCL if world_size > 1 else 0)
    return reserved_memory(model, parameters, config, world_size) + context / GIB


def reserved_memory(model: ModelConfig, parameters: int, config: TrainConfig, world_size: int) -> float:
    """GiB that the allocator will hold: the estimate, and what it holds beyond that because a free piece has
    the wrong size or belongs to another stream."""
    s = _Sizes.of(model, parameters, config, world_size)
    reserve = RESERVE
    if config.activation_checkpointing != "none":  # freed activations of other sizes are in the way
        widest = model.d_ff * (2 if model.ffn_type == "swiglu" else 1)
        reserve = max(reserve, s.tokens * s.compute * widest)
    if config.use_fsdp:  # reduced gradients and gathered weights are allocated on streams of their own
        reserve += s.stored * s.parameters / s.shards + s.compute * (s.rest + 2 * s.block)
        if s.reduce != s.stored:  # a gradient's part arrives in reduce_dtype first
            reserve += s.reduce * s.rest / s.shards
    if captures_cuda_graphs(config, world_size):  # an evaluation cannot use the memory of the capture
        reserve += s.tokens / config.logit_parts * s.compute * model.vocab_size
    return sum(estimate_memory(model, parameters, config, world_size).values()) + reserve / GIB
