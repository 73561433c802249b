"""The benchmarks: the quick suite as it really runs on the CPU, with its peer and its ceiling, and each part
by itself. What only a GPU can show is its speed."""

import argparse
import hashlib
import io
import itertools
import json
import os
import re
import statistics
import sys
import types

import pytest
import torch
import torch.nn.functional as functional
from support.helpers import ROOT, TINY, launch, make_dataset, write_config

import model_builder
from bench import peer, random_tokens, roofline, throughput
from bench.figures import combine, measure, note
from bench.peers.hugging_face import Transformers, build, make_step
from bench.peers.program import check_parameters
from bench.plan import Entry, iteration_flags, make_plan
from bench.process import end_with_status, failure_reason, from_root, run_process
from bench.runner import stated_peak
from bench.suites import SUITES, Variant
from bench.table import about_this, heading
from common.errors import UserError
from common.processes import is_running
from mfu_versions import model_builder_v1, model_builder_v3
from model import rotary_angles
from model_config import model_config as make_model_config
from training.batches.loader import Loader
from training.batches.sources import make_windows, open_sources
from training.batches.windows import inputs_and_targets
from training.configuration.files_and_flags import load_config
from training.configuration.keys import TrainConfig
from training.process.world import World

CPU = torch.device("cpu")
SHAPE = {key: TINY[key] for key in ("n_layer", "n_embd", "d_ff", "vocab_size", "block_size", "batch_size")}
SIZES = [f"--{key}={value}" for key, value in SHAPE.items()]
ITERS, WARMUP = 8, 4
SHORT = ["--suite", "quick", f"--iters={ITERS}", f"--warmup={WARMUP}"]


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    return make_dataset(tmp_path_factory.mktemp("bench") / "tokens")


@pytest.fixture(scope="module")
def quick(tmp_path_factory, tokens):
    """(output, table.json, table.md) of the quick suite, as a user starts it."""
    folder = tmp_path_factory.mktemp("quick") / "output"
    command = ["-m", "bench.throughput", *SHORT, "--dataset", tokens, "--output", folder]
    (printed,) = launch([[*command, "--peer", "transformers", "--roofline", *SIZES]])
    return printed, json.loads((folder / "table.json").read_text()), (folder / "table.md").read_text()


def by_kind(content: dict, kind: str) -> list[dict]:
    return [entry for entry in content["entries"] if entry["kind"] == kind]


# --- the quick suite ---


@pytest.mark.slow
def test_figures_are_those_of_the_run_records(quick):
    variants = by_kind(quick[1], "variant")
    assert [entry["name"] for entry in variants] == [variant.name for variant in SUITES["quick"]]
    for entry in variants:
        with open(entry["facts"]["record"]) as file:
            record = json.load(file)
        assert record["status"] == "completed" and not record["checkpoints"] and not record["eval_steps"]
        rows = record["training_iterations"]
        assert rows[-1]["iter"] == WARMUP + ITERS
        timed = [row for row in rows if row["iter"] > WARMUP]
        result = entry["result"]
        assert result["rows"] == len(timed) == 4
        for name in ("tokens_per_sec", "time_ms"):
            assert result[name]["median"] == statistics.median(row[name] for row in timed)
        for name in ("mfu_percent", "mfu_causal_percent"):
            assert result[name]["median"] == statistics.median(row["mfu"][name] for row in timed)
        assert result["first_step_s"] == rows[0]["time_ms"] / 1000
        assert result["max_allocated_gb"] is None and result["power_w"] is None  # a CPU


