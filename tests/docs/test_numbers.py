"""Tables of numbers in the documents are what the code computes."""

import re
from fractions import Fraction

import pytest
from support.all_recipes import RECIPES
from support.documents import TEXTS, table
from support.helpers import ROOT

import model_builder
from mfu_versions import model_builder_v1 as v1
from mfu_versions import model_builder_v2 as v2
from mfu_versions import model_builder_v3 as v3
from ops.recipe import REFUSED
from tools.plan import FAMILIES, HOFFMANN, plan
from training.configuration.files_and_flags import load_config
from training.hardware.capability import CPU, lookup
from training.hardware.peaks import GPUS
from training.memory.estimate import estimate_memory

S = 2048


def full(name: str, *flags: str):
    return load_config([str(ROOT / "config" / name), *flags])


def totals(formula, model) -> int:
    return formula.count_flops(model, S)["flops_per_token"]


def test_the_page_on_plans_has_what_the_law_and_both_counts_of_flops_give():
    rows = table(TEXTS["docs/plan.md"], "plan")
    assert len(rows) == 4
    for path, published, *cells in rows:
        model = full(path.split("/")[1]).model_config()
        tokens = 1e9 * float(published.removesuffix(" B"))
        counts = v2.count_flops(model, S)
        printed = 1 + counts["attention_to_ffn_ratio"]  # with the score term as v2 prints it; no logits
        stated = 3 * model.n_layer * counts["ffn_flops_per_layer"] * printed * tokens / S
        made, whole = plan(HOFFMANN, model, tokens), plan(HOFFMANN, model, flops=1.36e21)
        assert cells == [
            f"{made.loss:.3f}",
            f"{stated / 1e21:.3f}e21",
            f"{tokens * made.flops_per_token / 1e20:.1f}e20",
            f"{whole.tokens / 1e9:.1f} B",
            f"{whole.loss:.3f}",
        ]


def test_the_page_on_plans_has_the_families():
    for name, layers, d_ff, heads, path in table(TEXTS["docs/plan.md"], "family"):
        told = (path.removeprefix("config/"), Fraction(layers), Fraction(d_ff), int(heads))
        assert told == FAMILIES[name]
    assert len(table(TEXTS["docs/plan.md"], "family")) == len(FAMILIES)


def test_readme_describes_the_full_models():
    rows = table(TEXTS["README.md"], "config")
    assert sorted(row[0] for row in rows) == sorted(f"config/{p.name}" for p in ROOT.glob("config/full_*.py"))
    for path, shape, vocabulary, parameters, flops in rows:
        model = full(path.split("/")[1]).model_config()
        sizes = f"{model.n_layer}-{model.n_head}-{model.n_embd}-{model.d_ff}, {model.n_kv_head}"
        total = model_builder.build_model(model).count_parameters()["total"]
        tied = " tied" if model.weight_tying else ""
        expected = [sizes, f"{model.vocab_size:,}{tied}", f"{total:,}", f"{totals(v3, model):,}"]
        assert [shape, vocabulary, parameters, flops] == expected


def test_the_three_phases_on_b200_need_the_memory_that_was_measured():
    flags = ["--loss_chunks=8", "--activation_checkpointing=full"]
    for _, batch, tokens, _, estimated, measured, _, _ in table(TEXTS["TRAINING_GUIDE.md"], "phase"):
        batch_size, accumulation = batch.split(" x ")
        flags_of_phase = [f"--batch_size={batch_size}", f"--gradient_accumulation_steps={accumulation}"]
        config = full("full_qwen3_1.8b_b200_optimal.py", *flags_of_phase, *flags)
        assert tokens == f"{config.samples_per_iter(8) * config.block_size:,}"
        estimate = sum(estimate_memory(config, 8).values())
        assert estimated == f"{estimate:.1f}"
        assert estimate == pytest.approx(float(measured), rel=0.01)


def test_every_known_gpu_has_the_words_of_its_low_precision():
    named = []
    for names, *words, _ in table(TEXTS["docs/low_precision.md"], "GPU"):
        found = [gpu for gpu in GPUS if any(re.match(rf"{name}\b", gpu.name) for name in names.split(", "))]
        assert found or names == "CPU"
        named += found
        for here in [lookup(gpu.compute, gpu.name) for gpu in found] or [CPU]:
            for recipes, word in zip(("fp8_tensorwise fp8_delayed", "mxfp8 nvfp4"), words, strict=True):
                for recipe in recipes.split():
                    assert (RECIPES[recipe].support(here) or REFUSED) == word, (recipe, here)
    assert sorted(gpu.name for gpu in named) == sorted(gpu.name for gpu in GPUS)


GOLDEN = {  # row of mfu_versions/README.md -> config
    "GPT-2 1.36B": "full_gpt2_1.36b.py",
    "LLaMA 2 1.36B": "full_llama_1.36b.py",
    "LLaMA 3 1.5B": "full_llama3_1.5b_optimal.py",
    "LLaMA 3 2.2B": "full_llama3_2.2b_chinchilla.py",
    "Qwen3 1.8B": "full_qwen3_1.8b_optimal.py",
}


def test_golden_table_is_what_the_code_computes():
    rows = table(TEXTS["mfu_versions/README.md"], "model")
    assert [row[0] for row in rows] == list(GOLDEN)
    for name, *cells in rows:
        model = full(GOLDEN[name]).model_config()
        old, new = totals(v1, model), totals(v3, model)
        exact = v3.count_flops(model, S)
        ratio_of_v2 = v2.count_flops(model, S)["attention_to_ffn_ratio"]
        ratios = (old / new, exact["attention_to_ffn_ratio"], ratio_of_v2)
        assert totals(v2, model) == new
        assert cells[:3] == [f"{old:,}", f"{new:,}", f"{exact['flops_per_token_causal']:,}"]
        assert cells[3:] == [f"{ratio:.4f}" for ratio in ratios]
