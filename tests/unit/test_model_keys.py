"""head_dim, qkv_bias and rope_scaling: from a file, a flag or a checkpoint into the model, never ignored."""

from dataclasses import replace

import pytest
import torch
from support.helpers import TINY, write_config

from common.errors import UserError
from model import rotary_angles
from model_builder import build_model
from model_config import model_config
from training.checkpoints.saved_state import read_model_config
from training.configuration.files_and_flags import load_config
from training.configuration.keys import TrainConfig
from training.dry_run import dry_run
from training.memory.estimate import estimate_memory

SMALL = dict(n_layer=2, n_head=4, n_embd=64, d_ff=96, vocab_size=97, block_size=32, n_kv_head=2)
LINEAR = {"rope_type": "linear", "factor": 2.0}
SCALING_FLAG = '--rope_scaling={"rope_type": "linear", "factor": 2.0}'


def shapes(**overrides):
    model = build_model(model_config("llama", **{**SMALL, **overrides}))
    return {name.removeprefix("blocks.0.attn."): tuple(p.shape) for name, p in model.named_parameters()}


@pytest.fixture
def load(tmp_path):
    def load(*flags, text=""):
        path = write_config(tmp_path / "run.py", **TINY)
        path.write_text(path.read_text() + text)
        return load_config([str(path), *flags])

    return load


# --- the model ---


def test_a_stated_head_width_changes_the_projections_and_nothing_else():
    usual, wide = shapes(), shapes(head_dim=24, qk_norm=True)
    assert (usual["qkv.weight"], usual["out.weight"]) == ((4 * 16 + 2 * 2 * 16, 64), (64, 64))
    assert (wide["qkv.weight"], wide["out.weight"]) == ((4 * 24 + 2 * 2 * 24, 64), (64, 4 * 24))
    assert wide["q_norm.weight"] == wide["k_norm.weight"] == (24,)
    changed = {name for name in usual if usual[name] != wide[name]}
    assert changed == {f"{at}{part}.weight" for at in ("", "blocks.1.attn.") for part in ("qkv", "out")}
    assert build_model(model_config("llama", **SMALL, head_dim=24)).rotary_cos.shape == (32, 12)


def test_biases_of_q_k_and_v_start_at_zero_and_reach_the_logits():
    model = build_model(model_config("qwen2", **SMALL)).init_weights("cpu", seed=0)
    biases = [block.attn.qkv.bias for block in model.blocks]
    assert not any(bias.any() for bias in biases)
    ids = torch.arange(32)[None]
    before = model(ids)
    model(ids, ids).backward()
    assert all(bias.grad.abs().sum() > 0 for bias in biases)
    with torch.no_grad():
        biases[0].add_(1.0)
    assert not torch.equal(model(ids), before)


def test_scaled_positions_are_in_the_buffers_also_after_the_weights_are_drawn():
    config = model_config("llama", **SMALL, rope_scaling=LINEAR)
    model = build_model(config)
    assert model.rotary_cos.is_meta
    model.init_weights("cpu", seed=0)
    expected = rotary_angles(32, 16, 1e4, scaling=config.rope_scaling)
    assert torch.equal(model.rotary_cos, expected.cos) and torch.equal(model.rotary_sin, expected.sin)
    assert not torch.equal(model.rotary_cos, rotary_angles(32, 16, 1e4).cos)


# --- what the model does not have ---

LEARNED_AND_SCALED = dict(position_encoding="learned", rope_scaling=LINEAR)
REFUSED = [
    (dict(head_dim=15), "rope needs an even head width, got head_dim=15"),
    *((dict(head_dim=n), f"head_dim={n} must be from 1 to") for n in (0, -8)),
    (dict(head_dim=2**19), "n_head=4 heads of head_dim=524288 are 2,097,152 wide together"),
    *((dict(n_head=8, n_kv_head=n), f"num_key_value_heads={n}") for n in (3, 0)),
    (dict(n_head=6, n_kv_head=2), "n_embd=64 is not divisible by n_head=6;.* or state head_dim"),
    (dict(bias=True, qkv_bias=True), "bias=True and qkv_bias=True: .*; set one of them to False"),
    (LEARNED_AND_SCALED, "rope_scaling needs rotary positions"),
    (dict(rope_scaling={"rope_type": "linear"}), "rope_scaling of type 'linear' needs factor"),
]


