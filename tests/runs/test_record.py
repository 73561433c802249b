"""The run record holds what users read, parses at every moment of a run, and says how it ended."""

import json
import math
import os
import signal
import subprocess
import time
from types import SimpleNamespace

import pytest
import torch
from support.helpers import HANG_S, ROOT, TINY, last_run, make_dataset, run_train, start_train, write_config

import model
from training import evaluate_and_save
from training.checkpoints.saver import Saver
from training.records.rows import Logger

SHIPPED = [  # without those whose model's shape comes with weights that are not here
    path for path in sorted((ROOT / "config").glob("*.py")) if "init_weights" not in path.read_text()
]
SECTIONS = ("MODEL ARCHITECTURE", "TRAINING CONFIGURATION", "HARDWARE", "THEORETICAL PERFORMANCE")
# {type: paths of fields of this type}; a type with None may be null
NONE = type(None)
RECORD = {
    str: """run_name start_time end_time status config.dataset startup_info.optimizer.type
        startup_info.hardware.gpu_name startup_info.hardware.precision startup_info.hardware.parallelism
        startup_info.hardware.peak.source startup_info.software.python startup_info.software.torch
        startup_info.software.numpy startup_info.machine.host startup_info.data.val_fingerprint
        startup_info.attention.asked startup_info.attention.used startup_info.flops.calculation_method""",
    int: """config.gradient_accumulation_steps config.gradient_accumulation_steps_per_gpu
        config.gradient_accumulation_steps_global startup_info.model.total_params
        startup_info.model.trainable_params startup_info.model.non_embedding_params
        startup_info.model.architecture.n_layer startup_info.model.architecture.n_head
        startup_info.model.architecture.n_kv_head startup_info.model.architecture.n_embd
        startup_info.model.architecture.d_ff startup_info.hardware.num_gpus
        startup_info.flops.flops_per_token startup_info.flops.flops_per_token_causal
        startup_info.flops.totals.nanogpt_legacy_v1 startup_info.flops.totals.combined_formula_v2
        startup_info.flops.totals.component_summation_v2025
        startup_info.flops.audit.counted_flops_per_sequence
        startup_info.flops.audit.formula_flops_per_sequence attempt summary.final_iter""",
    float: "summary.time_ms.median summary.tokens_per_sec.median summary.tokens_per_sec_per_gpu.median",
    bool: "startup_info.flops.audit.exact",
    list: """startup_info.optimizer.param_groups attempts training_iterations training_progress eval_steps
        checkpoints events""",
    dict: "superseded",
    (str, NONE): """config.wandb_run_name startup_info.software.cuda startup_info.software.nccl
        startup_info.git.commit startup_info.machine.gpu_reason""",
    (float, NONE): """startup_info.hardware.gpu_memory_gb startup_info.hardware.peak.tflops_per_gpu
        summary.best_val_loss""",
    (list, NONE): "startup_info.machine.gpus",
}
ROW = {
    int: "iter attempt gpu_samples",
    float: "loss time_ms optimizer_ms lr gradients.global_norm",
    (dict, NONE): "mfu memory throttle",
    (str, NONE): "mfu_reason gpu_reason",
    (float, NONE): "sm_clock_mhz power_w temperature_c",
}
MFU = {
    float: """mfu mfu_percent hfu_percent mfu_causal_percent tokens_per_sec tokens_per_sec_per_gpu
        achieved_tflops achieved_tflops_per_gpu flops_achieved hardware_peak_flops hardware_peak_tflops
        attention_to_ffn_ratio""",
    int: """flops_per_token tokens_per_iter num_gpus gqa_group_size attention_flops_per_layer
        ffn_flops_per_layer logit_flops""",
    str: "gpu_name precision architecture calculation_method",
    bool: "sparse_mode",
}
FLAT_ROW = {
    int: "iter",
    float: "loss mfu tokens_per_sec memory_allocated_gb dt_ms",
    str: "memory_kind",
}
EVAL_STEP = {int: "iter", float: "train_loss val_loss lr", str: "time"}
CHECKPOINT = {int: "iter", (float, NONE): "val_loss", str: "path"}


