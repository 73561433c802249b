"""The numbers that MFU is made of: three formulas, their audit, and quotients over the same GPUs. That each
formula counts the published FLOPs is in tests/docs/test_numbers.py, which reads their table."""

import ast
import dataclasses
import os
import shutil
import sys

import pytest
import torch
from support import warm_python
from support.helpers import ROOT, STATED, TINY, last_run, make_dataset, write_config

from mfu_versions import model_builder_v1 as v1
from mfu_versions import model_builder_v2 as v2
from mfu_versions import model_builder_v3 as v3
from model_config import model_config
from training.checkpoints.train_state import Progress
from training.configuration.files_and_flags import load_config
from training.configuration.keys import TrainConfig
from training.hardware.peaks import table_peak
from training.process.world import World
from training.records.clock import Clock
from training.records.console_lines import console_lines
from training.records.rows import Logger, Reading
from training.records.utilization import FORMULAS as ALL_FORMULAS
from training.records.utilization import audit_flops, utilization

FORMULAS = {"v1": v1, "v2": v2, "v3": v3}
S = 2048
QWEN3 = "full_qwen3_1.8b_optimal.py"


def full_model(name):
    return load_config([str(ROOT / "config" / name)]).model_config()


def small(preset="llama", **overrides):
    sizes = dict(n_layer=2, n_head=4, n_embd=64, d_ff=96, vocab_size=97, block_size=32)
    return model_config(preset, **{**sizes, **overrides})


def per_token(formula, config, seq_len=32):
    return formula.count_flops(config, seq_len)["flops_per_token"]


# --- the parts and the whole ---

SHAPES = {
    f"{preset} {'GQA' if kv else 'MHA'} {'tied' if tied else 'untied'} S={seq_len}": (
        small(preset, n_kv_head=kv, weight_tying=tied),
        seq_len,
    )
    for preset in ("gpt2", "llama", "qwen3")
    for kv, tied, seq_len in ((None, True, 32), (2, False, 13), (2, True, 32))
}
SHAPES["gpt2 with biases"] = (small("gpt2", bias=True), 32)
SHAPES["qwen2 with biases"] = (small("qwen2", n_kv_head=2), 32)
SHAPES["attention wider than the model"] = (small("qwen3", n_kv_head=2, head_dim=24), 32)
SHAPES["attention narrower than the model"] = (small("llama", n_kv_head=2, head_dim=6, qkv_bias=True), 13)
SHAPES["heads that share no width"] = (small("llama", n_head=6, n_kv_head=3, n_embd=64, head_dim=10), 32)
SHAPES["llama one KV head, odd sizes"] = (small("llama", n_head=6, n_kv_head=1, n_embd=60, d_ff=77), 31)


@pytest.mark.parametrize("shape", SHAPES)
def test_components_sum_to_the_total_and_v3_equals_torchs_flop_counter(shape):
    """And so does v2, which has the same totals."""
    config, seq_len = SHAPES[shape]
    for formula in FORMULAS.values():
        flops = formula.count_flops(config, seq_len)
        assert 3 * sum(flops["components"].values()) == flops["flops_per_token"] * seq_len
        assert all(type(n) is int and n > 0 for n in flops["components"].values())
    audit = audit_flops(v3.build_model(config), v3.count_flops(config, seq_len), seq_len, True)
    assert v2.EXACT and v3.EXACT and audit["exact"]
    assert audit["counted_flops_per_sequence"] == audit["formula_flops_per_sequence"] > 0
    assert audit["formula_over_counted"] == 1


def test_v2_and_v3_are_one_total_and_v3_has_a_line_for_every_matmul():
    for config, seq_len in SHAPES.values():
        combined, summed = (formula.count_flops(config, seq_len) for formula in (v2, v3))
        for key in ("flops_per_token", "flops_per_token_causal", "attention_flops_per_layer", "logit_flops"):
            assert combined[key] == summed[key], key
    attention = ["q_proj", "k_proj", "v_proj", "attention_scores", "attention_context", "out_proj"]
    for preset, gate in (("llama", ["ffn_gate"]), ("gpt2", [])):
        lines = [*attention, *gate, "ffn_up", "ffn_down", "logits"]
        assert list(v3.count_flops(small(preset), 32)["components"]) == lines


# --- the audit ---


def test_v1_is_audited_and_its_deviation_reported():
    config = small("llama", n_kv_head=2)
    flops = v1.count_flops(config, 32)
    audit = audit_flops(v1.build_model(config), flops, 32, v1.EXACT)
    assert not v1.EXACT and not audit["exact"]
    assert audit["formula_over_counted"] == per_token(v1, config) / per_token(v3, config) > 1
    assert flops["attention_flops_per_layer"] == 4 * 32 * 64 * 32, "4 A S operations a token"
    assert flops["attention_to_ffn_ratio"] is None  # one N for all parameters: no split to report