@pytest.mark.slow
def test_peer_is_the_same_model_by_the_same_peak_and_the_ceiling_another_ratio(quick):
    variant, (peer,) = by_kind(quick[1], "variant")[0], by_kind(quick[1], "peer")
    assert variant["peers"] == [peer["name"]]
    assert peer["facts"]["class"] == "Qwen3ForCausalLM"
    assert peer["facts"]["parameters"] == variant["facts"]["parameters"]
    assert peer["facts"]["peak_tflops"] == pytest.approx(variant["facts"]["peak"]["tflops_per_gpu"])
    first = [entry["runs"][0]["measurement"]["first_loss"] for entry in (variant, peer)]
    assert first[0] == pytest.approx(first[1], abs=0.3)  # both start near ln(vocabulary)
    rates = [entry["result"]["tokens_per_sec"]["median"] for entry in (variant, peer)]
    assert variant["result"]["times_peer"] == pytest.approx(rates[0] / rates[1])
    mfus = [entry["result"]["mfu_percent"]["median"] for entry in (variant, peer)]
    assert mfus[0] / mfus[1] == pytest.approx(rates[0] / rates[1])
    ceilings = {entry["name"]: entry["result"]["ceiling"] for entry in by_kind(quick[1], "roofline")}
    for entry in by_kind(quick[1], "variant"):
        result, ceiling = entry["result"], ceilings[entry["roofline"]]
        rate = result["tokens_per_sec_per_gpu"]["median"]
        assert result["ceiling_percent"] == pytest.approx(100 * rate / ceiling["tokens_per_sec"])
        assert ceiling["mfu_percent"] > ceiling["mfu_causal_percent"] > 0


@pytest.mark.slow
def test_table_has_the_promised_columns_and_a_row_for_each(quick):
    printed, content, document = quick
    assert document.startswith(f"## {content['date'][:10]}, ") and document.rstrip("\n") in printed
    rows = [line.strip("|").split("|") for line in document.splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in row] for row in rows]
    assert rows[0][:4] == ["variant", "GPUs", "MFU %", "causal %"] and rows[0][-1] == "note"
    assert {len(row) for row in rows} == {14}
    assert [row[0] for row in rows[2:]] == [entry["name"] for entry in content["entries"]]
    assert content["command"] in document
    for entry in content["entries"]:
        assert printed.count(f"] {entry['name']}: started") == len(entry["runs"]) == 1
        assert entry["runs"][0]["command"].startswith("python ")
    for name in ("software", "git", "arguments", "date"):
        assert content[name]


# --- variants that fail, and repeats ---


@pytest.mark.slow
def test_failing_variants_are_rows_and_the_others_still_run(tmp_path, tokens, monkeypatch, capsys):
    config = str(write_config(tmp_path / "run.py", **TINY, peak_tflops=1.0))
    variants = (
        Variant("typo", config, {"learing_rate": 1.0}),
        Variant("fails", config, {"vocab_size": 8}),  # fewer than the dataset's tokens have
        Variant("works", config),
    )
    monkeypatch.setitem(SUITES, "quick", variants)
    folder = tmp_path / "output"
    command = [*SHORT, "--repeats=2", f"--dataset={tokens}", f"--output={folder}"]
    assert throughput.main(command) == 1
    typo, fails, works = json.loads((folder / "table.json").read_text())["entries"]
    assert "did you mean 'learning_rate'" in typo["runs"][0]["reason"] and typo["result"] is None
    assert "contains token id" in fails["runs"][0]["reason"] or "vocabulary" in fails["runs"][0]["reason"]
    assert [run["reason"] for run in works["runs"]] == [None, None]
    assert works["result"]["runs"] == 2 and works["result"]["rows"] == 8
    started = re.findall(r"\] (\w+): started", capsys.readouterr().out)
    assert started == ["typo", "fails", "works"] * 2  # interleaved
    document = (folder / "table.md").read_text()
    assert (
        "typo failed: unknown setting 'learing_rate'" in document and fails["runs"][0]["reason"] in document
    )
    # the same command continues: it runs again what failed, or has no result
    for name in ("table.json", "runs/works.2/result.json"):
        (folder / name).unlink()
    assert throughput.main(command) == 1
    output = capsys.readouterr().out
    assert "1 of 6 runs are finished" in output
    assert re.findall(r"\] (\w+): started", output) == ["typo", "fails"] + ["typo", "fails", "works"]
    again = json.loads((folder / "table.json").read_text())["entries"][2]
    assert again["runs"][0] == works["runs"][0] and again["runs"][1]["folder"] == f"{folder}/runs/works.3"
    # but nobody mixes its results with those of another command, or of other code
    for content in ({"command": "python other.py"}, {"git": {"commit": "1234"}}):
        saved = json.loads((folder / "table.json").read_text())
        (folder / "table.json").write_text(json.dumps(saved | content))
        with pytest.raises(UserError, match="by another command or other code; choose another --output"):
            throughput.main(command)
        (folder / "table.json").write_text(json.dumps(saved))


