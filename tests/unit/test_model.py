"""The model computes what Hugging Face's GPT-2, LLaMA, Qwen2 and Qwen3 compute, and starts the same
everywhere."""

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from support.hf_models import gather

from bench.peers.hugging_face import build
from model_builder import build_model
from model_config import CHOICES, PRESETS, ModelConfig, model_config
from ops.activation import Activation
from training.pretrained.names import pieces

VOCAB, T, BATCH = 97, 32, 2
SMALL = dict(n_layer=2, n_head=4, n_embd=64, d_ff=96, vocab_size=VOCAB, block_size=T)


def make(preset="llama", seed=0, dtype=torch.float32, **overrides):
    config = model_config(preset, **{**SMALL, **overrides})
    return build_model(config, dtype=dtype).init_weights("cpu", seed)


def randomize(model, seed=1):
    """Every parameter away from its trivial value: norms not 1, biases not 0, logits of order 1."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            norm = p.ndim == 1 and name.endswith("weight")
            p.copy_(float(norm) + (0.3 if p.ndim == 1 else 0.15) * torch.randn(p.shape, generator=generator))
    return model


def batch(seed=2):
    """ids (B, T), and the targets of next-token prediction, of which the last is left out (-100)."""
    ids = torch.randint(VOCAB, (BATCH, T), generator=torch.Generator().manual_seed(seed))
    targets = torch.full_like(ids, -100)
    targets[:, :-1] = ids[:, 1:]
    return ids, targets


def relative_error(ours, theirs):
    return ((ours - theirs).norm() / theirs.norm()).item()


# --- against Hugging Face transformers ---


def hf_model(config):
    """Hugging Face's model of the same shape with random weights: fp32, no dropout."""
    transformers = pytest.importorskip("transformers", reason="needs transformers, the reference")
    biased = config.bias or config.arch == "gpt2"  # published GPT-2s have biases, without which theirs are 0
    theirs = build(transformers, dataclasses.replace(config, bias=biased))
    randomize(theirs)
    if not (config.bias or config.qkv_bias):
        with torch.no_grad():
            for name, p in theirs.named_parameters():
                if name.endswith("bias"):
                    p.zero_()
    return theirs.eval()


PARITY = {
    f"{preset} {'GQA' if kv else 'MHA'} {'tied' if tied else 'untied'} {'bias' if bias else 'no-bias'}": (
        preset,
        dict(n_kv_head=kv, weight_tying=tied, bias=bias),
    )
    for preset, kv_heads, biases in (
        ("gpt2", (None,), (True, False)),
        ("llama", (None, 2), (True, False)),
        ("llama3", (2, 1), (False,)),
        ("qwen2", (None, 2), (False,)),
        ("qwen3", (None, 2), (False,)),  # Qwen3 has no bias in its MLP, so ours cannot be mapped to it
    )
    for kv in kv_heads
    for tied in (True, False)
    for bias in biases
}
LLAMA_3_1 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
LLAMA_3_1["original_max_position_embeddings"] = 16
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=16)
SCALINGS = {
    "linear": dict(rope_type="linear", factor=2.0),
    "llama3": LLAMA_3_1,
    "yarn": YARN,
    "yarn, attention_factor": {**YARN, "attention_factor": 1.5, "beta_fast": 4.0, "beta_slow": 0.5},
}
for _tied in (True, False):
    _label = "tied" if _tied else "untied"
    for _name, _scaling in SCALINGS.items():
        PARITY[f"llama3 {_name} {_label}"] = "llama3", dict(rope_scaling=_scaling, weight_tying=_tied)
    for _width in (24, 8):
        for _preset in ("llama", "qwen2", "qwen3"):
            _options = dict(head_dim=_width, n_kv_head=2, weight_tying=_tied)
            PARITY[f"{_preset} head_dim={_width} {_label}"] = _preset, _options
    for _preset in ("qwen2", "qwen3"):
        _options = dict(head_dim=24, n_kv_head=2, rope_scaling=YARN, weight_tying=_tied)
        PARITY[f"{_preset} head_dim=24 yarn {_label}"] = _preset, _options


@pytest.mark.parametrize("case", PARITY)
def test_logits_loss_and_every_gradient_equal_hugging_face(case):
    preset, options = PARITY[case]
    ours = make(preset, norm_eps=1e-2, **options)  # large enough to be seen
    theirs = hf_model(ours.config)
    table = pieces(ours.config)
    named = dict(theirs.named_parameters())
    assert {piece.name for piece in table} == named.keys()
    weights = gather(table, named)
    assert weights.keys() == dict(ours.named_parameters()).keys()
    with torch.no_grad():
        for name, p in ours.named_parameters():
            assert p.shape == weights[name].shape, name
            p.copy_(weights[name])

    ids, targets = batch()
    expected = theirs(input_ids=ids, labels=ids)  # shifts the labels itself
    logits, loss = ours(ids), ours(ids, targets)
    if "rope_scaling" in options:  # the comparison is not one of short sequences that nothing changes
        plain = make(preset, norm_eps=1e-2, **{**options, "rope_scaling": None})
        plain.load_state_dict(ours.state_dict())
        assert (plain(ids) - logits).abs().max() > 1e-2
    assert expected.logits.std() > 0.5  # the comparison is not one of zeros
    assert (logits - expected.logits).abs().max() <= 1e-4
    assert loss.item() == pytest.approx(expected.loss.item(), rel=1e-4)

    loss.backward()
    expected.loss.backward()
    gradients = gather(table, {name: p.grad for name, p in named.items()})
    for name, p in ours.named_parameters():
        assert relative_error(p.grad, gradients[name]) <= 1e-4, name


