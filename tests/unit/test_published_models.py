"""The configs of published models have their shapes, and say what they need and what was measured."""

import math
import re

import pytest
from support.helpers import ROOT

from mfu_versions import model_builder_v3 as v3
from training.configuration.files_and_flags import load_config
from training.memory.gpus import CARDS, card_capability, card_memory, find_card
from training.memory.micro_batch import choose

# What the models' config.json on the hub says, by our names, and how many parameters the hub shows.
SIZES = ("n_layer", "n_head", "n_kv_head", "n_embd", "head_dim", "d_ff", "vocab_size")
QWEN3 = dict(norm_eps=1e-6, rope_theta=1e6, qk_norm=True, qkv_bias=False)
QWEN2 = dict(norm_eps=1e-6, rope_theta=1e6, qk_norm=False, qkv_bias=True)
LLAMA = dict(norm_eps=1e-5, rope_theta=1e5, qk_norm=False, qkv_bias=False)
SCALED = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SCALED |= {"original_max_position_embeddings": 8192}
LLAMA_3 = LLAMA | dict(rope_theta=5e5, rope_scaling=SCALED)
PUBLISHED = {
    "qwen3_0.6b.py": ((28, 16, 8, 1024, 128, 3072, 151936), QWEN3, 596_049_920),
    "qwen3_1.7b.py": ((28, 16, 8, 2048, 128, 6144, 151936), QWEN3, 1_720_574_976),
    "qwen3_4b.py": ((36, 32, 8, 2560, 128, 9728, 151936), QWEN3, 4_022_468_096),
    "qwen2.5_1.5b.py": ((28, 12, 2, 1536, 128, 8960, 151936), QWEN2, 1_543_714_304),
    "llama3.2_1b.py": ((16, 32, 8, 2048, 64, 8192, 128256), LLAMA_3, 1_235_814_400),
    "smollm2_360m.py": ((32, 15, 5, 960, 64, 2560, 49152), LLAMA, 361_821_120),
}
published = pytest.mark.parametrize("name", PUBLISHED)


def load(name):
    return load_config([str(ROOT / "config" / name)])


@published
def test_the_shape_and_the_parameters_are_those_of_the_published_config(name):
    sizes, rest, parameters = PUBLISHED[name]
    model = load(name).model_config()
    assert v3.build_model(model).count_parameters()["total"] == parameters
    expected = dict(zip(SIZES, sizes, strict=True), rope_scaling=None, weight_tying=True, bias=False) | rest
    assert {key: model.to_dict()[key] for key in expected} == expected


@published
def test_the_header_has_the_count_the_source_and_the_estimated_memory(name):
    text = (ROOT / "config" / name).read_text()
    header = re.match(r"(?:#.*\n)*", text)[0]
    config = load(name)
    model, parameters = config.model_config(), PUBLISHED[name][2]
    assert f": {parameters:,} parameters, the published number" in header
    assert f" {model.vocab_size * model.n_embd:,} are the tied embedding" in header
    assert re.search(r"Source: https://huggingface\.co/[\w.-]+/[\w.-]+/blob/main/config\.json", header)
    gib, least = re.search(
        r"GPU: one or more with (\d+) GB or more, from the (\S+ ?\S*) on, by the", header
    ).groups()
    least = find_card(least)
    assert int(gib) == math.ceil(least.gib / 2) * 2  # a 24 GB card reports 23.6 GiB
    for card in CARDS.values():
        if not card_capability(card).bf16:
            continue
        fits = choose(config, 1, card_memory(card))[1].fits
        assert fits == (card.gib >= least.gib), card
    assert "Unmeasured." in header or re.search(r"Measured \d{4}-\d\d-\d\d.* tokens/s", header, re.DOTALL)
    assert f"# {config.tokens_per_iter // config.block_size} sequences" in text