def test_variants_are_chosen_by_name_or_by_what_is_in_it(tmp_path):
    def found(*arguments):
        return throughput.chosen(throughput.parse(list(arguments))[0])

    def names(*texts):
        _, variants = found("--suite=communication", *(f"--variant={text}" for text in texts))
        return [variant.name for variant in variants]

    assert names() == [variant.name for variant in SUITES["communication"]]
    assert names("FSDP, bf16", "one GPU") == ["one GPU", "FSDP, bf16"]  # whole names, in the suite's order
    assert names("fp8") == ["one GPU, fp8"] + [f"{strategy}, fp8" for strategy in ("DDP", "ZeRO-1", "FSDP")]
    with pytest.raises(UserError, match="'ZeRO-2' is in no name"):
        names("DDP", "ZeRO-2")
    # any config is a suite of one
    path = str(write_config(tmp_path / "mine.py", **TINY))
    assert found("--config", path) == ("mine", (Variant("mine", path),))
    with pytest.raises(UserError, match="a --config is one variant"):
        found("--config", path, "--variant=DDP")
    for wrong in (["--config", path, "--suite", "quick"], ["--dataset", "random"]):
        with pytest.raises(SystemExit):
            found(*wrong)


def test_run_that_takes_too_long_is_stopped(tmp_path):
    code = "import os, time; print(os.getpid(), flush=True); print('error: no', flush=True); time.sleep(60)"
    ended = run_process([sys.executable, "-c", code], tmp_path / "log", timeout_s=5)
    assert ended.reason.startswith("not done after 5 s")
    assert not is_running(int((tmp_path / "log").read_text().split()[0]))


def test_each_run_gets_an_empty_compile_cache_unless_it_is_to_be_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "mine")
    command = [sys.executable, "-c", "import os; print(os.environ['TORCHINDUCTOR_CACHE_DIR'])"]
    said = []
    for keep in (False, False, True):
        assert run_process(command, tmp_path / "log", 60, keep).reason is None
        said.append((tmp_path / "log").read_text().strip())
    assert len(set(said)) == 3 and said[2] == "mine" and not os.path.exists(said[0])


@pytest.mark.parametrize(
    "status, output, reason",
    [
        (0, "error: no", None),
        (1, "Traceback\n  x\nerror: out of GPU memory; lower\nCUDA out", "out of GPU memory; lower"),
        (1, "[rank 0] error: first\n[rank 1] error: second\nE torchrun\nRoot Cause", "first"),
        (-9, "Iter 1\n", "killed by SIGKILL; last line: Iter 1"),
        (1, "", "it said nothing"),
    ],
)
def test_reason_of_a_failure_is_its_error_line(status, output, reason):
    found = failure_reason(status, io.StringIO(output))
    assert found == reason or found.startswith(reason)


# --- numbers ---


def row(iteration: int, ms: float, mfu: float | None = 50.0) -> dict:
    found = {"iter": iteration, "time_ms": ms, "loss": 1.0, "mfu_reason": None if mfu else "no peak"}
    found |= {"tokens_per_sec": 1e6 / ms, "tokens_per_sec_per_gpu": 5e5 / ms}
    found["mfu"] = mfu and {"mfu_percent": mfu, "mfu_causal_percent": mfu / 2}
    return found | {"memory": {"max_allocated_gb": float(iteration), "max_reserved_gb": 9.0}}


