"""Every table of numbers in the documents is what the code computes."""

import json
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
from training.hardware.peaks import GPUS, table_peak
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


def test_what_to_expect_of_eight_b200s_is_what_the_formulas_and_peaks_give():
    rows = {claim: cells for claim, *cells in table(TEXTS["docs/benchmarks.md"], "claim")}
    rates, budget, *_, flops, graphs = rows.values()
    peak = 8 * table_peak("NVIDIA B200", "bfloat16").flops
    qwen, llama = (
        full(name).model_config() for name in ("full_qwen3_1.8b_b200_optimal.py", "full_llama_1.36b.py")
    )
    whole = peak / totals(v3, qwen)  # tokens/s at 100 %
    seal = json.loads((ROOT / "seals" / "qwen3_1.8b_2x_h200.seal.json").read_text())["record"]
    mfu = round(seal["summary"]["mfu_percent"]["median"], 2)

    claimed = re.fullmatch(r"(\d+) to (\d+) k tokens/s, 35 to 75 % MFU", list(rows)[0])
    percents = [100 * 1e3 * float(rate) / whole for rate in claimed.groups()]
    assert rates[0] == "Qwen3 1.8B: {:.1f} to {:.1f} %".format(*percents)
    assert rates[1] == (
        f"100 % is {whole:,.0f} tokens/s, LLaMA 1.36B {peak / totals(v3, llama):,.0f}; "
        f"the {mfu} % of two H200s are {mfu / 100 * whole:,.0f}"
    )
    tokens, *hours = map(float, re.fullmatch(r"(\d+) B tokens in (\d) to (\d) hours", list(rows)[1]).groups())
    needed = [100 * 1e9 * tokens / (3600 * hour * whole) for hour in hours]
    assert budget[0] == "Qwen3 1.8B: {:.0f} to {:.0f} %".format(*needed)
    assert budget[1] == f"{1e9 * tokens / (3600 * mfu / 100 * whole):.1f} hours at {mfu} %"
    command = f"--tokens={tokens:.0f}e9 --config=config/full_qwen3_1.8b_b200_optimal.py --gpus=8xB200"
    assert f"{command} --mfu={mfu / 100:.4f}\n" in TEXTS["docs/benchmarks.md"]
    for name, minutes, tokens in (
        ("6 B tokens in 30 to 45 minutes", (30, 45), 6e9),
        ("1,000 iterations of 4.2 M tokens in 30 to 40 minutes", (30, 40), 1000 * 2**22),
    ):
        of_qwen, of_llama = (
            "{:.0f} to {:.0f} %".format(*(100 * tokens * totals(v3, m) / peak / 60 / t for t in minutes))
            for m in (qwen, llama)
        )
        assert f"{rows[name][0]}, ".startswith(f"Qwen3 1.8B: {of_qwen}, ")
        assert f"LLaMA 1.36B: {of_llama}" in rows[name][0] or tokens != 6e9
        assert rows[name][1] == f"{tokens / (3600 * mfu / 100 * whole):.2f} hours at {mfu} %"
    two = 2 * table_peak("NVIDIA RTX A6000", "bfloat16").flops
    hours = 81.727e9 * totals(v3, qwen) / two / 3600
    assert rows["two A6000s: 81.727 B tokens in 110 to 120 hours"][:2] == [
        f"Qwen3 1.8B: {100 * hours / 110:.0f} to {100 * hours / 120:.0f} %",
        f"{hours:.0f} hours are 100 %",
    ]
    iterations = {32_000: "llama_1.36b", 50_000: "llama3_1.5b_optimal"}
    iterations |= {29_000: "llama3_2.2b_chinchilla", 39_000: "qwen3_1.8b_optimal"}
    made = [count * full(f"full_{name}.py").tokens_per_iter / 1e9 for count, name in iterations.items()]
    said = rows["32,000, 50,000, 29,000, 39,000 iterations are 85, 102, 62, 82 B tokens"][0]
    assert said == f"{', '.join(f'{tokens:.0f}' for tokens in made)} B in the shipped batches"
    counts = [totals(formula, qwen) / 1e9 for formula in (v1, v2, v3)]
    assert flops[0] == "no formula: Qwen3 1.8B has {:.1f} by v1, {:.1f} by v2 and v3".format(*counts[:2])
    assert counts[1] == counts[2] and all(abs(count - 23.9) > 10 for count in counts)

    log = "".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "log").glob("*.md")))
    eager, captured = (
        float(re.search(pattern, log)[1].replace(",", ""))
        for pattern in (
            r"\| eager \| 45\.8 ms \(40\.8 to 47\.7\) \| ([\d,]+) \|",
            r"\| `--use_cuda_graphs=True` \| 8\.0 ms \| ([\d,]+) \|",
        )
    )
    small = re.search(r"\| CUDA Graphs \| \| [\d,]+ \| (-[\d.]+) %", log)[1]
    large = re.search(r"CUDA Graphs at this size: ([\d.]+) %", log)[1]
    assert graphs[0] == f"on an H200, Qwen3 1.8B gained {small} and {large} %"
    assert "GPT-2 124M, micro-batch 4 x 256" in log
    assert graphs[1] == f"GPT-2 124M, 4 x 256 tokens: {captured / eager:.1f} times ([LOG](../LOG.md))"


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


def worked(model) -> dict[str, str]:
    """Label of a row in the worked tables -> its figure, per token, from what the three formulas return."""
    one, two, three = (formula.count_flops(model, S) for formula in (v1, v2, v3))
    L = model.n_layer
    layer = {name: count // L for name, count in three["components"].items() if name != "logits"}
    attention, ffn = three["attention_flops_per_layer"], three["ffn_flops_per_layer"]
    scores = layer["attention_scores"] + layer["attention_context"]
    counts = {
        **{f"`{name}`": count for name, count in layer.items()},
        "attention": attention,
        "feed-forward": ffn,
        "layer": attention + ffn,
        "layers, L x layer": L * (attention + ffn),
        "`logits`, 2HV": three["logit_flops"],
        "forward": sum(three["components"].values()),
        "scores and context, 4SH": scores,
        "projections, 2H²(2 + 2/G)": two["attention_flops_per_layer"] - scores,
    }
    per_token = {label: count // S for label, count in counts.items()}
    per_token |= {
        "training, x 3": three["flops_per_token"],
        "causal half of the scores off, 3 L 2SH": three["flops_per_token"] - three["flops_per_token_causal"],
        "training, causal": three["flops_per_token_causal"],
        "N": one["components"]["parameters"] // (2 * S),
        "6N": 3 * one["components"]["parameters"] // S,
        "12 L H S (H = n_head head_dim)": 3 * one["components"]["attention_scores"] // S,
        "training": one["flops_per_token"],
    }
    ratio = {"attention / feed-forward": f"{attention / ffn:.4f}"}
    return {label: f"{count:,}" for label, count in per_token.items()} | ratio


def test_worked_tables_are_what_the_code_computes():
    text = TEXTS["mfu_versions/README.md"]
    rows = table(text, "component") + table(text, "")
    expected = [worked(full(GOLDEN[name]).model_config()) for name in ("Qwen3 1.8B", "LLaMA 2 1.36B")]
    assert {row[0] for row in rows} == set(expected[0])
    for row in rows:
        assert row[-2:] == [figures[row[0]] for figures in expected], row[0]
