"""Estimates the memory that a run needs on each GPU, item by item, from its configuration.

How it works
    What is there at rest comes from the strategy, the optimizer and the dtypes. On top of it, a
    few moments of an iteration are candidates for the fullest one, and the fullest counts: the loss, the
    backward of the head, the backward of a block, and the end of the backward. Each term here and in
    activations.py is a tensor that the code named beside it keeps, so a reader can check it by hand.
    The sum is what torch.cuda.max_memory_allocated will say; tests/unit/test_memory_estimate.py has a table
    of measured runs.
What it assumes
    A GPU, where the Triton kernels of ops/ and a fused attention kernel run: manual attention, whose scores
    grow with the square of block_size, needs more. Blocks are compiled one by one or not at all.
What comes on top
    needed_memory() adds what a GPU must have free besides: see there.
"""

from __future__ import annotations

from training.configuration.keys import TrainConfig
from training.configuration.rules import captures_cuda_graphs, shards_optimizer
from training.memory.activations import block_backward, head_backward, loss_moment
from training.memory.sizes import BYTES, Moment, Sizes
from training.optimization.optimizer import kept_bytes, optimizer_class
from training.process.memory import GIB

MIB = 2**20

# cuBLAS has 32 MiB of its own on Hopper and Blackwell (8 MiB on older GPUs) for each thread that calls it:
# the forward runs in the main thread, the backward in autograd's (torch, ATen/cuda/CublasHandlePool.cpp)
WORKSPACES = 2 * 32 * MIB


def estimate_memory(config: TrainConfig, world_size: int, native: bool = False) -> dict[str, float]:
    """Estimated GiB per GPU by item, at the fullest moment of a training iteration. An evaluation needs less:
    it keeps neither activations nor gradients. native: the check of a recipe at the start has passed. Before
    it nobody knows, and emulated operands need more."""
    sizes = Sizes(config, world_size, native)
    moments = _sharded_moments(sizes) if config.use_fsdp else _replicated_moments(sizes)
    updating = optimizer_class(config).update_bytes(config, sizes.optimizer_shards)
    moments.append(moments[-1] | updating)  # at the end of the backward
    fullest = max(moments, key=lambda moment: sum(moment.values()))
    workspaces = WORKSPACES if config.device == "cuda" else 0
    items = _at_rest(sizes) | fullest | {"workspaces (cuBLAS)": workspaces}
    return {name: size / GIB for name, size in items.items() if size}


def host_memory(config: TrainConfig, world_size: int) -> float:
    """Bytes of host memory that the training takes in this process: on a CPU, all that is estimated."""
    return GIB * sum(estimate_memory(config, world_size).values()) if config.device == "cpu" else 0.0


# --- at rest ---


def _at_rest(s: Sizes) -> Moment:
    """What is there between two iterations, but for gradients and working weights, which are moments' own."""
    recipe, shards = s.config.low_precision, s.optimizer_shards
    return {
        f"weights ({s.config.param_dtype})": s.stored * s.parameters / shards,
        **{item: size / shards for item, size in kept_bytes(s.config).items()},
        f"quantized weights ({recipe})": s.low.weight * len(s.low_blocks) * s.block
        + s.in_head.weight * s.low_head * s.head,
    }


# --- one process, DDP and ZeRO-1 (training/strategies/replicated.py) ---