def lacking(content: dict, wanted: dict) -> list[str]:
    """Every field of `wanted` that `content` lacks, or holds with another type."""
    faults = []
    for kind, paths in wanted.items():
        for path in paths.split():
            value: object = content
            for name in path.split("."):
                value = value.get(name, ...) if isinstance(value, dict) else ...
            if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
                faults.append(f"{path} is {value!r}")
    return faults


def parse(text: str) -> dict:
    """JSON by the standard, which has no NaN or Infinity; Python's own parser would take them."""

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


@pytest.fixture
def config(tmp_path):
    dataset = make_dataset(tmp_path / "tokens")
    return write_config(tmp_path / "run.py", **TINY, dataset=dataset, out_dir=tmp_path / "out")


@pytest.fixture
def record(run, config, tmp_path):
    """record(*flags, status=0): the record of a tiny run with these flags, which ended with that status."""

    def record(*flags, status=0) -> dict:
        assert run(config, *flags) == status
        return last_run(tmp_path / "out")

    return record


# --- what a whole run leaves ---


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """(stdout, record, log text, out_dir) of a run with a stated peak, evaluations and checkpoints."""
    root = tmp_path_factory.mktemp("whole")
    dataset, out_dir = make_dataset(root / "tokens"), root / "out"
    settings = dict(max_iters=12, eval_interval=6, peak_tflops=1.0, gradient_accumulation_steps=2)
    more = dict(gradient_log_interval=4, dataset=dataset, out_dir=out_dir)
    done = run_train(write_config(root / "run.py", **{**TINY, **settings, **more}))
    assert done.returncode == 0 and done.stderr == "", done.stderr
    (path,) = out_dir.glob("run_*.json")
    return done.stdout, parse(path.read_text()), path.with_suffix(".log").read_text(), out_dir


def test_record_has_every_field_that_design_names(whole):
    assert lacking(whole[1], RECORD) == []
    for section, fields in (
        ("training_progress", FLAT_ROW),
        ("eval_steps", EVAL_STEP),
        ("checkpoints", CHECKPOINT),
    ):
        assert [fault for entry in whole[1][section] for fault in lacking(entry, fields)] == []


def test_every_row_has_every_field_and_all_but_the_first_an_mfu(whole):
    first, *rest = rows = whole[1]["training_iterations"]
    assert [row["iter"] for row in rows] == list(range(12))
    assert [fault for row in rows for fault in lacking(row, ROW)] == []
    assert first["mfu"] is None and "compilation" in first["mfu_reason"]
    assert [fault for row in rest for fault in lacking(row["mfu"], MFU)] == []
    assert all(row["mfu_reason"] is None for row in rest)


def test_figures_of_one_row_agree_with_each_other(whole):
    row = whole[1]["training_iterations"][-1]
    mfu = row["mfu"]
    tokens = 2 * TINY["batch_size"] * TINY["block_size"]
    assert mfu["tokens_per_iter"] == whole[1]["startup_info"]["tokens_per_iter"] == tokens
    assert mfu["tokens_per_sec"] == pytest.approx(1000 * tokens / row["time_ms"])
    assert mfu["flops_achieved"] == pytest.approx(mfu["tokens_per_sec"] * mfu["flops_per_token"])
    assert mfu["achieved_tflops"] == pytest.approx(mfu["flops_achieved"] / 1e12)
    assert mfu["hardware_peak_flops"] == 1e12 and mfu["hardware_peak_tflops"] == 1.0
    assert mfu["mfu"] == pytest.approx(mfu["flops_achieved"] / 1e12)
    assert mfu["mfu_percent"] == pytest.approx(100 * mfu["mfu"])
    assert 0 < mfu["mfu_causal_percent"] < mfu["mfu_percent"] < 100
    assert mfu["gqa_group_size"] == 2 and mfu["architecture"] == "qwen3" and not mfu["sparse_mode"]
    assert mfu["calculation_method"] == "component_summation_v2025"