def test_first_row_and_warmup_are_in_no_median():
    rows = [row(0, 9000.0, None), row(5, 500.0), row(10, 100.0), row(15, 120.0), row(20, 110.0)]
    measured = measure(rows, warmup=5)
    assert measured["first_step_s"] == 9.0
    assert measured["time_ms"] == [100.0, 120.0, 110.0]
    assert measured["max_allocated_gb"] == 20.0
    with pytest.raises(ValueError, match="no row begins after 20 iterations"):
        measure(rows, warmup=20)
    with pytest.raises(ValueError, match="no rows"):
        measure([], warmup=0)


def test_repeats_give_medians_and_percentiles_of_all_rows():
    runs = []
    for offset, count in ((0.0, 4), (100.0, 3), (10.0, 4)):
        rows = [row(0, 1.0, None), *(row(i, 100.0 + offset + i, None) for i in range(1, count + 1))]
        for each in rows:  # a clock in every second row; the first row is not timed
            each["memory"] = {"max_allocated_gb": 10.0 + offset, "max_reserved_gb": 20.0}
            each["sm_clock_mhz"] = (None, 1500.0 + offset, None, 1502.0 + offset, 1.0)[(each["iter"] + 4) % 5]
        runs.append({"measurement": measure(rows, 0), "reason": None})
    runs.append({"measurement": None, "reason": "failed"})
    result = combine(runs)
    assert (result["runs"], result["rows"]) == (3, 11)
    assert result["time_ms"] == {"median": 112.0, "p10": 102.0, "p90": 202.0}
    assert (result["mfu_percent"], result["mfu_reason"]) == (None, "no peak")
    assert result["sm_clock_mhz"] == {"median": 1510.0, "p10": 1500.0, "p90": 1600.0}
    assert (result["max_allocated_gb"], result["max_reserved_gb"]) == (110.0, 20.0)  # of the worst run
    assert (result["power_w"], result["gpu_reason"]) == (None, None)
    assert combine(runs[3:]) is None


def test_a_gpu_run_without_clocks_says_why_in_its_row():
    rows = [row(0, 1.0), row(1, 100.0) | {"sm_clock_mhz": None, "gpu_reason": "no driver"}]
    runs = [{"measurement": measure(rows, 0), "reason": None}]
    notes = [note([Entry("a", "b", [], 1, on, runs=runs, result=combine(runs))]) for on in ("cuda", "cpu")]
    assert notes == ["no driver", ""]


@pytest.mark.parametrize("iters, warmup", [(20, 10), (8, 4), (1, 0), (7, 3), (200, 20), (5, 0)])
def test_rows_do_not_straddle_warmup_and_timing(iters, warmup):
    flags = dict(flag.removeprefix("--").split("=") for flag in iteration_flags(iters, warmup))
    total, interval = int(flags["max_iters"]), int(flags["log_interval"])
    assert total == 1 + warmup + iters
    assert warmup % interval == 0 and iters % interval == 0
    assert interval == 1 or iters // interval >= 4


# --- what is planned ---


@pytest.mark.parametrize("name, variant", [(name, variant) for name in SUITES for variant in SUITES[name]])
def test_every_variant_is_a_configuration_that_loads(name, variant):
    overrides = [f"--{key}={value}" for key, value in variant.overrides.items()]
    processes = 8 if variant.processes == "all" else variant.processes
    config = load_config([str(ROOT / variant.config), *overrides, "--dry_run=True"], processes)
    assert config.model_config()
    assert len({variant.name for variant in SUITES[name]}) == len(SUITES[name])