def _replicated_moments(s: Sizes) -> list[Moment]:
    """The buckets live as long as the run."""
    config = s.config
    summed = config.gradient_dtype
    items = {f"gradient sums ({summed})": BYTES[summed] * s.parameters}
    if shards_optimizer(config, s.processes) or config.dtype != config.param_dtype:
        items[f"working weights ({config.dtype})"] = s.compute * s.parameters
    # in another dtype, gradients are copied to be sent; the copies are kept until the update
    arrives = config.reduce_dtype if s.processes > 1 else summed
    sent = 0 if arrives == summed else s.reduce
    # bf16 weights want bf16 gradients, which are then the update's alone
    rounds = config.param_dtype == "bfloat16" and arrives != "bfloat16"
    rounded = {"gradients (bfloat16)": rounds * s.stored * s.parameters / s.optimizer_shards}
    # in float16 and of emulated operands, the head's gradient is first summed by itself
    # (ops/cross_entropy.py)
    by_itself = config.dtype == "float16" or (s.low_head and not s.in_head.is_float8)
    head_sum = {"head's gradient (float32)": 4 * s.head} if by_itself else {}
    moments = [
        {**loss_moment(s), **head_sum},
        {**head_backward(s), **head_sum},
        {**block_backward(s), "gradients being sent": sent * (s.head + s.block)},
        {"activations": 0.0, "gradients being sent": sent * s.parameters, **rounded},
    ]
    return [items | moment for moment in moments]


# --- FSDP (training/strategies/fsdp.py) ---


def _sharded_moments(s: Sizes) -> list[Moment]:
    """Gradients of all but the last micro-step are summed whole, in reduce_dtype. The last backward reduces
    them to this rank's part: head, blocks, embeddings (with a tied head). Fused sums are always there."""
    config, tied = s.config, s.model.weight_tying
    several, fused = config.micro_steps > 1, config.fuses_sums
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
        {**in_forward, **loss_moment(s), "head's gradient (float32)": 4 * own},
        {**in_forward, **head_backward(s, 3 * s.compute), twice: (8 + s.compute) * own},
        {**in_backward, **block_backward(s), whole: block},
        {"activations": 0.0, whole: summed + s.reduce * last, **part},  # the weights are freed before it
    ]
    if s.quantizes:  # publish() gathers into buffers
        again = {gathered: s.compute * (s.parameters + last), whole: sums * fused, "activations": 0.0}
        moments.append(again | part)
    return moments


# --- what a GPU must have free ---

# Most that the allocator held above the peak in the measured runs of one process, DDP and ZeRO-1, with
# expandable segments (0.68 GiB, fp8 with loss_chunks=4)
RESERVE = 0.7 * GIB
# Not the allocator's: CUDA's context with the kernels of torch, cuBLAS, cuDNN and Triton (0.82 GiB on an H200
# with torch 2.11), and NCCL's buffers (544 MiB for two GPUs, 688 for more: nccl issue 964).
CONTEXT, NCCL = 0.9 * GIB, 0.7 * GIB


def needed_memory(config: TrainConfig, world_size: int) -> float:
    """GiB that a GPU must have free for this run: the estimate, what the allocator holds beyond it, and what
    is not the allocator's. A limit by set_per_process_memory_fraction holds for the first two only."""
    context = CONTEXT + (NCCL if world_size > 1 else 0)
    return reserved_memory(config, world_size) + context / GIB


def reserved_memory(config: TrainConfig, world_size: int) -> float:
    """GiB that the allocator will hold: the estimate, and what it holds beyond that because a free piece has
    the wrong size or belongs to another stream."""
    s, reserve = Sizes(config, world_size), RESERVE
    # what FSDP gathers for an evaluation or to quantize weights: publish() does it into buffers
    gathered = s.compute * (s.rest + 2 * s.block)
    whole = s.compute * s.parameters * (1 + s.quantizes)
    if config.activation_checkpointing != "none":  # freed activations of other sizes are in the way
        reserve = max(reserve, s.tokens * s.compute * s.up)
    if config.use_fsdp:  # reduced gradients and gathered weights are allocated on streams of their own
        reserve += s.stored * s.parameters / s.shards + gathered
        # a gradient's part arrives in reduce_dtype first
        reserve += (s.reduce != s.stored) * s.reduce * s.rest / s.shards
    if captures_cuda_graphs(config):  # an evaluation cannot use the memory of the capture
        reserve += s.tokens / config.logit_parts * s.compute * s.model.vocab_size
        if config.use_fsdp:
            few = config.reshard_after_forward and not s.quantizes
            reserve += gathered if few else whole
    return sum(estimate_memory(config, world_size).values()) + reserve / GIB
