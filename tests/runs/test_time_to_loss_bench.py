"""bench.time_to_loss: the whole experiment on the CPU, and with runs that a test makes up."""

import contextlib
import io
import json
import os
import re
import shutil
import statistics
import subprocess
import types

import pytest
import torch
from support import warm_python
from support.helpers import TINY, make_dataset, write_config

import model_builder
from bench import process, runner, time_to_loss
from bench.process import end_with_status
from bench.time_to_loss import KEYS
from common.time_to_loss import Progress
from plots import compare_runs, loss_ratio
from training.configuration.files_and_flags import load_config

ITERS = 32


@pytest.fixture(scope="module")
def options(tmp_path_factory):
    """A model and a text for runs of a second."""
    folder = tmp_path_factory.mktemp("time_to_loss")
    schedule = {"lr_schedule": "wsd", "min_lr": 0.0, "lr_decay_iters": None, "max_iters": ITERS}
    config = write_config(folder / "tiny.py", **{**TINY, **schedule, "eval_iters": 50})
    return [f"--config={config}", f"--dataset={make_dataset(folder / 'tokens')}"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory, options):
    """(arguments, folder, output) of an experiment, whose runs are forks of a process with torch."""
    folder, output = tmp_path_factory.mktemp("finished") / "out", io.StringIO()
    calls = types.SimpleNamespace(**{name: getattr(subprocess, name) for name in ("DEVNULL", "STDOUT")})
    calls.TimeoutExpired, calls.Popen = subprocess.TimeoutExpired, warm_python.Popen
    arguments = [*options, "--variants=adamw,muon", "--seeds=1,2", "--grid=adamw=0.01,0.02;muon=0.03"]
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(output):
        patch.setattr(process, "subprocess", calls)
        assert time_to_loss.main([*arguments, f"--output={folder}"]) == 0
    return arguments, folder, output.getvalue()


def results(folder) -> dict:
    return json.loads((folder / "results.json").read_text())


def row_of(folder, variant: str) -> dict:
    return next(row for row in results(folder)["rows"] if row["variant"] == variant)


def record_of(folder, name: str) -> dict:
    (path,) = folder.glob(f"runs/{name}.1/run_*.json")
    return json.loads(path.read_text())


def begun(output: str) -> list[str]:
    return re.findall(r"^\[\d+/\d+\] (.+): started", output, re.M)


def test_rates_are_chosen_first_then_each_seed_has_every_variant(finished):
    _, folder, output = finished
    names = begun(output)
    assert names == ["adamw 0.01", "adamw 0.02", "adamw seed 1", "muon seed 1", "muon seed 2", "adamw seed 2"]
    losses = {rate: record_of(folder, f"adamw-{rate}")["eval_steps"][-1]["val_loss"] for rate in (0.01, 0.02)}
    best = min(losses, key=losses.get)
    assert row_of(folder, "adamw")["learning rate"] == best
    assert f"{best:g}: {losses[best]:.4f} (best)" in output
    assert "the best is at the edge: give a wider --grid='adamw=...'" in output  # of two, it always is


