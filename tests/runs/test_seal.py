"""Seals: what was changed is found and named, the MFU follows from the record alone, and a sealed run can be
run again by somebody else."""

import copy
import dataclasses
import json
import sys

import pytest
from support import warm_python
from support.helpers import TINY, make_dataset, write_config

from bench.plan import Entry
from bench.results import combine, measure, relate
from bench.throughput import software_here
from common.command import run_command
from common.errors import UserError
from tools import replay
from tools.seal import __main__ as seal_command
from tools.seal import contents
from tools.seal.bench_check import bench_disagreements
from tools.seal.recount import disagreements, recount
from training.hardware.peaks import table_peak
from training.records import startup_info

STEPS = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a dataset and a finished run in out/."""
    folder = tmp_path_factory.mktemp("sealed")
    keys = {**TINY, "max_iters": STEPS, "log_interval": 1, "eval_interval": STEPS, "peak_tflops": 1.0}
    config = write_config(
        folder / "run.py", **keys, dataset=make_dataset(folder / "tokens"), out_dir=folder / "out"
    )
    done = warm_python.run([sys.executable, "train.py", config])
    assert done.returncode == 0, done.stdout
    return folder


@pytest.fixture
def record(folder):
    """(path, content) of its run record."""
    path = next((folder / "out").glob("run_*[0-9].json"))
    return path, json.loads(path.read_text())


@pytest.fixture
def sealed(record, tmp_path):
    """The path of a seal of it."""
    path = tmp_path / "a.seal.json"
    assert run_command(seal_command.main, [str(record[0]), f"--output={path}"]) == 0
    return path


def verify(path, content=None):
    """The exit status of tools.seal --verify, of a file that is written anew if there is content."""
    if content is not None:
        path.write_text(json.dumps(content))
    return run_command(seal_command.main, ["--verify", str(path)])


def test_seal_of_a_run_is_verified_with_its_mfu_by_all_formulas(sealed, record, capsys):
    assert verify(sealed) == 0
    shown = capsys.readouterr().out
    for found in recount(record[1]):
        assert f"{found.flops_per_token:,}" in shown and f"{found.percent:.2f}" in shown
        assert f"{found.causal_percent:.2f}" in shown
    assert "Nothing was changed" in shown
    v3 = next(found for found in recount(record[1]) if found.in_use)
    assert v3.percent == pytest.approx(record[1]["summary"]["mfu_percent"]["median"])


CHANGES = {
    "configuration": lambda seal: seal["record"]["config"].update(learning_rate=1.0),
    "environment": lambda seal: seal["record"]["startup_info"]["software"].update(torch="9.9"),
    "data": lambda seal: seal["record"]["startup_info"]["data"].update(fingerprint="0" * 64),
    "clocks": lambda seal: seal["record"]["training_iterations"][3].update(sm_clock_mhz=1980),
    "rows": lambda seal: seal["record"]["training_iterations"][3].update(loss=1.0),
    "code": lambda seal: seal["code"].update(commit="0" * 40),
    "bench": lambda seal: seal.update(bench={"entries": []}),
    "record": lambda seal: seal["record"]["summary"].update(best_val_loss=0.5),
    "digests": lambda seal: seal.update(digest="0" * 64),
}


@pytest.mark.parametrize("part", CHANGES)
def test_part_that_was_changed_by_hand_is_named(sealed, part, capsys):
    seal = json.loads(sealed.read_text())
    CHANGES[part](seal)
    assert part in contents.changed_sections(seal)
    assert verify(sealed, seal) == 1
    assert "CHANGED after sealing: " in (shown := capsys.readouterr().out)
    assert part in shown.split("CHANGED after sealing: ")[1].splitlines()[0]
    assert run_command(replay.main, [str(sealed)]) == 2  # a changed seal is not run
    assert "was changed after sealing" in capsys.readouterr().err


def rows_of(record):
    return record["training_iterations"]


FORGERIES = {  # what somebody changes who makes the digests anew, and what names it
    "mfu_percent": lambda r: rows_of(r)[9]["mfu"].update(mfu_percent=99.0),
    "tokens_per_sec": lambda r: rows_of(r)[9].update(tokens_per_sec=1e9),
    "summary.tokens_per_sec": lambda r: r["summary"]["tokens_per_sec"].update(median=1e9),
    "the p90 is": lambda r: r["summary"]["tokens_per_sec"].update(p90=1e9),
    "startup_info.flops.totals": lambda r: r["startup_info"]["flops"]["totals"].update(combined_formula_v2=1),
    "formula was changed": lambda r: rows_of(r)[9]["mfu"].update(calculation_method="nanogpt_legacy_v1"),
    "hardware_peak_tflops": lambda r: r["startup_info"]["hardware"]["peak"].update(tflops_per_gpu=0.5),
    "are missing": lambda r: r["training_iterations"].pop(9),
    "2 GPUs do not fit": lambda r: r["startup_info"]["hardware"].update(num_gpus=2),
    "num_gpus is": lambda r: r["startup_info"]["hardware"].update(num_gpus=-1),
    "mfu.num_gpus": lambda r: rows_of(r)[9]["mfu"].update(num_gpus=4),
    "tokens_per_sec_per_gpu": lambda r: rows_of(r)[9].update(tokens_per_sec_per_gpu=1.0),
    "tokens_per_iter": lambda r: r["startup_info"].update(tokens_per_iter=1),
    "and the configuration makes": lambda r: r["config"].update(n_layer=99),
    "rows, warmup": lambda r: rows_of(r)[9].update(warmup=True),
    "rows_after_warmup": lambda r: r["summary"].update(rows_after_warmup=3),
    "has none, and others": lambda r: rows_of(r)[9].update(mfu=None),
    "rows have it": lambda r: r["summary"].update(tokens_per_sec=None),
    "rows, time_ms": lambda r: rows_of(r)[9].update(time_ms=-5.0),
    "is nan": lambda r: rows_of(r)[9].update(time_ms=float("nan")),
    "is inf": lambda r: r["summary"]["tokens_per_sec"].update(p10=float("inf")),
    "in order": lambda r: rows_of(r).insert(9, rows_of(r)[9]),
    "999,999,9": lambda r: [r["summary"].update(final_iter=10**12), rows_of(r)[-1].update(iter=10**12)],
    "the configuration ends before": lambda r: r["config"].update(max_iters=9),
    "summary.final_loss": lambda r: r["summary"].update(final_loss=0.1),
    "mfu.gpu_name": lambda r: r["startup_info"]["hardware"].update(gpu_name="NVIDIA B200"),
    "mfu.total_params": lambda r: r["startup_info"]["model"].update(total_params=1),
    "mfu.sparse_mode": lambda r: r["startup_info"]["hardware"]["peak"].update(sparse=True),
    "summary.final_iter is": lambda r: rows_of(r).pop(),
}


@pytest.mark.parametrize("name", FORGERIES)
def test_figure_that_does_not_follow_from_the_record_is_named(record, name, tmp_path, capsys):
    path, content = record
    seal = contents.make_seal(content)
    forged = copy.deepcopy(seal)
    FORGERIES[name](forged["record"])
    forged["digests"] = contents.digests_of(forged)
    forged["digest"] = contents.sha256(forged["digests"])
    assert not disagreements(seal["record"])
    assert verify(tmp_path / "forged.json", forged) == 1
    shown = capsys.readouterr().out
    assert "CHANGED" not in shown and name in shown.partition("DOES NOT AGREE")[2]
    (tmp_path / "run.json").write_text(json.dumps(forged["record"]))
    assert run_command(seal_command.main, [str(tmp_path / "run.json")]) == 2  # it is not sealed
    assert "does not agree with itself" in capsys.readouterr().err


def test_record_without_a_peak_agrees_with_itself(record):
    content = record[1]
    content["startup_info"]["hardware"]["peak"].update(tflops_per_gpu=None)
    for row in rows_of(content):
        row["mfu"] = None
    content["summary"]["mfu_percent"] = None
    assert not disagreements(content)


def test_peak_that_is_not_the_datasheets_is_named(record):
    content = record[1]
    hardware = content["startup_info"]["hardware"]
    hardware.update(gpu_name="NVIDIA H200", precision="bfloat16")
    source = table_peak("NVIDIA H200", "bfloat16").source
    hardware["peak"].update(tflops_per_gpu=494.7, source=source)
    assert any("494.7" in line and "989.4" in line for line in disagreements(content))


def test_sealed_run_is_run_again_with_the_same_losses(sealed, tmp_path, capsys):
    out = tmp_path / "again"
    assert run_command(replay.main, [str(sealed), f"--out_dir={out}"]) == 0
    shown = capsys.readouterr().out
    assert f"all {STEPS} are equal to the last digit" in shown and "FLOPs/token" in shown
    assert "tokens/s       not compared" in shown and "All that can be compared here holds" in shown

    # the same two records as if of a GPU, one of them with other figures
    record, path = json.loads(sealed.read_text())["record"], next(out.glob("run_*[0-9].json"))
    for row in record["training_iterations"]:
        row["tokens_per_sec"] *= 100
    record["training_iterations"][5]["loss"] *= 1.02
    record["startup_info"]["flops"]["totals"]["combined_formula_v2"] += 1
    record["config"]["device"] = "cuda"
    found = {finding.what: finding.holds for finding in replay.findings(sealed, record, path)}
    assert found == {"FLOPs/token": False, "losses": False, "evaluations": True, "tokens/s": False}
    record["startup_info"]["hardware"]["gpu_name"] = "NVIDIA H200"
    *_, speed = replay.findings(sealed, record, path)
    assert speed.holds is None and "another kind of machine" in speed.text

    assert run_command(replay.main, [str(sealed), f"--out_dir={out}"]) == 2
    assert "has a run already" in capsys.readouterr().err


@pytest.mark.parametrize(
    "sealed_on, now, holds",
    [
        (["GPU-1"], ["GPU-1"], False),
        (["GPU-1"], ["GPU-2"], True),
        (["GPU-1", "GPU-2"], ["GPU-1", "GPU-3"], True),
        ([None], [None], True),  # an older record
    ],
)
def test_two_percent_less_speed_holds_on_other_gpus_alone(record, sealed, sealed_on, now, holds, tmp_path):
    sides = []
    for uuids, factor in ((sealed_on, 1.0), (now, 0.98)):
        side = copy.deepcopy(record[1])
        side["config"]["device"] = "cuda"
        side["startup_info"]["hardware"]["gpu_name"] = "NVIDIA H200"
        side["startup_info"]["machine"] = {"host": "vm", "gpus": [{"uuid": uuid} for uuid in uuids]}
        for i, row in enumerate(side["training_iterations"]):
            row["tokens_per_sec"] = factor * (1000.0 + i % 2)
        sides.append(side)
    (path := tmp_path / "run_new.json").write_text(json.dumps(sides[1]))
    *_, speed = replay.findings(sealed, sides[0], path)
    assert speed.holds is holds, speed.text


def test_replay_refuses_other_data_and_settings_that_do_not_exist(sealed, tmp_path, capsys):
    other = make_dataset(tmp_path / "other", seed=1)
    assert run_command(replay.main, [str(sealed), f"--dataset={other}", f"--out_dir={tmp_path / 'o'}"]) == 2
    assert "holds other tokens than the sealed run read" in capsys.readouterr().err
    command = [str(sealed), "--dataset=random-7", f"--out_dir={tmp_path / 'q'}"]
    assert run_command(replay.main, command) == 2
    assert "python -m bench.random_tokens 7 makes it" in capsys.readouterr().err
    seal = json.loads(sealed.read_text())
    seal["record"]["config"]["__import__"] = "os"
    seal["digests"] = contents.digests_of(seal)
    sealed.write_text(json.dumps(seal | {"digest": contents.sha256(seal["digests"])}))
    assert run_command(replay.main, [str(sealed), f"--out_dir={tmp_path / 'p'}"]) == 2
    assert "'__import__', no setting of this code" in capsys.readouterr().err


@pytest.mark.parametrize(
    "damage, message",
    [
        (lambda text: text[: len(text) // 2], "is not a run record"),
        (lambda text: "[]", "is not a run record"),
        (lambda text: json.dumps(json.loads(text) | {"status": "running"}), "not of a completed run"),
        (lambda text: json.dumps({"training_iterations": []}), "of an older version"),
        (lambda text: json.dumps(json.loads(text) | {"startup_info": {}}), "of an older version"),
    ],
)
def test_file_that_cannot_be_sealed_is_one_line(record, damage, message, tmp_path, capsys):
    (path := tmp_path / "run.json").write_text(damage(record[0].read_text()))
    assert run_command(seal_command.main, [str(path)]) == 2
    error = capsys.readouterr().err
    assert message in error and len(error.splitlines()) == 1


def test_run_record_and_cut_seal_are_no_seals(sealed, record, capsys):
    assert verify(record[0]) == 2
    assert "is a run record, no seal" in capsys.readouterr().err
    seal = json.loads(sealed.read_text())
    del seal["digests"]
    assert verify(sealed, seal) == 2
    assert "cut short or damaged: it has no digests" in capsys.readouterr().err


@pytest.mark.parametrize("value", [None, [], {}, "a"])
@pytest.mark.parametrize(
    "place",
    [
        lambda record: (rows_of(record)[9], "tokens_per_sec"),
        lambda record: (rows_of(record)[9], "iter"),
        lambda record: (rows_of(record)[9]["mfu"], "calculation_method"),
        lambda record: (record["startup_info"]["hardware"], "peak"),
        lambda record: (record["startup_info"]["hardware"], "precision"),
        lambda record: (record["startup_info"]["flops"], "calculation_method"),
        lambda record: (record["startup_info"]["model"], "architecture"),
        lambda record: (record["summary"], "final_iter"),
        lambda record: (record["summary"], "tokens_per_sec"),
    ],
)
def test_forged_figure_that_is_no_figure_ends_without_a_traceback(record, place, value):
    seal = contents.make_seal(record[1])
    holder, key = place(seal["record"])
    if holder[key] == value:
        return
    holder[key] = value
    try:
        disagreements(seal["record"])
        seal_command.recount_table(seal["record"])
    except UserError as error:
        assert len(str(error).splitlines()) == 1


def test_seal_is_never_written_over(sealed, record, capsys):
    assert run_command(seal_command.main, [str(record[0]), f"--output={sealed}"]) == 2
    assert "never written over" in capsys.readouterr().err


def test_seal_that_cannot_be_written_names_the_file_that_was_asked_for(record, tmp_path, capsys):
    asked = tmp_path / "absent" / "a.seal.json"
    assert run_command(seal_command.main, [str(record[0]), f"--output={asked}"]) == 2
    assert f"{asked} cannot be written: No such file" in capsys.readouterr().err


def test_difference_is_sealed_only_if_it_is_that_of_the_run(monkeypatch):
    monkeypatch.setattr(contents, "working_difference", lambda commit: "+ one line")
    digest = startup_info.difference_sha256("+ one line")
    git = {"commit": "c0ffee", "modified": True, "difference_sha256": digest}
    assert contents.describe_code(git)["difference"] == "+ one line"
    changed = contents.describe_code({**git, "difference_sha256": "0" * 64})
    assert changed["difference"] is None and "has been changed since" in changed["note"]
    assert "does not say how" in contents.describe_code({"commit": "c0ffee", "modified": True})["note"]
    assert contents.describe_code({"commit": None})["note"].startswith("the run's code was not in a git")


def test_secrets_are_taken_out_of_the_sealed_difference(monkeypatch):
    difference = "+ url = 'https://me:hunter22@example.org'"
    monkeypatch.setattr(contents, "working_difference", lambda commit: difference)
    digest = startup_info.difference_sha256(difference)
    code = contents.describe_code({"commit": "c0ffee", "modified": True, "difference_sha256": digest})
    assert "hunter22" not in code["difference"] and "secrets were taken out" in code["note"]


def test_replay_into_a_file_names_the_option(sealed, record, capsys):
    assert run_command(replay.main, [str(sealed), f"--out_dir={record[0]}"]) == 2
    assert f"--out_dir={record[0]} cannot be a folder" in capsys.readouterr().err


HOSTILE = {  # what a stranger may write, and what the message names
    "run_name": lambda seal: seal["record"].update(run_name="../../escaped"),
    "run_name is None": lambda seal: seal["record"].pop("run_name"),
    "run_name is 3": lambda seal: seal["record"].update(run_name=3),
    "code.note": lambda seal: seal["code"].update(note=3),
    "eval_steps": lambda seal: seal["record"].update(eval_steps=3),
    "commit is '--output": lambda seal: seal["record"]["startup_info"].update(
        git={"commit": "--output=written", "modified": True, "difference_sha256": "0" * 64}
    ),
    "commit is '$(id)'": lambda seal: seal["code"].update(commit="$(id)"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_seal_that_would_write_or_run_something_is_refused(sealed, name, tmp_path, monkeypatch, capsys):
    seal = json.loads(sealed.read_text())
    HOSTILE[name](seal)
    seal["digests"] = contents.digests_of(seal)
    sealed.write_text(json.dumps(seal | {"digest": contents.sha256(seal["digests"])}))
    (run := tmp_path / "run.json").write_text(json.dumps(seal["record"]))
    monkeypatch.setattr(contents, "working_difference", lambda commit: pytest.fail(f"git got {commit}"))
    commands = [(replay.main, [str(sealed)]), (seal_command.main, ["--verify", str(sealed)])]
    if not name.startswith("code.") and "$(id)" not in name:
        commands.append((seal_command.main, [str(run)]))
    for main, arguments in commands:
        assert run_command(main, arguments) == 2
        error = capsys.readouterr().err
        assert name in error and len(error.splitlines()) == 1


def test_text_of_a_seal_cannot_command_the_terminal(sealed, tmp_path, monkeypatch, capsys):
    seal = json.loads(sealed.read_text())
    seal["code"]["note"] = "\x1b[2Jcleared"
    seal["digests"] = contents.digests_of(seal)
    sealed.write_text(json.dumps(seal | {"digest": contents.sha256(seal["digests"])}))
    stopped = type("Done", (), {"reason": "not started"})()
    monkeypatch.setattr(replay, "run_process", lambda *_, **__: stopped)
    assert run_command(replay.main, [str(sealed), f"--out_dir={tmp_path / 'o'}"]) == 1
    out = capsys.readouterr().out
    assert "cleared" in out and "\x1b" not in out


def bench_of(record):
    """A table of bench.throughput in which the variant is this run, and a peer is half as fast."""
    mine = measure(rows_of(record), 5)
    slow = copy.deepcopy(mine)
    for name in ("tokens_per_sec", "tokens_per_sec_per_gpu", "time_ms"):
        slow[name] = [value * (2 if name == "time_ms" else 0.5) for value in slow[name]]
    entries = [Entry("variant", "Qwen3", [], 1, "cpu", peers=["slow"]), Entry("peer", "slow", [], 1, "cpu")]
    for entry, measured in zip(entries, (mine, slow), strict=True):
        entry.runs = [{"repeat": 1, "reason": None, "measurement": measured}]
        entry.result = combine(entry.runs)
    relate(entries)
    return {"entries": [dataclasses.asdict(entry) for entry in entries]}


def test_bench_results_are_sealed_with_the_run(record, tmp_path, capsys):
    bench = bench_of(record[1])
    (table := tmp_path / "table.json").write_text(json.dumps(bench))
    out = tmp_path / "b.seal.json"
    assert run_command(seal_command.main, [str(record[0]), f"--output={out}", f"--bench={table}"]) == 0
    assert json.loads(out.read_text())["bench"]["entries"] == bench["entries"]
    assert verify(out) == 0
    table.write_text("{}")
    assert run_command(seal_command.main, [str(record[0]), f"--bench={table}"]) == 2
    assert "no table.json of bench.throughput" in capsys.readouterr().err


def test_code_that_is_not_the_records_is_named(sealed, capsys):
    seal = json.loads(sealed.read_text())
    seal["code"]["commit"] = "0" * 40
    seal["digests"] = contents.digests_of(seal)
    seal["digest"] = contents.sha256(seal["digests"])
    assert verify(sealed, seal) == 1
    assert "DOES NOT AGREE: code.commit" in capsys.readouterr().out


def take_twice_the_time(entry):
    """At the same tokens/s: each iteration would have had twice the tokens."""
    measured = entry["runs"][0]["measurement"]
    measured["time_ms"] = [2 * time for time in measured["time_ms"]]
    entry["result"] = combine(entry["runs"])


BENCH_FORGERIES = {
    "the median of tokens_per_sec": lambda ours, peer: peer["result"]["tokens_per_sec"].update(median=1.0),
    "times slow": lambda ours, peer: ours["result"]["times_peers"].update(slow=9.0),
    "which has no result": lambda ours, peer: peer.update(result=None),
    "do not follow from their times": lambda ours, peer: peer["runs"][0]["measurement"]["time_ms"].reverse(),
    "measured other runs": lambda ours, peer: ours["runs"][0]["measurement"]["tokens_per_sec"].reverse(),
    "none of its runs has rows": lambda ours, peer: peer.update(runs=[]),
    "the same name": lambda ours, peer: peer.update(name="Qwen3"),
    "tokens an iteration": lambda ours, peer: take_twice_the_time(peer),
}


@pytest.mark.parametrize("message", BENCH_FORGERIES)
def test_bench_that_does_not_follow_from_its_rows_is_named(record, message):
    bench = bench_of(record[1])
    assert bench_disagreements(bench, record[1]) == []
    BENCH_FORGERIES[message](*bench["entries"])
    assert any(message in line for line in bench_disagreements(bench, record[1]))
    with pytest.raises(UserError, match="bench cannot be read"):
        bench_disagreements({"entries": [{"name": 1}]}, record[1])


def test_software_of_a_bench_calls_the_processor_no_gpu():
    facts = software_here()
    assert facts["cpu_name"] and "gpu_name" not in facts and facts["torch"]