def test_gradient_statistics_come_when_due(whole):
    gradients = {row["iter"]: row["gradients"] for row in whole[1]["training_iterations"]}
    due = [i for i, values in gradients.items() if {"grad_mean", "grad_std"} <= set(values)]
    assert due == [0, 4, 8]
    parameters = whole[1]["startup_info"]["model"]["total_params"]
    for i in due:  # the square of the norm is the sum of squares
        mean, std = gradients[i]["grad_mean"], gradients[i]["grad_std"]
        assert gradients[i]["global_norm"] ** 2 == pytest.approx(parameters * (std**2 + mean**2))


def test_equal_gradients_have_a_deviation_of_0_also_where_the_norm_is_rounded_down():
    reading = SimpleNamespace(grad_norm=0.2 * (1 - 1e-6), grad_sum=0.4)
    logger = SimpleNamespace(facts={"total_params": 4})
    assert Logger._gradients(logger, reading)["grad_std"] == 0


def test_flat_progress_repeats_the_rows(whole):
    rows, flat = whole[1]["training_iterations"], whole[1]["training_progress"]
    for row, short in zip(rows[1:], flat, strict=True):  # the first has no MFU
        assert (short["iter"], short["loss"], short["dt_ms"]) == (row["iter"], row["loss"], row["time_ms"])
        assert short["mfu"] == row["mfu"]["mfu"]


def test_evaluations_and_checkpoints_are_listed(whole):
    _, record, _, out_dir = whole
    assert [step["iter"] for step in record["eval_steps"]] == [6, 12]
    assert [saved["iter"] for saved in record["checkpoints"]] == [6, 12]
    losses = [step["val_loss"] for step in record["eval_steps"]]
    assert [saved["val_loss"] for saved in record["checkpoints"]] == losses
    assert record["summary"]["best_val_loss"] == min(losses)
    assert record["checkpoints"][-1]["path"] == str(out_dir / "checkpoints" / "step-00000012")


def test_summary_is_the_median_of_the_rows_after_warm_up(whole):
    rows, summary = whole[1]["training_iterations"], whole[1]["summary"]
    assert summary["final_iter"] == 11 and summary["rows_after_warmup"] == 7
    times = sorted(row["time_ms"] for row in rows[5:])
    assert summary["time_ms"]["median"] == times[3]
    assert summary["time_ms"]["p10"] <= summary["time_ms"]["median"] <= summary["time_ms"]["p90"]
    mfus = sorted(row["mfu"]["mfu_percent"] for row in rows[5:])
    assert summary["mfu_percent"]["median"] == mfus[3]


def test_log_is_what_the_console_showed_with_the_lines_that_users_look_for(whole):
    stdout, _, log, _ = whole
    assert log == stdout
    lines = ("STARTING TRAINING", "Attention backend", "DataLoader", "📍 Iter", "⚡ MFU", "Tokens/s")
    assert [text for text in (*SECTIONS, *lines) if text not in log] == []


# --- figures that are not there ---


def test_a_cpu_has_no_mfu_and_no_clock_and_a_run_without_evaluations_no_best_loss(record):
    content = record("--max_iters=8")
    machine = content["startup_info"]["machine"]
    assert machine["host"] and machine["gpus"] is None and content["summary"]["sm_clock_mhz"] is None
    for found in (machine, content["summary"], *content["training_iterations"]):
        assert found["gpu_reason"] == "the run uses no GPU"
    for name in ("sm_clock_mhz", "power_w", "temperature_c", "throttle"):
        assert all(row[name] is None for row in content["training_iterations"])
    assert content["summary"]["best_val_loss"] is None and content["eval_steps"] == []
    assert content["checkpoints"][0]["val_loss"] is None
    assert all(row["mfu"] is None for row in content["training_iterations"])
    assert all("no peak for a CPU" in row["mfu_reason"] for row in content["training_iterations"][1:])
    assert content["training_progress"] == []
    assert content["startup_info"]["hardware"]["peak"]["tflops_per_gpu"] is None
    assert content["summary"]["mfu_percent"] is None


def test_more_than_100_percent_is_an_error_and_no_figure(record, capfd):
    content = record("--peak_tflops=1e-9")
    for row in content["training_iterations"][1:]:
        assert row["mfu"] is None
        assert "impossible" in row["mfu_reason"] and "peak_tflops" in row["mfu_reason"]
    assert content["summary"]["mfu_percent"] is None
    assert "impossible" in capfd.readouterr().out