@pytest.mark.parametrize(("fields", "message"), REFUSED, ids=[str(fields) for fields, _ in REFUSED])
def test_what_the_model_does_not_have_is_refused_before_it_is_built(fields, message):
    with pytest.raises(ValueError, match=message):
        model_config("llama", **{**SMALL, **fields})


# --- from a file, and from the command line ---


def test_a_file_and_flags_say_the_same(load):
    text = "\nhead_dim = 16\nqkv_bias = True\nrope_scaling = dict(rope_type='linear', factor=2)\n"
    from_file = load(text=text)
    from_flags = load("--head_dim=16", "--qkv_bias=True", SCALING_FLAG)
    assert from_file.model_config() == from_flags.model_config()
    assert from_file.model_config().attention_width == 64 and TINY["n_embd"] == 32
    assert load("--rope_scaling=None", text=text).model_config().rope_scaling is None
    assert load("--head_dim=None", text=text).model_config().head_dim == 8


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        (
            "--rope_scaling=linear",
            "is str, expected dict or None; write it as {'rope_type': 'linear', 'factor",
        ),
        ("--rope_scaling={'rope_type': 'linear'}", "'linear' needs factor"),
        ("--rope_scaling={'rope_type': 'linear', 'factor': true}", "expected dict or None"),
        ("--rope_scaling={'rope_type': 'linear', 'factor': 2, 'beta': {}}", "has no field 'beta'"),
        ("--head_dim=16.0", "expected int or None; write 16"),
        ("--qkv_bias=1", "expected bool or None"),
    ],
)
def test_a_key_that_cannot_be_is_one_message(load, flag, message):
    with pytest.raises(UserError) as error:
        load(flag)
    assert message in str(error.value)


# --- in a checkpoint ---


def test_a_checkpoint_from_before_the_keys_describes_the_same_model():
    config = model_config("qwen3", **SMALL)
    old = config.to_dict()
    for name in ("head_dim", "qkv_bias", "rope_scaling"):
        del old[name]
    assert read_model_config(old) == config


# --- what is said of them ---


def memory(**overrides):
    config = TrainConfig(arch_preset="llama", n_layer=2, n_head=4, n_embd=64, d_ff=96, batch_size=8)
    return estimate_memory(replace(config, **overrides), 1)


@pytest.mark.parametrize("low_precision", ["none", "fp8_tensorwise"])
@pytest.mark.parametrize("qk_norm", [False, True])
def test_wider_heads_are_estimated_to_need_more_memory(low_precision, qk_norm):
    settings = {"low_precision": low_precision, "qk_norm": qk_norm}
    usual, stated, wide = (memory(head_dim=d, **settings) for d in (None, 16, 32))
    assert stated == usual
    more = (wide["activations"] - usual["activations"]) * 2**30
    tokens = 8 * 1024
    # what attention gives; q, k and v; with norms, q and k as they were before, too
    columns = (6 if qk_norm else 4) * 64
    extra = 64 if low_precision != "none" else 0  # bytes: attention's output, once more in fp8
    assert more == pytest.approx(2 * tokens * (2 * columns + extra))
    if extra:
        weights = "quantized weights (fp8_tensorwise)"
        assert (wide[weights] - usual[weights]) * 2**30 == pytest.approx(2 * 2 * 4 * 64 * 64)


def test_the_report_shows_the_keys(load):
    wide = load("--head_dim=16", "--qkv_bias=True", SCALING_FLAG)
    lines = "\n".join(dry_run(wide, 1))
    assert "head_dim:                    16\n" in lines
    assert "qkv_bias:                    True\n" in lines
    assert "rope_scaling:                {'rope_type': 'linear', 'factor': 2.0}\n" in lines
    assert "Audit by FlopCounterMode:    exact" in lines
    usual = "\n".join(dry_run(load(), 1))
    assert "head_dim:                    8\n" in usual and "rope_scaling:                None\n" in usual
