"""head_dim, qkv_bias and rope_scaling: from a file, a flag or a checkpoint into the model, never ignored.
Scaled rotary frequencies are those of the papers and of transformers; impossible scalings are refused."""

import dataclasses
import json
from dataclasses import replace

import pytest
import torch
from support.helpers import TINY, write_config

import rope_scaling
from common.errors import UserError
from model import rotary_angles
from model_builder import build_model
from model_config import ModelConfig, model_config
from training.checkpoints.saved_state import read_model_config
from training.configuration.files_and_flags import load_config
from training.configuration.keys import TrainConfig
from training.dry_run import dry_run
from training.memory.estimate import estimate_memory

SMALL = dict(n_layer=2, n_head=4, n_embd=64, d_ff=96, vocab_size=97, block_size=32, n_kv_head=2)
LINEAR = {"rope_type": "linear", "factor": 2.0}
SCALING_FLAG = '--rope_scaling={"rope_type": "linear", "factor": 2.0}'


@pytest.fixture
def load(tmp_path):
    def load(*flags, text=""):
        path = write_config(tmp_path / "run.py", **TINY)
        path.write_text(path.read_text() + text)
        return load_config([str(path), *flags])

    return load


# --- the model ---


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


# --- scaled positions ---

ORIGINAL = "original_max_position_embeddings"
LLAMA = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA |= {ORIGINAL: 8192}
YARN = {"rope_type": "yarn", "factor": 4.0, ORIGINAL: 32768}
CASES = {  # name -> (scaling, head_dim, theta)
    "linear": (LINEAR, 64, 1e4),
    "Llama 3.2 1B": (LLAMA, 64, 5e5),
    "Llama 3.1 8B": ({**LLAMA, "factor": 8.0}, 128, 5e5),
    "Qwen3, four times longer": (YARN, 128, 1e6),
    "LLaMA 2, sixteen times longer": (YARN | {"factor": 16, ORIGINAL: 4096}, 128, 1e4),
    "stated attention_factor": (YARN | {"attention_factor": 0.8, "beta_fast": 16, "beta_slow": 2.0}, 96, 1e5),
    "a ramp that ends beyond the last pair": ({**YARN, "beta_fast": 8}, 16, 100.0),
    "a step instead of a ramp": ({**YARN, "beta_fast": 1.0001, "beta_slow": 1}, 2, 1e4),
}


@pytest.mark.parametrize("case", CASES)
def test_frequencies_and_the_scale_of_attention_equal_those_of_transformers(case):
    transformers = pytest.importorskip("transformers", reason="needs transformers, the reference")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    values, head_dim, theta = CASES[case]
    sizes = dict(hidden_size=4 * head_dim, num_attention_heads=4, head_dim=head_dim)
    sizes |= dict(max_position_embeddings=131072, rope_parameters={**values, "rope_theta": theta})
    theirs = transformers.LlamaConfig(**sizes)
    expected, scale = ROPE_INIT_FUNCTIONS[values["rope_type"]](theirs, "cpu")
    ours = rope_scaling.parse(values)
    angles = rotary_angles(2, head_dim, theta, scaling=ours)
    assert ours.attention_scale == pytest.approx(scale, rel=1e-12)
    turned = torch.atan2(angles.sin[1], angles.cos[1])  # the angle of position 1 is the frequency
    torch.testing.assert_close(turned, expected, rtol=2e-6, atol=1e-9)
    length = torch.hypot(angles.sin, angles.cos)
    torch.testing.assert_close(length, torch.full_like(length, scale))


def test_without_scaling_the_angles_keep_every_bit():
    frequencies = 1e4 ** -(torch.arange(0, 64, 2, dtype=torch.float32) / 64)
    angles = torch.outer(torch.arange(100, dtype=torch.float32), frequencies)
    plain = rotary_angles(100, 64, 1e4)
    assert torch.equal(plain.cos, angles.cos()) and torch.equal(plain.sin, angles.sin())
    same = rotary_angles(100, 64, 1e4, scaling=rope_scaling.parse({**LINEAR, "factor": 1}))
    assert torch.equal(same.cos, plain.cos) and torch.equal(same.sin, plain.sin)


# --- what is written, and what is refused ---


