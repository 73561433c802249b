"""tools.profile as a user runs it, on the CPU: the whole way from a config to the table, and what profiling
must leave as it is."""

import json

import pytest
from support.helpers import TINY, last_run, make_dataset, run_in_one_launch, write_config

from common.command import FAILED, USER_ERROR, run_command
from tools.profile import __main__ as tool
from tools.profile import breakdown
from tools.profile.parts import COMMUNICATION
from tools.profile.report import analyze, lines
from training.configuration.flags import take_flags
from training.records.profiler import ITERATIONS, TIMES, facts_path, trace_path

PLAIN = {"time_ms": {"median": 10.0}, "mfu_percent": {"median": 12.0}, "sm_clock_mhz": None}
LAYERS = ("qkv", "out", "up", "down", "head")
PRODUCTS = {f"{layer} {product}" for layer in LAYERS for product in ("forward", "dgrad", "wgrad")}
RANGES = {"attention forward", "attention backward", "add_norm", "heads", "swiglu", "cross_entropy"}


@pytest.fixture
def config(tmp_path, monkeypatch):
    # a busy machine may stop the process between the two clocks that are compared, of so short a window
    monkeypatch.setattr(breakdown, "TOLERANCE", 0.5)
    keys = {**TINY, "dataset": make_dataset(tmp_path / "tokens"), "max_iters": ITERATIONS}
    return write_config(tmp_path / "tiny.py", **keys)


def profiled(config, output, *flags, status=0):
    assert run_command(tool.main, [str(config), f"--output={output}", *flags]) == status
    return json.loads((output / "profile.json").read_text()) if status == 0 else None


def check(content):
    found, falls = content["profiled"], content["waterfall"]
    assert found["adds_up"] and found["sum_ms"] == pytest.approx(found["wall_ms"])
    assert sum(row["ms"] for row in found["parts"]) == pytest.approx(found["wall_ms"])
    parts = {row["part"]: row for row in found["parts"]}
    assert PRODUCTS | RANGES <= {*parts} and all(parts[name]["tflops"] > 0 for name in PRODUCTS)
    assert 100 - sum(step["points"] or 0 for step in falls["steps"]) == pytest.approx(falls["mfu_percent"])
    assert content["unprofiled"]["mfu_percent"] > 0


def test_a_profile_adds_up_and_leaves_its_files(config, tmp_path, run, monkeypatch, capsys):
    """It trains in this process: what bench.throughput would do."""

    def run_trial(arguments, folder):
        flags, _ = take_flags(arguments, ("dataset",))
        assert run(config, *flags, f"--out_dir={folder}") == 0
        return [{"kind": "variant", "runs": [{"reason": None, "folder": str(folder)}], "result": PLAIN}]

    monkeypatch.setattr(tool, "run_trial", run_trial)
    out = tmp_path / "out"
    content = profiled(config, out, "--peak_tflops=0.5", "--n_layer=1", "--no-roofline")
    check(content)
    assert content["roofline_reason"] == "not asked for: --no-roofline"
    ran = [last_run(out / name)["config"] for name in ("profiled", "plain")]
    assert [config["profile"] for config in ran] == ["time", None]
    assert ran[1]["batch_size"] == 4
    assert (out / "profile.txt").read_text() in capsys.readouterr().out
    assert trace_path(out / "profiled", TIMES, 0).is_file(), "the Chrome trace stays"