def test_sparse_peak_marks_the_record_and_every_row(record, capfd):
    content = record("--peak_tflops=1", "--use_sparse_specs=True")
    assert content["startup_info"]["hardware"]["peak"]["sparse"] is True
    assert all(row["mfu"]["sparse_mode"] is True for row in content["training_iterations"][1:])
    assert "sparse" in capfd.readouterr().out


def test_save_log_to_json_false_leaves_a_log_and_no_json(run, config, tmp_path):
    assert run(config, "--save_log_to_json=False") == 0
    assert not list(tmp_path.glob("out/*.json")) and len(list(tmp_path.glob("out/run_*.log"))) == 1


# --- the clock ---


@pytest.fixture
def slow_by(monkeypatch):
    """slow_by(seconds, function): the function, which takes so much longer by the run's clock."""
    passed, perf_counter = [0.0], time.perf_counter
    monkeypatch.setattr("training.records.clock.time.perf_counter", lambda: perf_counter() + sum(passed))

    def slow_by(seconds, function):
        def slowly(*arguments):
            passed.append(seconds)
            return function(*arguments)

        return slowly

    return slow_by


def test_time_of_an_iteration_leaves_out_evaluations_and_checkpoints(record, monkeypatch, slow_by):
    monkeypatch.setattr(evaluate_and_save, "evaluate", slow_by(1000, evaluate_and_save.evaluate))
    monkeypatch.setattr(Saver, "begin", slow_by(1000, Saver.begin))
    content = record("--eval_interval=2", "--max_iters=8")
    assert len(content["eval_steps"]) == len(content["checkpoints"]) == 4
    assert max(row["time_ms"] for row in content["training_iterations"][1:]) < 100_000


def test_row_over_several_iterations_gives_the_time_of_one(record, monkeypatch, slow_by):
    forward = model.Transformer.forward
    monkeypatch.setattr(model.Transformer, "forward", slow_by(1000, forward))
    content = record("--log_interval=4", "--max_iters=8")
    assert [row["iter"] for row in content["training_iterations"]] == [0, 4, 7]
    times = [row["time_ms"] for row in content["training_iterations"][1:]]
    assert times == pytest.approx([1e6, 1e6], rel=0.1)  # 4e6 and 3e6 for all


# --- how a run ends ---


def test_eval_only_evaluates_once_and_trains_nothing(run, config, tmp_path):
    assert run(config, "--eval_only=True", "--eval_at_start=True", "--eval_interval=1") == 0
    assert not list(tmp_path.glob("out/run_*"))
    (path,) = tmp_path.glob("out/eval_*.json")
    content = parse(path.read_text())
    assert [step["iter"] for step in content["eval_steps"]] == [0]
    assert content["training_iterations"] == content["checkpoints"] == []
    assert content["status"] == "completed"
    assert content["summary"]["best_val_loss"] == content["eval_steps"][0]["val_loss"]
    assert not (tmp_path / "out" / "checkpoints").exists()


def test_eval_at_start_evaluates_before_the_first_update(record):
    content = record("--eval_at_start=True", "--eval_interval=4")
    assert [step["iter"] for step in content["eval_steps"]] == [0, 4]
    assert abs(content["eval_steps"][0]["val_loss"] - math.log(64)) < 0.3


def test_loss_that_is_nan_ends_the_run_with_advice_and_is_null_in_the_record(
    record, tmp_path, monkeypatch, capfd
):
    forward = model.Transformer.forward
    monkeypatch.setattr(model.Transformer, "forward", lambda *args: forward(*args) * float("nan"))
    content, error = record(status=1), capfd.readouterr().err
    assert "the loss of iteration 0 is nan" in error and "learning_rate" in error and "Traceback" not in error
    (path,) = tmp_path.glob("out/run_*.json")
    parse(path.read_text())
    (row,) = content["training_iterations"]
    assert row["loss"] is None and row["gradients"]["global_norm"] is None
    assert content["status"] == "failed" and content["end_time"]