def test_variants_share_a_peer_and_a_ceiling_only_where_these_are_the_same():
    config = "config/quickstart.py"
    variants = (
        Variant("plain", config),
        Variant("other kernel", config, {"attention_backend": "manual"}),
        Variant("larger", config, {"batch_size": 32}),
        Variant("two processes", config, {"use_zero1": True}, 2),
    )
    plan = make_plan(variants, [], None, gpus=0, programs=[Transformers()], roofline=True)
    entries = {entry.name: entry for entry in plan}
    peers = [entries[variant.name].peers[0] for variant in variants]
    ceilings = [entries[variant.name].roofline for variant in variants]
    assert peers[0] == peers[1] and len(set(peers)) == 3
    assert ceilings[0] == ceilings[3] and len(set(ceilings)) == 3
    assert entries[peers[3]].processes == 2 and entries[ceilings[3]].processes == 1
    keys = {"device": "cuda", "dtype": "bfloat16"}
    fp8 = [Variant(one, config, {**keys, "low_precision": one}) for one in ("none", "fp8_tensorwise")]
    bf16, fp8 = [e for e in make_plan(tuple(fp8), [], None, 1, roofline=True) if e.kind == "variant"]
    assert bf16.problem is fp8.problem is None and bf16.roofline != fp8.roofline
    order = [entry.kind for entry in plan]
    assert order == ["roofline"] * 3 + ["variant", "peer", "variant", "variant", "peer", "variant", "peer"]


@pytest.mark.parametrize(
    "gpus, processes, problem", [(1, 2, "needs 2 or more GPUs"), (8, 8, None), (0, 2, None)]
)
def test_strategies_take_all_gpus(gpus, processes, problem):
    one, *several = make_plan(SUITES["strategies"], [], None, gpus)
    assert one.processes == 1 and one.problem is None
    for entry in several:
        assert entry.processes == processes
        assert entry.problem is None if problem is None else entry.problem.startswith(problem)


@pytest.mark.parametrize(
    "flags, message",
    [
        ([*SHORT, "--max_iters=5"], "use --iters"),
        ([*SHORT, "--n_layers=2"], "did you mean 'n_layer'"),
        ([*SHORT, "8"], "written --key=value"),
        ([*SHORT, "--eval_interval=5"], "benchmark's to set"),
        (["--suite=micro_batch", "--batch_size=8"], "'16 x 2048' would be the same as another.* --config"),
    ],
)
def test_settings_that_cannot_go_to_all_variants_are_refused(flags, message, tmp_path, capsys):
    assert end_with_status(throughput.main, [*flags, f"--output={tmp_path / 'out'}"]) == 2
    assert re.search(message, capsys.readouterr().err) and not list(tmp_path.glob("out/runs/*"))


def test_settings_in_which_variants_of_one_config_do_not_differ_may_go_to_all():
    for suite, flag in (("micro_batch", "--gradient_accumulation_steps=2"), ("models", "--batch_size=8")):
        assert len(make_plan(SUITES[suite], [flag], None, 0)) == len(SUITES[suite])


def test_another_formula_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(model_builder, "CALCULATION_METHOD", model_builder_v1.CALCULATION_METHOD)
    assert end_with_status(throughput.main, SHORT) == 2
    assert "cp mfu_versions/model_builder_v3.py" in capsys.readouterr().err