@pytest.mark.parametrize("activation", ["gelu", "silu"])
def test_rows_of_gate_and_up_take_turns_in_a_gated_feed_forward(activation):
    ffn = randomize(make("llama", activation=activation, bias=True)).blocks[0].ffn
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(5))
    gate, up = (F.linear(x, ffn.up.weight[i::2], ffn.up.bias[i::2]) for i in (0, 1))
    act = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
    torch.testing.assert_close(ffn(Activation(x))[0], ffn.down(act * up), rtol=1e-5, atol=1e-5)


# --- sizes; how many parameters the full configs have, is in tests/docs/test_numbers.py ---


def test_presets_have_the_published_constants():
    configs = {name: model_config(name) for name in PRESETS}
    facts = {name: (c.norm_eps, c.qk_norm, c.qkv_bias) for name, c in configs.items()}
    qwen3 = facts.pop("qwen3"), facts.pop("qwen2")
    assert qwen3 == ((1e-6, True, False), (1e-6, False, True))
    assert set(facts.values()) == {(1e-5, False, False)}
    thetas = {name: c.rope_theta for name, c in configs.items() if c.position_encoding == "rope"}
    assert thetas == {"llama": 1e4, "llama3": 5e5, "qwen2": 1e6, "qwen3": 1e6}


def test_learned_positions_alone_are_left_out_of_the_palm_formulas_n():
    for preset, left_out in (("gpt2", T * SMALL["n_embd"]), ("llama", 0)):
        counts = make(preset).count_parameters()
        assert counts["total"] - counts["non_embedding"] == left_out
        assert counts["trainable"] == counts["total"]


# --- initial weights ---


def weights(**kwargs):
    return {name: p.detach() for name, p in make(**kwargs).named_parameters()}


def differing(a, b):
    return sorted(name for name in a.keys() & b.keys() if not torch.equal(a[name], b[name]))


def test_initial_weights_are_a_function_of_the_seed_and_the_name_alone():
    torch.manual_seed(0)
    first = weights(seed=7)
    state = torch.get_rng_state()
    torch.manual_seed(1)
    assert differing(first, weights(seed=7)) == []
    torch.manual_seed(0)
    assert torch.equal(torch.get_rng_state(), state)  # building drew nothing from the global generator
    matrices = sorted(name for name, p in first.items() if p.ndim == 2)
    assert differing(first, weights(seed=8)) == matrices
    same_shape = [first[f"blocks.{i}.attn.qkv.weight"] for i in (0, 1)]
    assert not torch.equal(*same_shape)  # names differ


@pytest.mark.parametrize("preset", PRESETS)
def test_tying_changes_no_other_tensor(preset):
    tied, untied = weights(preset=preset, weight_tying=True), weights(preset=preset, weight_tying=False)
    assert untied.keys() - tied.keys() == {"head.lm_head.weight"}
    assert tied.keys() <= untied.keys()
    assert differing(tied, untied) == []


@pytest.mark.parametrize("head_dim", [None, 48])
@pytest.mark.parametrize("preset", PRESETS)
def test_initial_standard_deviations_norms_and_biases(preset, head_dim):
    sizes = dict(n_layer=3, n_embd=128, d_ff=352, vocab_size=500, head_dim=head_dim)
    model = make(preset, bias=preset != "qwen2", **sizes)
    assert any(name.endswith("bias") for name, _ in model.named_parameters())
    for name, p in model.named_parameters():
        if p.ndim == 1:
            assert torch.all(p == (0.0 if name.endswith("bias") else 1.0)), name
            continue
        residual = name.endswith(("attn.out.weight", "ffn.down.weight"))
        expected = 0.02 / math.sqrt(2 * 3) if residual else 0.02
        assert p.std().item() == pytest.approx(expected, rel=0.05), name  # 4096 draws at least: 1.1 % sigma
        assert abs(p.mean().item()) < 4 * expected / math.sqrt(p.numel()), name


def test_the_first_loss_is_that_of_a_uniform_guess_and_a_sequence_may_be_shorter_but_not_longer():
    for preset in PRESETS:
        model = make(preset)
        assert model(*batch()).item() == pytest.approx(math.log(VOCAB), rel=0.02)
        assert model(torch.zeros(1, T - 5, dtype=torch.long)).shape == (1, T - 5, VOCAB)
        with pytest.raises(ValueError, match=f"{T + 1} tokens.*block_size={T}"):
            model(torch.zeros(1, T + 1, dtype=torch.long))


# --- errors that a user can make ---


def test_an_unknown_choice_or_preset_names_what_there_is():
    for field, allowed in CHOICES.items():
        with pytest.raises(ValueError) as error:
            ModelConfig(**{field: "nonsense"})
        assert all(part in str(error.value) for part in (field, "nonsense", *allowed))
    for typo, meant in (("qwen", "qwen3"), ("gpt-2", "gpt2"), ("lama", "llama")):
        with pytest.raises(ValueError, match=f"arch_preset='{typo}'.*did you mean '{meant}'"):
            model_config(typo)