def test_short_and_full_runs_have_whole_schedules_and_the_same_windows(finished):
    _, folder, _ = finished
    short, full = record_of(folder, "adamw-0.02"), record_of(folder, "muon-seed-2")
    for record, iters, evaluations in ((short, ITERS // 4, 1), (full, ITERS, 16)):
        assert record["config"]["max_iters"] == record["config"]["lr_decay_iters"] == iters
        assert len(record["eval_steps"]) == evaluations and record["eval_steps"][-1]["iter"] == iters
    assert (full["config"]["optimizer"], full["config"]["seed"]) == ("muon", 2)
    assert not list(folder.glob("runs/*/checkpoints"))


def test_the_table_is_what_the_records_say(finished):
    _, folder, output = finished
    records = {name: [record_of(folder, f"{name}-seed-{n}") for n in (1, 2)] for name in ("adamw", "muon")}
    for name, each in records.items():
        row, losses = row_of(folder, name), [record["eval_steps"][-1]["val_loss"] for record in each]
        assert row["held-out loss"] == pytest.approx([statistics.mean(losses), statistics.stdev(losses)])
        assert row["losses"] == {"1": losses[0], "2": losses[1]}
        iterations = [record["training_iterations"] for record in each]
        rates = [statistics.median(r["tokens_per_sec"] for r in rows[1:]) for rows in iterations]
        assert row["tokens/s"][0] == pytest.approx(statistics.mean(rates))
        seconds = [sum(r["time_ms"] for r in [rows[1], *rows[1:]]) / 1000 for rows in iterations]
        assert row["training s"][0] == pytest.approx(statistics.mean(seconds))  # the first one compiles
        assert row["M tokens"][0] == 128 * ITERS / 1e6
    # the sentence is that of plots/compare_runs.py
    against = row_of(folder, "muon")["against"]
    adamw, muon = (
        {f"{name} seed {n}": Progress(record) for n, record in zip((1, 2), records[name], strict=True)}
        for name in ("adamw", "muon")
    )
    assert against == loss_ratio.reaches(adamw, muon)[0] and f"- {against}." in output
    assert (folder / "table.md").read_text().rstrip("\n") in output
    files = f"{folder}/runs/*seed*/run_*.json"
    assert f"Curves: python plots/compare_runs.py '{files}' --x time" in output
    assert compare_runs.main([files, "--x=time", f"--output={folder / 'curves.png'}"]) == 0


def test_a_second_call_runs_only_what_is_missing(finished, tmp_path, monkeypatch, capsys):
    arguments, first, _ = finished
    folder = shutil.copytree(first, tmp_path / "out")
    again = [*arguments, f"--output={folder}"]
    for path in folder.glob("runs/*/result.json"):
        kept = json.loads(path.read_text())
        del kept["about"]  # an earlier version had none
        path.write_text(json.dumps(kept))
    monkeypatch.setattr(runner, "run_entry", None)  # nothing is run
    assert time_to_loss.main([*again, "--time-limit=0"]) == 0
    output = capsys.readouterr().out
    assert begun(output) == [] and "runs are left" not in output
    assert results(folder)["rows"] == results(first)["rows"]
    (folder / "runs/muon-seed-2.1/result.json").write_text("{")  # it was killed
    assert time_to_loss.main([*again, "--time-limit=0"]) == 0
    assert "--time_limit=0: runs are left; the same command continues" in capsys.readouterr().out
    assert list(row_of(folder, "muon")["losses"]) == ["1"]


# --- with runs that are made up ---


@pytest.fixture
def fake(monkeypatch):
    """Replaces training: a run takes a minute, and its loss is lowest at a rate of 0.004."""
    said = types.SimpleNamespace(now=0.0, gpus=[])  # the GPU of each run

    def run_entry(entry, number, folder, arguments, entries):
        keys = load_config([entry.argv[0], *entry.argv[1:]])
        said.gpus.append(os.environ.get("CUDA_VISIBLE_DEVICES"))
        said.now += 60
        out_dir = runner.run_folder(entry, number, folder)
        out_dir.mkdir(parents=True)
        failed = keys.optimizer == "muon" and keys.learning_rate > 0.01
        entry.runs.append({"reason": "loss is nan" if failed else None, "seconds": 60.0, "repeat": number})
        entry.runs[-1]["folder"] = str(out_dir)
        if failed:
            return
        loss = abs(keys.learning_rate / 0.004 - 1) + 0.01 * keys.seed + (keys.optimizer == "adamw")
        evaluations = [
            {"iter": keys.max_iters // 2, "val_loss": 9.0},
            {"iter": keys.max_iters, "val_loss": loss},
        ]
        rows = [{"iter": i, "time_ms": 10.0, "tokens_seen": 128 * (i + 1)} for i in range(keys.max_iters)]
        record = {"training_iterations": rows, "eval_steps": evaluations, "startup_info": {}}
        (out_dir / "run_1.json").write_text(json.dumps({**record, "end_time": "now"}))
        peak = {"tflops_per_gpu": None}
        entry.facts = {"evaluations": evaluations, "hardware": {"peak": peak}, "software": {}}
        entry.result = {"tokens_per_sec": {"median": 12_800.0}}

    monkeypatch.setattr(runner, "run_entry", run_entry)
    clock = types.SimpleNamespace(monotonic=lambda: said.now, sleep=lambda seconds: None)
    monkeypatch.setattr(time_to_loss, "time", clock)
    return said


def test_a_failing_run_is_named_with_its_reason_and_the_others_run(fake, options, tmp_path, capsys):
    grid = "--grid=adamw=0.004;muon=0.016,0.032"
    arguments = [*options, "--variants=adamw,muon", "--seeds=1,2", f"--output={tmp_path}"]
    assert time_to_loss.main([*arguments, grid]) == 1
    output = capsys.readouterr().out
    assert begun(output) == ["muon 0.016", "muon 0.032", "adamw seed 1", "adamw seed 2"]
    assert "muon 0.016, muon 0.032 failed: loss is nan" in output
    assert row_of(tmp_path, "muon")["note"] == "not run"
    assert "muon: nothing to compare yet" in output
    # given as it is, its full runs fail
    assert time_to_loss.main([*arguments, "--grid=adamw=0.004;muon=0.016"]) == 1
    assert begun(capsys.readouterr().out) == ["muon seed 1", "muon seed 2"]
    assert row_of(tmp_path, "muon")["note"] == "muon seed 1, muon seed 2 failed: loss is nan"


def test_a_variant_that_never_reaches_the_target_has_no_ratio(fake, options, tmp_path, capsys):
    arguments = [*options, "--variants=adamw,muon", "--seeds=1,2", f"--output={tmp_path}"]
    assert time_to_loss.main([*arguments, "--grid=adamw=0.004;muon=0.0089"]) == 0
    never = "muon seed 1 and muon seed 2 did not reach the final loss of adamw seed 1, 1.0100: no ratio"
    assert never in capsys.readouterr().out


def test_no_run_begins_after_the_limit(fake, options, tmp_path, capsys):
    arguments = [*options, "--variants=adamw", "--seeds=1,2", f"--output={tmp_path}"]
    arguments += ["--grid=adamw=0.002,0.004,0.008"]
    assert time_to_loss.main([*arguments, "--time_limit=2.5"]) == 0
    output = capsys.readouterr().out
    assert begun(output) == ["adamw 0.002", "adamw 0.004", "adamw 0.008"]
    assert "--time_limit=2.5: runs are left; the same command continues" in output
    assert time_to_loss.main(arguments) == 0
    output = capsys.readouterr().out
    assert begun(output) == ["adamw seed 1", "adamw seed 2"] and "are left" not in output
    assert row_of(tmp_path, "adamw")["learning rate"] == 0.004


def test_two_runs_at_a_time_have_a_gpu_each(fake, options, tmp_path, capsys, monkeypatch):
    """The other process is a call with its environment, which is done before this one begins."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    arguments = [*options, "--grid=adamw=0.004;muon=0.004", "--seeds=1,2", f"--output={tmp_path}"]
    arguments += ["--parallel=2", "--dtype=bfloat16"]

    def start(command, env):
        assert command[1:3] == ["-m", "bench.time_to_loss"]
        with monkeypatch.context() as patch:
            patch.setenv("CUDA_VISIBLE_DEVICES", env["CUDA_VISIBLE_DEVICES"])
            assert time_to_loss.main([*command[3:], "--time_limit=2.5"]) == 0
        return types.SimpleNamespace(wait=lambda: 0, poll=lambda: 0)

    monkeypatch.setattr(time_to_loss, "subprocess", types.SimpleNamespace(Popen=start))
    assert time_to_loss.main(arguments) == 0
    assert fake.gpus == ["6"] * 3 + ["4"] * (2 * len(KEYS) - 3)
    assert len(begun(capsys.readouterr().out)) == 2 * len(KEYS)
    muon = row_of(tmp_path, "muon-fp8")
    assert len(muon["losses"]) == 2
    assert muon["against"].startswith("muon-fp8 reaches adamw's final loss in 0.94 of the time (95 % ")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--dataset=auto"], r"make it with: hf download .* --dataset \(docs/own_text.md\)"),
        (["--iters=200"], "25,600 tokens? are more than one epoch|more than one epoch of"),
        (["--variants=muon"], "and adamw: the target is its loss"),
        (["--variants=adamw,sgd"], "must name some of adamw, muon, adamw-fp8, muon-fp8"),
        (["--learning_rate=1"], "use --variants, --grid"),
        (["--grid=sgd=1"], "'sgd' is none of adamw, muon"),
    ],
)
def test_what_cannot_be_run_is_refused_before_anything_is(flags, message, options, tmp_path, capsys):
    folder = tmp_path / "out"
    assert end_with_status(time_to_loss.main, [*options, f"--output={folder}", *flags]) == 2
    assert re.search(message, capsys.readouterr().err) and not folder.exists()


def test_the_shipped_config_is_the_plain_124m_model():
    config = load_config([time_to_loss.CONFIG, "--dry_run=True"])
    with torch.device("meta"):
        model = model_builder.build_model(config.model_config())
    assert model.count_parameters()["total"] == 123_588_864
    assert config.max_iters * config.tokens_per_iter == 41_943_040
    assert config.max_iters % config.eval_interval == 0 == config.min_lr
