"""tools.profile as a user runs it, on the CPU: the whole way from a config to the table, and what profiling
must leave as it is."""

import json

import pytest
from support.helpers import TINY, last_run, launch, make_dataset, run_in_one_launch, write_config

from bench import runner
from bench.process import Outcome
from common.command import FAILED, USER_ERROR, run_command
from tools.profile import __main__ as tool
from tools.profile import breakdown
from tools.profile.report import analyze, lines
from training.records.profiler import ITERATIONS, TIMES, facts_path, trace_path


@pytest.fixture
def config(tmp_path):
    keys = {**TINY, "dataset": make_dataset(tmp_path / "tokens"), "max_iters": ITERATIONS}
    return write_config(tmp_path / "tiny.py", **keys)


@pytest.fixture
def in_process(run, monkeypatch):
    """tools.profile trains in this process; calls: the arguments of what it would have started."""
    calls = []

    def run_process(command, log, timeout_s, keep_cache=False):
        assert command[1] == "train.py", "bench.roofline is left out"
        calls.append(command[2:])
        status = run(*command[2:])
        log.write_text("error: as its log says\n")
        return Outcome(1.0, None if status == 0 else "as its log says")

    monkeypatch.setattr(runner, "run_process", run_process)
    # a busy machine may stop the process between the two clocks that are compared, of so short a window
    monkeypatch.setattr(breakdown, "TOLERANCE", 0.5)
    return calls


def profiled(config, output, *arguments):
    assert run_command(tool.main, [str(config), f"--output={output}", "--no-roofline", *arguments]) == 0
    return json.loads((output / "profile.json").read_text())


def test_a_profile_adds_up_and_leaves_its_files(config, tmp_path, in_process, capsys):
    content = profiled(config, tmp_path / "out", "--peak_tflops=0.5", "--n_layer=1")
    found = content["profiled"]
    assert content["adds_up"] and found["sum_ms"] == pytest.approx(found["wall_ms"])
    assert sum(row["ms"] for row in found["parts"]) == pytest.approx(found["wall_ms"])
    names = {row["part"] for row in found["parts"]}
    layers = ("qkv", "out", "up", "down", "head")
    products = {f"{layer} {product}" for layer in layers for product in ("forward", "dgrad", "wgrad")}
    ranges = {"attention forward", "attention backward", "add_norm", "heads", "swiglu", "cross_entropy"}
    assert products | ranges <= names
    assert all(row["tflops"] > 0 for row in found["parts"] if row["part"] in products)
    falls = content["waterfall"]
    assert 100 - sum(s["points"] or 0 for s in falls["steps"]) == pytest.approx(falls["mfu_percent"])
    assert content["unprofiled"]["mfu"]["mfu_percent"] > 0
    assert last_run(tmp_path / "out/runs/plain.1")["config"]["profile"] is None
    printed = capsys.readouterr().out
    assert (tmp_path / "out/profile.txt").read_text() in printed
    assert trace_path(tmp_path / "out/runs/profiled.1", TIMES, 0).is_file(), "the Chrome trace stays"


KINDS = {
    "gpt2": {"arch_preset": "gpt2", "num_key_value_heads": None, "d_ff": None, "dropout": 0.1},
    "fp8": {"low_precision": "fp8_tensorwise", "low_precision_scope": "layers_and_head", "dtype": "bfloat16"},
    "recomputation": {"attention_backend": "manual", "activation_checkpointing": "full", "loss_chunks": 2},
}


@pytest.mark.parametrize(
    "settings",
    [pytest.param(keys, marks=[pytest.mark.slow] * (name != "fp8"), id=name) for name, keys in KINDS.items()],
)
def test_every_kind_of_run_is_known(config, tmp_path, in_process, settings):
    flags = [f"--{key}={value}" for key, value in {"n_layer": 1, **settings}.items()]
    content = profiled(config, tmp_path / "out", *flags)
    assert content["adds_up"]
    assert content["waterfall"]["unit"] == "ms", "a CPU has no peak"
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
    out_dir = tmp_path / "out"
    run_in_one_launch(tmp_path, [[config, *tool.as_flags(tool.FIXED), f"--out_dir={out_dir}"]], processes=2)
    content = analyze(out_dir, out_dir, None, "left out")
    assert content["processes"] == 2 and all(trace_path(out_dir, TIMES, rank).is_file() for rank in (0, 1))
    assert any(row["part"].startswith("communication: ") for row in content["profiled"]["parts"])
    assert "2 processes, rank 0" in lines(content)[0]


def test_what_cannot_work_is_one_message(config, tmp_path, in_process, capsys):
    for arguments, message in (
        (["--max_iters=5"], "max_iters is the benchmark's to set; use --output or --dataset, or leave"),
        (["--batch_size=0"], "batch_size=0 must be at least 1"),
    ):
        assert run_command(tool.main, [str(config), f"--output={tmp_path / 'out'}", *arguments]) == USER_ERROR
        assert message in capsys.readouterr().err
    assert not in_process, "nothing was started"
    lost = f"--dataset={tmp_path / 'nothing'}"
    assert run_command(tool.main, [str(config), f"--output={tmp_path / 'out'}", lost]) == FAILED
    assert "train.py: as its log says" in capsys.readouterr().err


@pytest.mark.slow
def test_the_command_measures_the_matmuls_alone_too(config, tmp_path):
    command = ["-m", "tools.profile", config, f"--output={tmp_path / 'out'}", "--peak_tflops=0.5"]
    launch([[*command, "--dataset=random"]])
    content = json.loads((tmp_path / "out/profile.json").read_text())
    assert content["roofline"]["ceiling"]["matmul_seconds"] > 0 and content["roofline_reason"] is None
    assert {"ceiling", "matmuls"} <= {step["step"] for step in content["waterfall"]["steps"]}
    assert "random-64" in content["config"]["dataset"]