@pytest.mark.slow
def test_the_command_trains_by_bench_throughput_and_measures_the_matmuls_alone(config, tmp_path, capsys):
    out = tmp_path / "out"
    content = profiled(config, out, "--dataset=random", "--peak_tflops=0.5", "--batch_size=2")
    check(content)
    assert content["roofline"]["ceiling"]["matmul_seconds"] > 0 and content["roofline_reason"] is None
    assert content["waterfall"]["steps"][1]["ms"] is not None and "random-64" in content["config"]["dataset"]
    assert len([*out.glob("profiled/runs/*/profile_times_rank0.json.gz")]) == 1, "as docs/profile.md says"
    assert len([*out.glob("plain/runs/*/run_*.json")]) == 1
    profiled(config, out, status=USER_ERROR)
    assert "choose another folder" in capsys.readouterr().err, "its folder has runs"
    profiled(config, tmp_path / "again", "--max_iters=5", status=USER_ERROR)
    assert "max_iters is the benchmark's to set" in capsys.readouterr().err


KINDS = {
    "gpt2": {"arch_preset": "gpt2", "num_key_value_heads": None, "d_ff": None, "dropout": 0.1},
    "fp8": {"low_precision": "fp8_tensorwise", "low_precision_scope": "layers_and_head", "dtype": "bfloat16"},
    "recomputation": {"attention_backend": "manual", "activation_checkpointing": "full", "loss_chunks": 2},
}


@pytest.mark.parametrize(
    "settings",
    [pytest.param(keys, marks=[pytest.mark.slow] * (name != "fp8"), id=name) for name, keys in KINDS.items()],
)
def test_every_kind_of_run_is_known(config, tmp_path, run, settings):
    flags = [f"--{key}={value}" for key, value in {"n_layer": 1, **settings, "profile": "time"}.items()]
    assert run(config, *flags, f"--out_dir={tmp_path}") == 0
    content = analyze(tmp_path, PLAIN, None, "left out")
    assert content["profiled"]["adds_up"]
    assert content["waterfall"]["unit"] == "ms", "a CPU has no peak"
    assert "--peak_tflops" in "\n".join(lines(content))
    recomputed = [row["part"] for row in content["profiled"]["parts"] if row["part"].endswith("recompute")]
    assert bool(recomputed) == ("activation_checkpointing" in settings)


def test_a_run_that_ends_before_the_recording_says_so(config, tmp_path, run, capfd):
    flags = "--profile=time", f"--max_iters={ITERATIONS - 1}", f"--out_dir={tmp_path / 'out'}"
    assert run(config, *flags) == 0
    assert f"--max_iters={ITERATIONS}" in capfd.readouterr().out


@pytest.mark.slow
def test_profiling_changes_no_number_of_the_training(config, tmp_path, run):
    for name, value in (("without", None), ("with", "time")):
        assert run(config, f"--profile={value}", f"--out_dir={tmp_path / name}") == 0
    rows = (last_run(tmp_path / name)["training_iterations"] for name in ("without", "with"))
    losses = [[row["loss"] for row in each] for each in rows]
    assert len(losses[0]) == ITERATIONS and losses[0] == losses[1]
    assert facts_path(tmp_path / "with", 0).is_file() and not facts_path(tmp_path / "without", 0).exists()


def test_two_ranks_leave_their_traces_and_the_table_shows_communication(config, tmp_path):
    run_in_one_launch(tmp_path, [[config, "--profile=time", f"--out_dir={tmp_path}"]], processes=2)
    content = analyze(tmp_path, PLAIN, None, "left out")
    assert content["processes"] == 2 and all(trace_path(tmp_path, TIMES, rank).is_file() for rank in (0, 1))
    assert any(row["step"] == COMMUNICATION for row in content["profiled"]["parts"])
    assert "2 processes, rank 0" in lines(content)[0]


def test_what_cannot_work_is_one_message(config, tmp_path, monkeypatch, capsys):
    failed = [{"kind": "variant", "runs": [{"reason": "as its log says"}]}]
    monkeypatch.setattr(tool, "run_trial", lambda arguments, folder: failed)
    profiled(config, tmp_path / "out", "--batch_size=0", status=USER_ERROR)
    assert "batch_size=0 must be at least 1" in capsys.readouterr().err
    profiled(config, tmp_path / "out", status=FAILED)
    assert "train.py: as its log says" in capsys.readouterr().err
