"""The levels memory_bound and attention of activation_checkpointing: they change no bit of a gradient,
compute no more matmuls than they say, and keep as much as the estimate says."""

import pytest
import torch
from support import fake_heads
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from model import manual_attention
from model_builder import build_model, count_flops
from ops.activation import no_delta
from ops.heads import Rotary
from ops.linear import Linear, refresh_weights
from training.configuration.keys import TrainConfig
from training.hardware.attention_kernels import _sdpa_default
from training.memory.activations import kept_by_a_block
from training.memory.sizes import Sizes
from training.optimization.compile import compile_and_checkpoint
from training.optimization.low_precision import use_recipe as use_low_precision
from training.records.utilization import recomputed_flops

LEVELS = ("memory_bound", "attention")
B, T = 2, 32
SIZES = {"n_layer": 2, "n_head": 4, "n_embd": 128, "d_ff": 384, "vocab_size": 128, "block_size": T}
LLAMA = {"arch_preset": "llama", "num_key_value_heads": 2}
MODELS = {
    "gpt2": {"arch_preset": "gpt2"},
    "gpt2 with biases": {"arch_preset": "gpt2", "bias": True},
    "llama": {**LLAMA, "head_dim": 24},  # no power of two: plain heads, as on a GPU
    "llama with biases": {**LLAMA, "qkv_bias": True},
    "gated gelu": {**LLAMA, "head_dim": 24, "activation": "gelu"},
    "qwen3": {"arch_preset": "qwen3", "num_key_value_heads": 2, "head_dim": 32},
}


def configure(kind: str, level: str = "none", **changed) -> TrainConfig:
    keys = {**SIZES, "batch_size": B, "dtype": "bfloat16", "compile": False, **MODELS[kind], **changed}
    return TrainConfig(activation_checkpointing=level, **keys)


def make(config, attend=_sdpa_default, fused=False):
    """fused: with working weights in bf16 and fp32 sums of their gradients, as DDP and ZeRO-1 have them."""
    model = build_model(config.model_config(), attend, torch.bfloat16).init_weights("cpu", seed=0)
    if fused:
        model.to(torch.bfloat16)
        for layer in model.modules():
            if isinstance(layer, Linear):
                layer.weight_grad = torch.zeros(layer.weight.shape)
    if config.low_precision != "none":  # before recompute(), which asks for it
        use_low_precision(model.to(torch.bfloat16), config)
        refresh_weights(model)
    compile_and_checkpoint(model, config)
    return model.train()


def micro_steps(model, count=2):
    """The losses of some micro-steps, and the sums of every gradient."""
    torch.manual_seed(1)
    losses = []
    for i in range(count):
        ids = torch.arange(B * T).view(B, T).mul(7 + i) % 128
        loss = model(ids, ids.roll(1, 1))
        loss.backward()
        losses.append(loss.item())
    sums = {n: m.weight_grad for n, m in model.named_modules() if getattr(m, "weight_grad", None) is not None}
    return losses, {n: p.grad for n, p in model.named_parameters() if p.grad is not None} | sums