def without(values: dict, name: str) -> dict:
    return {key: value for key, value in values.items() if key != name}


REFUSED_SCALINGS = [
    ("linear", "rope_scaling='linear' is not a dict such as {'rope_type': 'linear', 'factor': 2.0}"),
    ({"type": "linear", "factor": 2.0}, "has no rope_type; it is one of 'linear', 'llama3', 'yarn'"),
    ({"rope_type": "longrope", "factor": 2.0}, "rope_type='longrope'; it is one of"),
    ({"rope_type": ["yarn"], "factor": 2.0}, "it is one of"),
    ({"rope_type": "linear", "factor": None}, "'linear' needs factor"),
    *[(without(LLAMA, name), f"'llama3' needs {name}") for name in LLAMA if name != "rope_type"],
    *[(without(YARN, name), f"'yarn' needs {name}") for name in YARN if name != "rope_type"],
    ({**LINEAR, "beta_fast": 32}, "'linear' has no field 'beta_fast'; it has factor"),
    ({**YARN, "betafast": 32}, "has no field 'betafast'; did you mean 'beta_fast'"),
    ({**LINEAR, 7: 8}, "has no field 7"),
    ({**LINEAR, "factor": 0.5}, "factor=0.5 must be at least 1"),
    ({**LINEAR, "factor": -2.0}, "factor=-2.0 must be above 0"),
    ({**LINEAR, "factor": float("nan")}, "factor=nan must be above 0"),
    ({**LINEAR, "factor": 10**5000}, "factor=an int of more than 4,300 digits must be"),
    ({**LINEAR, "factor": "2.0"}, "factor='2.0' is not a number"),
    ({**LINEAR, "factor": True}, "factor=True is not a number"),
    ({**LLAMA, "low_freq_factor": 4.0}, "low_freq_factor=4 must be below high_freq_factor=4"),
    ({**LLAMA, ORIGINAL: 8192.0}, "=8192.0 is not a whole number"),
    ({**LLAMA, ORIGINAL: 0}, "must be above 0 and at most 16,777,216"),
    ({**YARN, "beta_slow": 32.0}, "beta_slow=32 must be below beta_fast=32"),
    ({**YARN, ORIGINAL: 6}, "no pair turns beta_slow=1 times within"),
    ({**YARN, "mscale": 1.0}, "'yarn' has no field 'mscale'"),
]


@pytest.mark.parametrize(
    ("values", "message"), REFUSED_SCALINGS, ids=[message for _, message in REFUSED_SCALINGS]
)
def test_a_scaling_that_cannot_be_is_refused_with_the_fix(values, message):
    with pytest.raises(ValueError) as error:
        rope_scaling.parse(values)
    assert message in str(error.value) and str(error.value).startswith("rope_scaling")
    assert len(str(error.value)) < 300


@pytest.mark.parametrize("case", CASES)
def test_a_scaling_is_the_same_after_json_and_cannot_be_changed(case):
    values, head_dim, theta = CASES[case]
    scaling = rope_scaling.parse(values)
    assert rope_scaling.parse(json.loads(json.dumps(scaling.to_dict()))) == scaling
    assert hash(rope_scaling.parse(values)) == hash(scaling)
    with pytest.raises(dataclasses.FrozenInstanceError):
        scaling.factor = 2.0
    sizes = dict(n_head=2, n_embd=64, head_dim=head_dim, rope_theta=theta, rope_scaling=values)
    config = model_config("llama", **sizes)
    saved = json.loads(json.dumps(config.to_dict()))
    assert ModelConfig(**saved) == config
    assert set(values) <= set(saved["rope_scaling"]), "no field is lost"


def test_a_base_at_which_a_scaling_means_nothing_is_refused():
    sizes = dict(n_head=2, n_embd=64)
    with pytest.raises(ValueError, match="rope_scaling needs a rope_theta above 1, got 1"):
        model_config("llama", rope_theta=1.0, rope_scaling=LINEAR, **sizes)
    long = {**YARN, ORIGINAL: 2**24}
    with pytest.raises(ValueError, match="rope_theta=10 every pair turns more than beta_fast=32 times"):
        model_config("llama", rope_theta=10.0, rope_scaling=long, **sizes)
