"""bench.time_to_loss: the whole experiment on the CPU, and with runs that a test makes up."""

import contextlib
import io
import json
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
from bench.time_to_loss import KEYS, beyond
from bench.time_to_loss_table import COLUMNS, LEGEND
from plots import compare_runs
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
    return re.findall(r"^(.+): started", output, re.M)


def test_rates_are_chosen_first_then_each_seed_has_every_variant(finished):
    _, folder, output = finished
    names = begun(output)
    short, full = names[:-4], names[-4:]
    assert short[:3] == ["adamw 0.01", "adamw 0.02", "adamw 0.04"]  # Muon's rate was given
    assert full == ["adamw seed 1", "muon seed 1", "muon seed 2", "adamw seed 2"]
    losses = {float(name.split()[1]): record_of(folder, name.replace(" ", "-")) for name in short}
    losses = {rate: record["eval_steps"][-1]["val_loss"] for rate, record in losses.items()}
    best = min(losses, key=losses.get)
    assert min(losses) < best < max(losses) and row_of(folder, "adamw")["learning rate"] == best
    assert f"{best:g}: {losses[best]:.4f} (best)" in output


def test_short_and_full_runs_have_whole_schedules_and_the_same_windows(finished):
    _, folder, _ = finished
    short, full = record_of(folder, "adamw-0.02"), record_of(folder, "muon-seed-2")
    for record, iters, evaluations in ((short, ITERS // 4, 1), (full, ITERS, 16)):
        assert record["config"]["max_iters"] == record["config"]["lr_decay_iters"] == iters
        assert len(record["eval_steps"]) == evaluations and record["eval_steps"][-1]["iter"] == iters
    assert (full["config"]["optimizer"], full["config"]["seed"]) == ("muon", 2)
    assert not list(folder.glob("runs/*/checkpoints"))


def by_hand(record: dict, target: float) -> tuple[float, float] | None:
    """(tokens, seconds) at which a loss was reached, of a record with a row for each iteration."""
    seconds = [row["time_ms"] / 1000 for row in record["training_iterations"]]
    seconds[0] = seconds[1]  # it compiles
    steps = record["eval_steps"]
    for before, after in zip(steps, steps[1:], strict=False):
        if after["val_loss"] <= target:
            share = (before["val_loss"] - target) / (before["val_loss"] - after["val_loss"])
            at = before["iter"] + share * (after["iter"] - before["iter"])
            return at * 128, sum(seconds[: int(at)]) + (at % 1) * seconds[int(at)]
    return None


def test_the_table_is_what_the_records_give_by_hand(finished):
    _, folder, output = finished
    records = {name: [record_of(folder, f"{name}-seed-{n}") for n in (1, 2)] for name in ("adamw", "muon")}
    finals = {name: [each["eval_steps"][-1]["val_loss"] for each in records[name]] for name in records}
    target = statistics.mean(finals["adamw"])
    for name, losses in finals.items():
        row = row_of(folder, name)
        assert row["final loss"] == pytest.approx([statistics.mean(losses), statistics.stdev(losses)])
        assert row["target"] == pytest.approx(target)
        rates = [
            statistics.median(r["tokens_per_sec"] for r in each["training_iterations"][1:])
            for each in records[name]
        ]
        assert row["tokens/s"][0] == pytest.approx(statistics.mean(rates))
    reached = [by_hand(record, target) for record in records["muon"]]
    muon = row_of(folder, "muon")
    assert muon["never"] == [n for n, found in zip((1, 2), reached, strict=True) if found is None]
    whole = []
    for record in records["adamw"]:
        milliseconds = [row["time_ms"] for row in record["training_iterations"]]
        whole.append((sum(milliseconds[1:]) + milliseconds[1]) / 1000)
    assert row_of(folder, "adamw")["training s"][0] == pytest.approx(statistics.mean(whole))
    assert not muon["never"]
    assert muon["token ratios"] == pytest.approx([tokens / (128 * ITERS) for tokens, _ in reached])
    assert muon["time ratios"] == pytest.approx([s / statistics.mean(whole) for _, s in reached])
    assert muon["of its time"][0] == pytest.approx(statistics.mean(muon["time ratios"]))
    assert f"{muon['of its time'][0]:.3f}" in output and "3.28" not in "".join(COLUMNS) + LEGEND
    assert (folder / "table.md").read_text().rstrip("\n") in output
    records = f"{folder}/runs/*seed*/run_*.json"
    assert f"Curves: python plots/compare_runs.py '{records}' --x time" in output
    assert compare_runs.main([records, "--x=time", f"--output={folder / 'curves.png'}"]) == 0


def test_a_second_call_runs_only_what_is_missing(finished, tmp_path, monkeypatch, capsys):
    arguments, first, _ = finished
    folder = shutil.copytree(first, tmp_path / "out")
    again = [*arguments, f"--output={folder}"]
    for path in folder.glob("runs/*/result.json"):
        kept = json.loads(path.read_text())
        del kept["about"]  # an earlier version had none
        path.write_text(json.dumps(kept))
    monkeypatch.setattr(runner, "run_entry", None)  # nothing is run
    assert time_to_loss.main(again) == 0
    assert begun(capsys.readouterr().out) == []
    assert results(folder)["rows"] == results(first)["rows"]
    (folder / "runs/muon-seed-2.1/result.json").write_text("{")  # it was killed
    assert time_to_loss.main([*again, "--time-limit=0"]) == 0
    assert "1 or more runs are left" in capsys.readouterr().out
    assert row_of(folder, "muon")["note"].endswith("runs still to be done: 1")


# --- with runs that are made up ---


@pytest.fixture
def fake(monkeypatch):
    """Replaces training: a run takes 60 s, and its loss is lowest at a rate of 0.004."""
    said = types.SimpleNamespace(now=0.0, variables=[])

    def run_entry(entry, number, folder, arguments, entries, variables, started):
        keys = load_config([entry.argv[0], *entry.argv[1:]])
        said.variables.append(variables)
        said.now += 60
        out_dir = runner.run_folder(entry, number, folder)
        out_dir.mkdir(parents=True)
        failed = keys.optimizer == "muon" and keys.learning_rate > 0.01
        entry.runs.append({"reason": "loss is nan" if failed else None, "seconds": 60.0, "repeat": number})
        if failed:
            return
        loss = abs(keys.learning_rate / 0.004 - 1) + 0.01 * keys.seed + (keys.optimizer == "adamw")
        evaluations = [
            {"iter": keys.max_iters // 2, "val_loss": 9.0},
            {"iter": keys.max_iters, "val_loss": loss},
        ]
        rows = [{"iter": i, "time_ms": 10.0, "tokens_seen": 128 * (i + 1)} for i in range(keys.max_iters)]
        record = {"training_iterations": rows, "eval_steps": evaluations, "startup_info": {}}
        (out_dir / "run_1.json").write_text(json.dumps(record))
        entry.facts = {"evaluations": evaluations, "parameters": 1000, "low_precision": None}
        entry.facts |= {"config": {"dataset": "made up"}}
        entry.result = {"tokens_per_sec": {"median": 12_800.0}, "mfu_percent": None}

    monkeypatch.setattr(runner, "run_entry", run_entry)
    monkeypatch.setattr(time_to_loss, "time", types.SimpleNamespace(monotonic=lambda: said.now))
    return said


def test_the_grid_grows_on_the_side_where_the_best_is():
    assert beyond({1.0: 3.0, 2.0: 2.0, 4.0: 2.5}) is None
    assert beyond({1.0: 1.0, 2.0: 2.0}) == 0.5 and beyond({1.0: 2.0, 2.0: 1.0}) == 4.0
    assert beyond({1.0: 2.0, 2.0: 1.0, 4.0: float("inf")}) is None  # it diverged
    assert beyond({1.0: 2.0, 2.0: None}) is None and beyond({1.0: float("inf")}) is None


def test_a_failing_run_is_named_with_its_reason_and_the_others_run(fake, options, tmp_path, capsys):
    grid = "--grid=adamw=0.004;muon=0.016,0.032"
    arguments = [*options, "--variants=adamw,muon", "--seeds=1,2", f"--output={tmp_path}"]
    assert time_to_loss.main([*arguments, grid]) == 1
    output = capsys.readouterr().out
    assert begun(output) == ["muon 0.016", "muon 0.032", "adamw seed 1", "adamw seed 2"]
    assert "0.016: failed; 0.032: failed; failed: loss is nan" in output
    assert "no short run ended with a loss" in row_of(tmp_path, "muon")["note"]
    assert "muon: there is nothing to compare yet" in output
    # given as it is, its full runs fail
    assert time_to_loss.main([*arguments, "--grid=adamw=0.004;muon=0.016"]) == 1
    assert begun(capsys.readouterr().out) == ["muon seed 1", "muon seed 2"]
    note = row_of(tmp_path, "muon")["note"]
    assert note == "seed 1 failed: loss is nan; seed 2 failed: loss is nan"


def test_a_variant_that_never_reaches_the_target_does_not_win(fake, options, tmp_path, capsys):
    arguments = [*options, "--variants=adamw,muon", "--seeds=1,2,3", f"--output={tmp_path}"]
    assert time_to_loss.main([*arguments, "--grid=adamw=0.004;muon=0.0089"]) == 0
    assert (
        "muon does not reach AdamW's final loss with 3 of 3 seeds: it does not win."
        in capsys.readouterr().out
    )
    assert row_of(tmp_path, "muon")["of its time"] is None
    # with seed 1 it does, but a mean over such seeds alone would flatter it
    assert time_to_loss.main([*arguments, "--grid=adamw=0.004;muon=0.00802"]) == 0
    muon = row_of(tmp_path, "muon")
    assert muon["never"] == [2, 3] and muon["of its time"] is None
    assert row_of(tmp_path, "adamw")["never"] == [3]  # above the mean of its seeds


def test_no_run_begins_that_would_end_after_the_limit(fake, options, tmp_path, capsys):
    arguments = [*options, "--variants=adamw", "--seeds=1,2", f"--output={tmp_path}"]
    arguments += ["--grid=adamw=0.002,0.004,0.008", "--time_limit=3.5"]
    assert time_to_loss.main(arguments) == 0
    output = capsys.readouterr().out
    assert begun(output) == ["adamw 0.002", "adamw 0.004", "adamw 0.008"]
    # a full run counts as four of these as long as there was none
    assert "--time_limit=3.5: 2 or more runs are left, about 8 minutes; the same command continues" in output
    assert time_to_loss.main([*arguments, "--time_limit=4.5"]) == 0
    output = capsys.readouterr().out
    assert begun(output) == ["adamw seed 1", "adamw seed 2"] and "are left" not in output


def test_two_runs_at_a_time_have_a_gpu_each(fake, options, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    arguments = [*options, "--grid=adamw=0.004;muon=0.004", "--seeds=1,2", f"--output={tmp_path}"]
    arguments += ["--parallel=2", "--dtype=bfloat16"]
    assert time_to_loss.main(arguments) == 0
    assert {each["CUDA_VISIBLE_DEVICES"] for each in fake.variables} == {"4", "6"}
    names = begun(capsys.readouterr().out)
    assert len(fake.variables) == 2 * len(KEYS) == 8 and len(names) == 8
    assert row_of(tmp_path, "muon-fp8")["time ratios"] == pytest.approx([0.94, 0.94], abs=0.1)


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
