"""Scaled rotary frequencies are those of the papers and of transformers; impossible scalings are refused."""

import dataclasses
import json

import pytest
import torch

import rope_scaling
from model import rotary_angles
from model_config import ModelConfig, model_config

LINEAR = {"rope_type": "linear", "factor": 2.0}
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


REFUSED = [
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


@pytest.mark.parametrize(("values", "message"), REFUSED, ids=[message for _, message in REFUSED])
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