def test_run_in_which_every_update_is_skipped_does_not_go_on_to_the_end(record, capfd):
    """The loss stays a number here, ln 64, while no gradient is: the weights never change again."""
    content = record("--learning_rate=1e6", "--grad_clip=0", "--max_iters=60", status=1)
    error = capfd.readouterr().err
    assert "learning_rate" in error and "Traceback" not in error
    assert content["status"] == "failed" and len(content["training_iterations"]) < 60


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "SIGTERM"])
def test_signal_ends_a_run_as_interrupted(record, monkeypatch, number):
    write = Logger.write

    def write_and_be_interrupted(self, reading, *arguments):
        write(self, reading, *arguments)
        if reading.iteration == 1:
            os.kill(os.getpid(), number)

    monkeypatch.setattr(Logger, "write", write_and_be_interrupted)
    content = record("--max_iters=1000", status=128 + number)
    assert content["status"] == "interrupted" and content["end_time"]
    iterations = [row["iter"] for row in content["training_iterations"]]
    # all ranks stop at one iteration, so not at once, but long before the last
    assert iterations == list(range(len(iterations))) and 2 <= len(iterations) < 200
    assert content["summary"]["final_iter"] == iterations[-1]


ENDLESS = ("--max_iters=1000000", "--always_save_checkpoint=False")


def end(process):
    """SIGKILL to its group, unless it has ended."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


@pytest.mark.history
def test_record_parses_at_every_moment_and_after_kill_9(config, tmp_path):
    process = start_train(config, *ENDLESS, "--log_save_interval=1", stdout=subprocess.DEVNULL)
    reads, rows = 0, -1
    try:
        until = time.monotonic() + HANG_S
        while rows < 40 and time.monotonic() < until:
            for path in tmp_path.glob("out/run_*.json"):
                content = parse(path.read_text())
                assert content["status"] == "running" and len(content["training_iterations"]) >= rows
                reads, rows = reads + 1, len(content["training_iterations"])
    finally:
        end(process)
    assert process.returncode == -signal.SIGKILL and reads > 50 and rows >= 40
    content = last_run(tmp_path / "out")
    assert content["status"] == "running" and content["end_time"] is None
    assert len(content["training_iterations"]) >= rows


# --- dry run ---


def often(path):
    """Deep models take seconds; unit/test_published_models.py counts their FLOPs, too."""
    deep = not path.name.startswith(("full_", "quickstart", "smoke_", "train_"))
    return pytest.param(path, marks=[pytest.mark.slow] * deep, id=path.name)


@pytest.mark.parametrize("path", [often(path) for path in SHIPPED])
def test_dry_run_of_a_shipped_config_reports_and_writes_nothing(run, path, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    assert run(path, "--dry_run=True") == 0
    printed = capfd.readouterr()
    assert all(section in printed.out for section in SECTIONS) and "exact" in printed.out
    assert "STARTING TRAINING" not in printed.out and printed.err == ""
    assert list(tmp_path.iterdir()) == []


def test_dry_run_needs_no_data_and_no_gpu(run, config, capfd):
    assert run(config, "--dry_run=True", "--device=cuda", "--dataset=absent/folder") == 0
    if not torch.cuda.is_available():
        assert not torch.cuda.is_initialized()


def test_compile_time_of_a_resumed_run_is_in_no_mfu(run, tmp_path):
    """A resume at an iteration that log_interval does not divide starts with a row of its own."""
    make_dataset(tmp_path / "tokens")
    flags = [f"--out_dir={tmp_path / 'out'}", "--peak_tflops=1.0", "--log_interval=10"]
    path = write_config(tmp_path / "run.py", **{**TINY, "dataset": str(tmp_path / "tokens")})
    assert run(path, *flags, "--max_iters=5") == 0
    first = last_run(tmp_path / "out")
    assert run(path, *flags, "--max_iters=25", "--init_from=resume") == 0
    rows = last_run(tmp_path / "out")["training_iterations"]
    assert [row["iter"] for row in first["training_iterations"]] == [0, 4]
    assert [row["iter"] for row in rows] == [0, 4, 5, 10, 20, 24]
    assert [row["iter"] for row in rows if not row["mfu"]] == [0, 5]
    assert all("compilation" in row["mfu_reason"] for row in rows if not row["mfu"])
