"""The configs of published models have their shapes, and say what they need and what was measured."""

import re

import pytest
import torch
from support.helpers import ROOT

from mfu_versions import model_builder_v3 as v3
from training.configuration.files_and_flags import load_config
from training.memory.estimate import estimate_memory

# What the models' config.json on the hub says, and how many parameters the hub shows.
QWEN = dict(vocab_size=151936, rms_norm_eps=1e-6, tie_word_embeddings=True)
QWEN |= dict(rope_parameters={"rope_type": "default", "rope_theta": 1e6})
LLAMA_3 = dict(vocab_size=128256, rms_norm_eps=1e-5, tie_word_embeddings=True)
ROPE = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA_3 |= dict(rope_parameters=ROPE | {"original_max_position_embeddings": 8192, "rope_theta": 5e5})
SMOL = dict(vocab_size=49152, rms_norm_eps=1e-5, tie_word_embeddings=True)
SMOL |= dict(rope_parameters={"rope_type": "default", "rope_theta": 1e5})


def sizes(layers, heads, kv_heads, width, head_dim, ffn):
    return dict(
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        hidden_size=width,
        head_dim=head_dim,
        intermediate_size=ffn,
    )


PUBLISHED = {  # config -> (model of transformers, its config, parameters)
    "qwen3_0.6b.py": ("Qwen3", sizes(28, 16, 8, 1024, 128, 3072) | QWEN, 596_049_920),
    "qwen3_1.7b.py": ("Qwen3", sizes(28, 16, 8, 2048, 128, 6144) | QWEN, 1_720_574_976),
    "qwen3_4b.py": ("Qwen3", sizes(36, 32, 8, 2560, 128, 9728) | QWEN, 4_022_468_096),
    "qwen2.5_1.5b.py": ("Qwen2", sizes(28, 12, 2, 1536, 128, 8960) | QWEN, 1_543_714_304),
    "llama3.2_1b.py": ("Llama", sizes(16, 32, 8, 2048, 64, 8192) | LLAMA_3, 1_235_814_400),
    "smollm2_360m.py": ("Llama", sizes(32, 15, 5, 960, 64, 2560) | SMOL, 361_821_120),
}
published = pytest.mark.parametrize("name", PUBLISHED)


def load(name):
    return load_config([str(ROOT / "config" / name)])


@published
def test_the_parameters_are_as_many_as_published_and_as_in_transformers(name):
    kind, theirs, parameters = PUBLISHED[name]
    assert v3.build_model(load(name).model_config()).count_parameters()["total"] == parameters
    transformers = pytest.importorskip("transformers", reason="needs transformers, the reference")
    with torch.device("meta"):
        config = getattr(transformers, f"{kind}Config")(**theirs)
        model = getattr(transformers, f"{kind}ForCausalLM")(config)
    assert sum(p.numel() for p in model.parameters()) == parameters


@published
def test_the_keys_are_those_of_the_published_config(name):
    kind, theirs, _ = PUBLISHED[name]
    ours = load(name).model_config()
    scaling = ours.rope_scaling.to_dict() if ours.rope_scaling else {"rope_type": "default"}
    assert theirs == dict(
        **sizes(ours.n_layer, ours.n_head, ours.n_kv_head, ours.n_embd, ours.head_dim, ours.d_ff),
        vocab_size=ours.vocab_size,
        rms_norm_eps=ours.norm_eps,
        tie_word_embeddings=ours.weight_tying,
        rope_parameters=scaling | {"rope_theta": ours.rope_theta},
    )
    assert (ours.qk_norm, ours.qkv_bias, ours.bias) == (kind == "Qwen3", kind == "Qwen2", False)


@published
def test_the_header_has_the_count_the_source_and_the_estimated_memory(name):
    text = (ROOT / "config" / name).read_text()
    header = re.match(r"(?:#.*\n)*", text)[0]
    config = load(name)
    model, parameters = config.model_config(), PUBLISHED[name][2]
    assert f": {parameters:,} parameters, the published number" in header
    assert f" {model.vocab_size * model.n_embd:,} are the tied embedding" in header
    assert re.search(r"Source: https://huggingface\.co/[\w.-]+/[\w.-]+/blob/main/config\.json", header)
    estimate = sum(estimate_memory(config, 1).values())
    assert f"; {estimate:.1f} GiB estimated on one" in header and estimate < 125
    assert "Unmeasured." in header or re.search(r"Measured \d{4}-\d\d-\d\d .* tokens/s", header, re.DOTALL)
    tokens = config.samples_per_iter(8) * config.block_size
    assert f"# {tokens:,} tokens per iteration on 8 GPUs" in text