def test_a_formula_that_claims_to_be_exact_and_is_not_stops_the_run():
    config = small("llama")
    flops = v3.count_flops(config, 32)
    dropped_logits = {**flops, "flops_per_token": flops["flops_per_token"] - 3 * flops["logit_flops"] // 32}
    first = v1.count_flops(config, 32)
    for formula, counted, said in (
        (v3, dropped_logits, "model_builder.py"),
        (v1, first, f"{first['flops_per_token'] * 32:,}"),
    ):
        with pytest.raises(RuntimeError, match=said):
            audit_flops(formula.build_model(config), counted, 32, exact=True)


# --- relations ---


def test_v1_counts_the_input_embedding_the_attention_width_and_the_biases_as_parameters():
    plain, *changed = (
        per_token(v1, small("llama", **more))
        for more in ({}, {"weight_tying": True}, {"head_dim": 32}, {"qkv_bias": True})
    )
    tied, wide, biased = (count - plain for count in changed)
    assert tied == -6 * 97 * 64
    weights = 2 * 4 * (64 * 64)  # layers x (q, k, v, out), each 64 columns or rows more
    assert wide == 6 * weights + 12 * 2 * 64 * 32
    assert biased == 6 * 2 * 3 * 64


@pytest.mark.parametrize("head_dim", [None, 24])
@pytest.mark.parametrize("version", FORMULAS)
def test_the_causal_count_leaves_out_half_of_the_scores_and_nothing_else(version, head_dim):
    config = small("qwen3", n_kv_head=2, head_dim=head_dim)
    flops = FORMULAS[version].count_flops(config, 32)
    scores = 12 * config.n_layer * config.n_head * config.head_dim * 32
    assert flops["flops_per_token"] - flops["flops_per_token_causal"] == scores / 2


# --- the drop-in files ---


def test_model_builder_is_v3_byte_for_byte_and_every_formula_is_known():
    shipped = sorted((ROOT / "mfu_versions").glob("model_builder_*.py"))
    assert (ROOT / "model_builder.py").read_bytes() == shipped[-1].read_bytes()
    assert [formula.__name__ for formula in ALL_FORMULAS] == [f"mfu_versions.{path.stem}" for path in shipped]


@pytest.mark.parametrize("version", FORMULAS)
def test_a_drop_in_imports_the_model_and_no_other_formula(version):
    source = (ROOT / "mfu_versions" / f"model_builder_{version}.py").read_text(encoding="utf-8")
    imports = [node for node in ast.walk(ast.parse(source)) if isinstance(node, (ast.Import, ast.ImportFrom))]
    assert all(getattr(node, "level", 0) == 0 for node in imports)  # relative ones break at the root
    modules = {getattr(node, "module", None) or node.names[0].name for node in imports}
    assert modules == {"__future__", "torch", "model", "model_config"}


def train_under(version, folder, *flags):
    """The record of a run that finds this model_builder.py first."""
    shutil.copy(ROOT / "mfu_versions" / f"model_builder_{version}.py", folder / "model_builder.py")
    command = [sys.executable, "-m", "train", "config.py", *flags]
    keys = dict(cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    done = warm_python.run(command, **keys)
    assert done.returncode == 0, done.stderr
    return last_run(folder / "out")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Records of the same training: 5 iterations under v3; 3 under v1, resumed to 5 under v3."""
    folder = tmp_path_factory.mktemp("drop_in")
    dataset = make_dataset(folder / "tokens", vocab_size=TINY["vocab_size"])
    for version in ("v1", "v3"):
        keys = {**TINY, "dataset": dataset, "out_dir": "out", "max_iters": 5, "peak_tflops": 1000.0}
        write_config(folder / version / "config.py", **keys)
    return {
        "v3": train_under("v3", folder / "v3"),
        "v1": train_under("v1", folder / "v1", "--max_iters=3"),
        "resumed": train_under("v3", folder / "v1", "--init_from=resume"),
    }


def losses(record):
    return [(row["iter"], row["loss"]) for row in record["training_iterations"]]


def test_the_formula_changes_no_loss_by_one_bit_and_a_checkpoint_resumes_under_another(runs):
    assert [iteration for iteration, _ in losses(runs["v3"])] == [0, 1, 2, 3, 4]
    assert losses(runs["v1"]) == losses(runs["v3"])[:3]
    assert len({loss for _, loss in losses(runs["v3"])}) == 5
    assert runs["v1"]["checkpoints"][-1]["iter"] == 3
    assert runs["resumed"]["startup_info"]["flops"]["calculation_method"] == v3.CALCULATION_METHOD
    assert losses(runs["resumed"]) == losses(runs["v3"])  # its record begins with the first part's rows


def test_the_record_says_which_formula_counted_and_what(runs):
    config = TrainConfig(**TINY).model_config()
    totals = {f.CALCULATION_METHOD: per_token(f, config, TINY["block_size"]) for f in FORMULAS.values()}
    for version in ("v1", "v3"):
        formula, record = FORMULAS[version], runs[version]
        expected = formula.CALCULATION_METHOD, totals[formula.CALCULATION_METHOD]
        rows = [row["mfu"] for row in record["training_iterations"] if row["mfu"]]
        assert {(mfu["calculation_method"], mfu["flops_per_token"]) for mfu in rows} == {expected}
        flops = record["startup_info"]["flops"]
        assert (flops["calculation_method"], flops["flops_per_token"]) == expected
        assert flops["audit"]["exact"] == formula.EXACT and flops["totals"] == totals


# --- utilization: the two field reports, made impossible ---

B200 = table_peak("NVIDIA B200", "bfloat16")


def logged_row(num_gpus, seconds, config, flops, peak=B200):
    """The row that a run on num_gpus logs for an iteration of `seconds`."""
    world = World(rank=0, local_rank=0, size=num_gpus, device=torch.device("cpu"))
    names = ("gpu_name", "precision")
    architecture = {"arch": "llama", "n_head": 1, "n_kv_head": 1}
    info = {
        "flops": {"calculation_method": "v3", **flops},
        "hardware": dict.fromkeys(names),
        "model": {"architecture": architecture, "total_params": 1},
    }
    logger = Logger(config, world, None, Clock(world.device), peak, info, Progress(0, 0))
    reading = Reading(10, 10, 2.0, 1.0, None, S, 1.0, 1.0, seconds, verdicts=[])
    return logger._row(reading, 1e-4)


def test_the_same_speed_per_gpu_is_the_same_mfu_on_any_number_of_gpus():
    """In the row that a run logs, with the tokens of all GPUs; the reports said 2.61 % and 10.44 %."""
    config = TrainConfig(batch_size=8, gradient_accumulation_steps=4, block_size=S)
    flops = v1.count_flops(full_model("full_llama_1.36b.py"), S)
    seconds = 8 * 4 * S / 107_000  # one GPU's share, so the same time on every number of GPUs
    for n in (1, 2, 8, 64):
        row = logged_row(n, seconds, config, flops)
        assert row["tokens_per_sec"] == pytest.approx(n * 107_000)
        assert row["tokens_per_sec_per_gpu"] == pytest.approx(107_000)
        mfu = row["mfu"]
        assert mfu["tokens_per_iter"] == n * 32 * S and not mfu["sparse_mode"]
        assert mfu["mfu_percent"] == pytest.approx(41.77, abs=0.01)
        assert mfu["achieved_tflops_per_gpu"] == pytest.approx(940, abs=1)
        assert mfu["achieved_tflops"] == pytest.approx(n * mfu["achieved_tflops_per_gpu"])
        assert mfu["hardware_peak_tflops"] == 2250 * n  # dense


def test_a_slower_run_cannot_have_the_higher_mfu_by_tying_or_untying():
    tied, untied = (
        v3.count_flops(dataclasses.replace(full_model("full_llama_1.36b.py"), weight_tying=tying), S)
        for tying in (True, False)
    )
    for before, after in ((tied, untied), (untied, tied)):
        fast, slow = utilization(95_388, 8, before, B200, {}), utilization(90_138, 8, after, B200, {})
        assert slow["mfu"] / fast["mfu"] == pytest.approx(90_138 / 95_388)


# --- recomputation: in HFU, never in MFU ---


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_hfu_counts_the_recomputed_forwards_and_mfu_does_not(mode):
    flops, plain = v3.count_flops(full_model(QWEN3), S), load_config([str(ROOT / "config" / QWEN3), *STATED])
    config = dataclasses.replace(plain, activation_checkpointing=mode)
    mfu, without = (logged_row(1, 1.0, c, flops)["mfu"] for c in (config, plain))
    assert without["hfu_percent"] == without["mfu_percent"] == mfu["mfu_percent"]
    logits = 3 * flops["logit_flops"] / S
    blocks = (flops["flops_per_token"] - logits) / 3  # one forward of all of them
    share = {"none": 0, "selective": 0.5, "full": 1}[mode] * blocks / flops["flops_per_token"]
    assert mfu["hfu_percent"] == pytest.approx(mfu["mfu_percent"] * (1 + share))


def test_hfu_is_beside_mfu_only_when_something_is_recomputed_and_null_where_layers_are_not_split():
    flops, config = v3.count_flops(full_model(QWEN3), S), load_config([str(ROOT / "config" / QWEN3), *STATED])
    full = dataclasses.replace(config, activation_checkpointing="full")
    plain, recomputed = (logged_row(1, 4.0, each, flops) for each in (config, full))
    line = console_lines(plain)[1]
    assert line.endswith("Peak: 2250.0 TF")
    assert console_lines(recomputed)[1] == f"{line} │ HFU: {recomputed['mfu']['hfu_percent']:.2f}%"
    whole = logged_row(8, 1.0, full, v1.count_flops(full_model(QWEN3), S))
    assert whole["mfu"]["hfu_percent"] is None