def assert_same(got, expected):
    assert got[0] == expected[0]
    assert got[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        assert gradient.abs().max() > 0 and torch.equal(got[1][name], gradient), name


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("kind", MODELS)
def test_losses_and_gradients_are_those_without_recomputation_bit_for_bit(kind, fused):
    assert_levels_same(lambda level: make(configure(kind, level), fused=fused))


@pytest.mark.parametrize("attend", [_sdpa_default, manual_attention])
def test_the_masks_of_dropout_are_drawn_again(attend):
    losses, _ = assert_levels_same(lambda level: make(configure("qwen3", level, dropout=0.2), attend))
    assert losses != micro_steps(make(configure("qwen3"), attend))[0]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("kind", ["qwen3", "gpt2 with biases"])
def test_the_record_counts_the_matmuls_that_each_level_computes_again(kind, fused):
    """In eager code, where torch counts what runs. Compiled blocks keep as much, test below."""

    def flops(level):
        model = make(configure(kind, level), manual_attention, fused)
        ids = torch.zeros(B, T, dtype=torch.long)
        with FlopCounterMode(display=False) as counter:
            model(ids, ids).backward()
        return counter.get_total_flops()

    without = flops("none")
    for level in (*LEVELS, "selective", "full"):
        config = configure(kind, level)
        counted = recomputed_flops(count_flops(config.model_config(), T), config)
        assert flops(level) - without == B * T * counted, level
        assert (counted > 0) == (level != "memory_bound")


@pytest.mark.parametrize("kind", ["qwen3", "gpt2 with biases"])
def test_recomputed_attention_keeps_no_input_of_the_layer_after_it(kind):
    """Also where its weight's gradient is summed in fp32, and nothing is compiled."""
    kept = {}
    for level in ("none", "attention"):
        model, seen = make(configure(kind, level), manual_attention, fused=True), []
        ids = torch.zeros(B, T, dtype=torch.long)
        with saved_tensors_hooks(lambda t, seen=seen: seen.append(t.shape) or t, lambda t: t):
            model(ids, ids)
        width = model.config.attention_width
        kept[level] = sum(shape == (B, T, width) for shape in seen)
    assert kept["attention"] <= kept["none"] - 2  # of two blocks


# --- memory ---


def compiled(kind: str, level: str, **changed):
    """Blocks without graph breaks, divided into forward and backward as on a GPU, with torch's kernels."""
    model = make(configure(kind, level, **changed), fused=True)
    torch._dynamo.reset()
    for block in model.blocks:
        block.compile(fullgraph=True, dynamic=False, backend="aot_eager_decomp_partition")
    return model


def assert_levels_same(make_model):
    """make_model(level): losses and gradients of each level are those without recomputation, bit for bit."""
    expected = micro_steps(make_model("none"))
    for level in LEVELS:
        assert_same(micro_steps(make_model(level)), expected)
    return expected


def assert_kept_as_estimated(kind: str, level: str):
    model = compiled(kind, level)
    x = torch.randn(B, T, 128, dtype=torch.bfloat16).requires_grad_()
    rotary = None if model.positions is not None else Rotary(model.rotary_cos[:T], model.rotary_sin[:T])
    sums = [layer.weight_grad for layer in model.modules() if isinstance(layer, Linear)]
    known = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers(), *sums)}
    kept: dict[int, int] = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        y, (delta, _) = model.blocks[0](x, no_delta(x), rotary)
    config = configure(kind, level, compile=True)
    assert sum(kept.values()) / (B * T) == pytest.approx(kept_by_a_block(Sizes(config, 1), 0), rel=0.03)


@pytest.mark.parametrize("level", ["none", *LEVELS])
@pytest.mark.parametrize("kind", ["gpt2", "llama", "gated gelu", "qwen3"])
def test_a_compiled_block_keeps_what_the_estimate_says(kind, level):
    assert_kept_as_estimated(kind, level)


@pytest.mark.parametrize("kind", ["llama with biases", "qwen3"])
def test_the_kernel_of_the_heads_runs_again_where_that_saves_memory(kind, monkeypatch):
    """As on a GPU: without QK-norm, nothing keeps qkv beside q and k, until attention is made again."""
    fake_heads.use(monkeypatch)
    assert_levels_same(lambda level: make(configure(kind, level), fused=True))
    for level in LEVELS:
        assert_kept_as_estimated(kind, level)


@pytest.mark.parametrize("recipe", ["fp8_tensorwise", "fp8_delayed", "nvfp4"])
def test_layers_in_low_precision_have_the_same_bits(recipe, monkeypatch):
    fake_heads.use(monkeypatch)
    assert_levels_same(lambda level: make(configure("qwen3", level, low_precision=recipe)))


@pytest.mark.parametrize("kind", ["llama with biases", "qwen3"])  # the first block gets zeros to add
def test_compiled_blocks_have_the_same_bits_and_are_compiled_as_one(kind):
    """With RMSNorm: the compiler takes LayerNorm apart, and rounds otherwise than the operation that makes it
    again on a CPU. On a GPU both are one kernel."""
    counters, graphs = torch._dynamo.utils.counters, []

    def model(level):
        graphs.append(counters["stats"]["unique_graphs"])
        made = compiled(kind, level, dropout=0.2)
        counters.clear()
        return made

    assert_levels_same(model)
    assert [*graphs[1:], counters["stats"]["unique_graphs"]] == [1] * 3