def test_random_tokens_are_the_same_on_every_machine_in_documents_of_the_studys_length(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(random_tokens, "ROOT", tmp_path)
    random_tokens.main(["70000"])
    folder = tmp_path / "data" / "random-70000"
    assert capsys.readouterr().out == f"{folder}: --dataset=random-70000\n"
    assert sorted(folder.parent.iterdir()) == [folder]
    for name, digest in (("train.bin", "208958571295141f"), ("val.bin", "29e146e743f213c4")):
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest().startswith(digest)
    flags = ["--vocab_size=70000", f"--dataset={folder}", "--doc_masking=True", "--block_size=128"]
    config = load_config([str(ROOT / "config/smoke_qwen3.py"), *flags])
    (source,) = open_sources(config, scan=True)
    assert source.meta["dtype"] == "uint32" and source.splits["train"].read(0, 10_000).max() > 65_536
    ends = sum(len(part) for part in source.documents["train"].ends())
    assert source.splits["train"].total / ends == pytest.approx(random_tokens.DOCUMENT_TOKENS, rel=0.05)
    assert make_windows([source], config)["train"].count > 1000
    with pytest.raises(SystemExit):
        random_tokens.main(["1"])


# --- the peer ---


@pytest.mark.parametrize("flags", [[], ["--bias=True"]], ids=["as it is", "with biases"])
@pytest.mark.parametrize(
    "name", ["full_gpt2_1.36b", "full_llama_1.36b", "smollm2_360m", "qwen2.5_1.5b", "full_qwen3_1.8b_optimal"]
)
def test_peer_has_our_number_of_parameters(name, flags):
    transformers = pytest.importorskip("transformers")
    if flags and "qwen" in name:
        pytest.skip("Qwen2 and Qwen3 have no bias in their feed-forward part")
    model_config = load_config([str(ROOT / f"config/{name}.py"), *flags]).model_config()
    with torch.device("meta"):
        theirs = build(transformers, model_config)
    ours = model_builder.build_model(model_config).count_parameters()["total"]
    assert check_parameters(theirs, model_config, "transformers") == ours
    assert {parameter.dtype for parameter in theirs.parameters()} == {torch.float32}
    assert theirs.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("preset", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("factor", [None, 4.0])
def test_peer_has_our_head_width_biases_and_positions(preset, factor):
    transformers = pytest.importorskip("transformers")
    scaling = factor and {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": 16}
    sizes = dict(n_layer=2, n_head=4, n_kv_head=2, n_embd=64, d_ff=96, vocab_size=97, block_size=64)
    config = make_model_config(preset, **sizes, head_dim=24, rope_scaling=scaling)
    theirs = build(transformers, config)
    assert check_parameters(theirs, config, "transformers")
    expected = rotary_angles(64, 24, config.rope_theta, scaling=config.rope_scaling)
    cos, sin = theirs.model.rotary_emb(torch.zeros(1), torch.arange(64)[None])
    torch.testing.assert_close(cos[0, :, :12], expected.cos, rtol=0, atol=1e-5)
    torch.testing.assert_close(sin[0, :, :12], expected.sin, rtol=0, atol=1e-5)


def test_peer_that_would_be_another_model_is_refused():
    transformers = pytest.importorskip("transformers")
    quickstart = str(ROOT / "config/quickstart.py")
    with torch.device("meta"):
        biased = load_config([quickstart, "--bias=True"]).model_config()
        with pytest.raises(UserError, match="no Hugging Face model has both qk_norm and biases"):
            build(transformers, biased)
        mixed = load_config([quickstart, "--normalization=layernorm"]).model_config()
        with pytest.raises(UserError, match="no Hugging Face model has normalization=.layernorm"):
            build(transformers, mixed)


# --- the peer's batches ---


@pytest.fixture(scope="module")
def documents(tmp_path_factory):
    """Two datasets in which the id 0 ends a document."""
    root = tmp_path_factory.mktemp("documents")
    return [make_dataset(root / name, seed=seed, eot_id=0) for name, seed in (("a", 1), ("b", 2))]


@pytest.mark.parametrize("kind", ["stream", "packed", "mixture"])
def test_peer_trains_on_the_very_batches_of_train_py(documents, tmp_path, monkeypatch, run, kind):
    pytest.importorskip("transformers")
    mixture = ",".join(f"{folder}:{weight}" for folder, weight in zip(documents, (0.7, 0.3), strict=True))
    dataset = mixture if kind == "mixture" else documents[0]
    packing = "truncate" if kind == "packed" else "stream"
    config = write_config(tmp_path / "config.py", **TINY, dataset=dataset, packing=packing)
    # a document has about 43 tokens, so a window of 65 has padding
    flags = [str(config), "--max_iters=3", "--block_size=64", f"--out_dir={tmp_path / 'out'}"]
    batches, next_batch = [], Loader.next

    def noted(loader):
        batches.append(next_batch(loader))
        return batches[-1]

    monkeypatch.setattr(Loader, "next", noted)
    assert run(*flags) == 0 and peer.main(flags) == 0
    ours, theirs = batches[:3], batches[3:]
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one[0], other[0]) and torch.equal(one[1], other[1])
    assert any((y < 0).any() for _, y in ours) == (kind == "packed")  # padding


def test_peer_counts_the_targets_that_we_count():
    """Every token's target, also the last one's of a window; no padding."""
    transformers = pytest.importorskip("transformers")
    config = TrainConfig(**{**TINY, "batch_size": 2, "gradient_accumulation_steps": 2})
    torch.manual_seed(0)
    model = build(transformers, config.model_config())
    x, y = inputs_and_targets(torch.randint(1, 64, (2, 2, TINY["block_size"] + 1)))
    y[0, 0, 20:] = ~0
    expected = []
    for ids, targets in zip(x, y, strict=True):
        logits = model(input_ids=ids).logits.flatten(0, 1).float()
        expected.append(functional.cross_entropy(logits, targets.flatten(), ignore_index=~0).item())
    loss = make_step(model, config, World(0, 0, 1, CPU))(x, y, 1e-3)
    assert loss.item() == pytest.approx(statistics.mean(expected), rel=1e-5)


# --- the ceiling ---


@pytest.mark.parametrize("name", ["full_gpt2_1.36b.py", "full_qwen3_1.8b_optimal.py"])
def test_ceiling_times_every_matmul_that_mfu_counts(name):
    config = load_config([str(ROOT / "config" / name)])
    shapes = roofline.matmul_shapes(config.model_config())
    flops = sum(2 * config.block_size * K * N * count for (_, K, N), count in shapes.items())
    counted = model_builder_v3.count_flops(config.model_config(), config.block_size)["components"]
    scores = ("attention_scores", "attention_context")
    assert flops == sum(count for part, count in counted.items() if part not in scores)


def test_low_precision_times_the_matmuls_that_it_covers_in_fp8(tokens):
    config = load_config([str(ROOT / "config/quickstart.py"), *SIZES, "--peak_tflops=1"])
    layers = ["qkv", "out", "up", "down"]
    for low, scope, expected in (
        ("none", "layers", []),
        ("fp8_tensorwise", "layers", layers),
        ("fp8_tensorwise", "layers_and_head", [*layers, "lm_head"]),
    ):
        asked = types.SimpleNamespace(low_precision=low, low_precision_scope=scope, device="cuda")
        names = [name for name, _, _ in roofline.matmul_shapes(config.model_config())]
        assert [name for name in names if roofline.runs_in_fp8(name, asked)] == expected
    for dtype in ("fp8", "float32"):
        shapes = {name: call().shape for name, call in roofline.products(32, 64, 16, dtype, CPU)}
        assert shapes == {"forward": (32, 16), "dgrad": (32, 64), "wgrad": (16, 64)}


def test_rates_are_of_counted_flops(monkeypatch):
    monkeypatch.setattr(roofline, "seconds_per_call", lambda call, *others: call() is None or 0.5)
    config = load_config([str(ROOT / "config/quickstart.py"), "--batch_size=2", "--peak_tflops=1"])
    measured = roofline.measure(config, CPU)
    for each in measured["matmuls"]:
        assert set(each["tflops"].values()) == {2 * each["M"] * each["K"] * each["N"] / 0.5 / 1e12}
        assert each["M"] == 2 * config.block_size and each["in_ceiling"]
    forward = 4 * 4 * 48 * 2 * (128 * 128 / 2) / 0.5 / 1e12  # 4 heads of 48, half of the scores, 2 sequences
    rates = measured["attention"]["causal_tflops"]
    assert rates == pytest.approx({"forward": forward, "backward": 2 * forward})
    times = sum(3 * 0.5 * each["count"] for each in measured["matmuls"]), 2 * 0.5 * config.n_layer
    found = measured["ceiling"]
    assert (found["matmul_seconds"], found["attention_seconds"]) == times
    assert found["tokens_per_sec"] == found["tokens_per_sec_per_gpu"] == measured["tokens"] / sum(times)
    flops = model_builder_v3.count_flops(config.model_config(), config.block_size)["flops_per_token"]
    assert found["mfu_percent"] == pytest.approx(100 * found["tokens_per_sec"] * flops / 1e12)
    assert roofline.lines(measured)[-1].startswith("ceiling ")


def test_a_call_is_timed_by_its_median_sample(monkeypatch):
    clock = types.SimpleNamespace(now=0.0)
    lasts = itertools.chain([100.0], itertools.cycle([1.0, 1.0, 7.0]))

    def call():
        clock.now += next(lasts)

    monkeypatch.setattr(roofline.time, "perf_counter", lambda: clock.now)
    assert roofline.seconds_per_call(call, CPU, 0.1) == 1.0


def test_a_ceiling_takes_the_matmuls_that_would_run():
    config = load_config([str(ROOT / "config/quickstart.py"), *SIZES])
    seconds = {"forward": 0.1, "dgrad": 0.2, "wgrad": 0.3}
    matmuls = [{"count": 2, "in_ceiling": used, "seconds": seconds} for used in (True, False)]
    attention = {"count": 2, "seconds": {"forward": 0.1, "backward": 0.3}}
    peak = types.SimpleNamespace(flops=1e9, tflops=1e-3, source="stated", reason=None)
    found = roofline.ceiling(config, 1000, matmuls, attention, peak)
    assert found["tokens_per_sec"] == pytest.approx(1000 / 2.0)


def test_a_ceiling_is_measured_within_its_budget(monkeypatch):
    clock = types.SimpleNamespace(now=0.0, calls=0)

    def call():
        clock.now, clock.calls = clock.now + 0.01, clock.calls + 1

    monkeypatch.setattr(roofline.time, "perf_counter", lambda: clock.now)
    roofline.seconds_per_call(call, CPU, 1.2)
    assert clock.now == pytest.approx(1.2, abs=0.1)  # with a warm-up of a quarter


def test_records_hold_no_folder_of_the_machine(tmp_path, monkeypatch):
    assert from_root(ROOT / "out-bench/new") == "out-bench/new"
    assert from_root(tmp_path) == str(tmp_path)
    options = argparse.Namespace(suite=None, variant=[], config=ROOT / "config/quickstart.py", nproc=1)
    monkeypatch.chdir(tmp_path)  # the plan is made from anywhere
    (entry,) = make_plan(throughput.chosen(options)[1], [], None, 0)
    assert entry.problem is None and entry.argv[0] == "config/quickstart.py"


def test_a_table_has_one_peak_for_each_dtype():
    def entry(kind, name, dtype, **results):
        return Entry(kind, name, [], 1, "cuda", dtype=dtype, **results)

    peak = {"tflops_per_gpu": 700.0, "measured": True, "source": "measured: a GEMM"}
    facts = {"peak": peak, "hardware": {"gpu_name": "H200", "peak": peak}, "software": {"torch": "2.11"}}
    first = entry("variant", "a", "bfloat16", facts=facts)
    kinds = (("variant", "bfloat16"), ("peer", "bfloat16"), ("variant", "float16"))
    others = [entry(kind, f"{kind} in {dtype}", dtype) for kind, dtype in kinds]
    given = [stated_peak(other, [first, *others]) for other in others]
    assert given == [["--peak_tflops=700.0"], ["--peak_tflops=700.0"], []]
    ceiling = {"ceiling": {"peak_tflops": 650.0, "peak_source": "measured: a GEMM"}}
    assert stated_peak(first, [entry("roofline", "c", "bfloat16", result=ceiling)]) == ["--peak_tflops=650.0"]
    others[0].facts = facts | {"hardware": {"peak": {**peak, "source": "stated by peak_tflops"}}}
    content = about_this("bench.throughput", [])
    lines = heading(content, "suite", [first, *others])
    assert lines[0].endswith(", H200, suite") and lines[4].startswith("torch 2.11; commit ")
    assert lines[5:] == ["Peak: 700 TFLOPS in bfloat16, measured: a GEMM."]


def test_software_of_a_bench_calls_the_processor_no_gpu():
    facts = about_this("bench.throughput", [])["software"]
    assert facts["cpu_name"] and "gpu_name" not in facts and facts["torch"]
