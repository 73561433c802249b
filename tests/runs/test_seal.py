"""Seals: what was changed is found and named, the MFU follows from the record alone, and a sealed run can be
run again by somebody else."""

import copy
import json
import shutil
import sys

import pytest
from support import warm_python
from support.helpers import ROOT, TINY, make_dataset, write_config

from common.command import run_command
from tools import replay
from tools import seal as seal_command
from tools.seal import digests_of, make_seal, recount, sha256
from training.configuration.files_and_flags import load_config
from training.configuration.keys import KEYS
from training.hardware.peaks import table_peak

STEPS = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a dataset and a finished run in out/."""
    folder = tmp_path_factory.mktemp("sealed")
    keys = {**TINY, "max_iters": STEPS, "log_interval": 1, "eval_interval": STEPS // 2, "peak_tflops": 1.0}
    keys["loss_targets"] = "3,0.1"
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
    """The path of a seal of a copy of it."""
    (tmp_path / "run_a.json").write_text(json.dumps(record[1]))
    assert run_command(seal_command.main, [str(tmp_path / "run_a.json")]) == 0
    return tmp_path / "seal_a.json"


def signed(seal):
    """The seal with digests that fit its content, as a forger makes them."""
    seal["digests"] = digests_of(seal)
    return seal | {"digest": sha256(seal["digests"])}


def faults(record):
    """Of a seal of this record."""
    return seal_command.faults(make_seal(record))


def verify(path, content=None):
    """The exit status of tools.seal --verify, of a file that is written anew if there is content."""
    if content is not None:
        path.write_text(json.dumps(content))
    return run_command(seal_command.main, ["--verify", str(path)])


def test_seal_of_a_run_is_verified_with_its_mfu_by_all_formulas(sealed, record, capsys):
    assert verify(sealed) == 0
    shown = capsys.readouterr().out
    startup, rate = record[1]["startup_info"], record[1]["summary"]["tokens_per_sec"]["median"]
    flops = {**startup["flops"]["totals"], "causal": startup["flops"]["flops_per_token_causal"]}
    assert len(flops) == 4 and flops["causal"] < flops["component_summation_v2025"]
    for formula, count in flops.items():  # peak_tflops is 1
        assert f"{formula}: {count:,} FLOPs/token, {100 * rate * count / 1e12:.2f} % MFU\n" in shown
    assert "Nothing was changed" in shown


@pytest.mark.parametrize("path", sorted((ROOT / "seals").glob("*.seal.json")), ids=lambda path: path.name)
def test_published_seals_verify_and_their_settings_are_those_of_this_code(path, tmp_path):
    assert verify(path) == 0
    record = json.loads(path.read_text())["record"]
    startup = record["startup_info"]
    stated = {**replay.settings(record, None), "out_dir": str(tmp_path)}
    config = load_config(
        [str(write_config(tmp_path / "replay.py", **stated))], startup["hardware"]["num_gpus"]
    )
    taken = {
        key: value for key, value in record["config"].items() if key in KEYS and key not in replay.NOT_TAKEN
    }
    # until 2026-11-28, None meant batch_size
    taken["eval_batch_size"] = taken["eval_batch_size"] or taken["batch_size"]
    assert len(taken) > 80 and {key: getattr(config, key) for key in taken} == taken


CHANGES = {
    "record": lambda seal: seal["record"]["training_iterations"][3].update(loss=1.0),
    "code": lambda seal: seal["code"].update(commit="0" * 40),
    "bench": lambda seal: seal.update(bench={"entries": []}),
    "digests": lambda seal: seal.update(digest="0" * 64),
}


@pytest.mark.parametrize("part", CHANGES)
def test_part_that_was_changed_by_hand_is_named(sealed, part, capsys):
    seal = json.loads(sealed.read_text())
    CHANGES[part](seal)
    assert verify(sealed, seal) == 1
    assert f"CHANGED after sealing: {part}\n" in capsys.readouterr().out
    assert run_command(replay.main, [str(sealed)]) == 2  # a changed seal is not run
    assert "CHANGED after sealing" in capsys.readouterr().err


def rows_of(record):
    return record["training_iterations"]


FORGERIES = {  # what somebody changes who makes the digests anew, and what names it
    "mfu.mfu_percent": lambda r: rows_of(r)[9]["mfu"].update(mfu_percent=99.0),
    "mfu.mfu_causal_percent": lambda r: rows_of(r)[9]["mfu"].update(mfu_causal_percent=99.0),
    "[9].tokens_per_sec is 1000000000.0": lambda r: rows_of(r)[9].update(tokens_per_sec=1e9),
    "summary.tokens_per_sec.median": lambda r: r["summary"]["tokens_per_sec"].update(median=1e9),
    "summary.tokens_per_sec.p90": lambda r: r["summary"]["tokens_per_sec"].update(
        p90=r["summary"]["tokens_per_sec"]["p90"] * (1 + 1e-6)
    ),
    "flops.totals": lambda r: r["startup_info"]["flops"]["totals"].update(combined_formula_v2=1),
    "flops.flops_per_token": lambda r: r["startup_info"]["flops"].update(
        calculation_method="combined_formula_v2", flops_per_token=1
    ),
    "mfu.calculation_method": lambda r: rows_of(r)[9]["mfu"].update(calculation_method="nanogpt_legacy_v1"),
    "mfu.hardware_peak_flops": lambda r: r["startup_info"]["hardware"]["peak"].update(tflops_per_gpu=0.5),
    "training_iterations[9].iter is 10, and the rest makes 9": lambda r: r["training_iterations"].pop(9),
    "tokens_per_iter": lambda r: r["startup_info"]["hardware"].update(num_gpus=2),
    "tokens_per_iter is 1": lambda r: r["startup_info"].update(tokens_per_iter=1),
    "mfu.num_gpus": lambda r: rows_of(r)[9]["mfu"].update(num_gpus=4),
    "tokens_per_sec_per_gpu": lambda r: rows_of(r)[9].update(tokens_per_sec_per_gpu=1.0),
    "model.architecture.n_layer": lambda r: r["config"].update(n_layer=99),
    "[9].tokens_seen": lambda r: rows_of(r)[9].update(tokens_seen=1),
    "[9].warmup": lambda r: rows_of(r)[9].update(warmup=True),
    "rows_after_warmup": lambda r: r["summary"].update(rows_after_warmup=3),
    "[9].mfu is None": lambda r: rows_of(r)[9].update(mfu=None),
    "summary.tokens_per_sec is None": lambda r: r["summary"].update(tokens_per_sec=None),
    "and the rest makes -": lambda r: rows_of(r)[9].update(time_ms=-5.0),
    "[9].tokens_per_sec is": lambda r: rows_of(r)[9].update(time_ms=float("nan")),
    "is inf": lambda r: r["summary"]["tokens_per_sec"].update(p10=float("inf")),
    "[10].iter is 9, and the rest makes 10": lambda r: rows_of(r).insert(9, rows_of(r)[9]),
    "[23].iter is 1000000000000, and the rest makes 23": lambda r: [
        r["summary"].update(final_iter=10**12),
        rows_of(r)[-1].update(iter=10**12),
    ],
    "summary.final_loss": lambda r: r["summary"].update(final_loss=0.1),
    "mfu.gpu_name": lambda r: r["startup_info"]["hardware"].update(gpu_name="NVIDIA B200"),
    "summary.final_iter": lambda r: r["summary"].update(final_iter=STEPS - 2),
    "summary.final_iter is 23, and the rest makes 22": lambda r: rows_of(r).pop(),
}


@pytest.mark.parametrize("name", FORGERIES)
def test_figure_that_does_not_follow_from_the_record_is_named(record, name, tmp_path, capsys):
    assert not faults(record[1])
    forged = make_seal(copy.deepcopy(record[1]))
    FORGERIES[name](forged["record"])
    assert verify(tmp_path / "forged.json", signed(forged)) == 1
    shown = capsys.readouterr().out
    assert "CHANGED" not in shown and name in shown.partition("DOES NOT AGREE")[2], shown
    (tmp_path / "run.json").write_text(json.dumps(forged["record"]))
    assert run_command(seal_command.main, [str(tmp_path / "run.json")]) == 2  # it is not sealed
    assert "run.json is not sealed: DOES NOT AGREE" in capsys.readouterr().err


def test_the_targets_that_were_reached_are_counted_again(record):
    """From rows and evaluations: another time, a loss that was never reached and a missing one are named."""
    summary = record[1]["summary"]
    reached, never = summary["loss_targets"]
    assert reached["training_seconds"] > 0 and never == {"loss": 0.1, "reached": None}
    claims = {
        "[0].training_seconds is 1e-05": [reached | {"training_seconds": 1e-05}, never],
        "[1].training_seconds is 5.0, and the rest makes None": [reached, never | {"training_seconds": 5.0}],
        " is [{'loss': 3": [reached],
        "[2].loss is 9": [reached, never, {"loss": 9, "reached": None}],
    }
    for what, claim in claims.items():
        summary["loss_targets"] = claim
        assert f"DOES NOT AGREE: seal.record.summary.loss_targets{what}" in faults(record[1])[0]


def test_record_without_a_peak_agrees_with_itself(record):
    content = record[1]
    content["startup_info"]["hardware"]["peak"].update(tflops_per_gpu=None)
    for row in rows_of(content):
        row["mfu"] = None
    content["summary"]["mfu_percent"] = None
    assert not faults(content)


@pytest.mark.parametrize("fp8_peak", [None, 2.0])
def test_row_above_the_peak_has_an_mfu_only_if_it_is_below_the_peak_of_fp8(record, fp8_peak):
    content = record[1]
    hardware, row = content["startup_info"]["hardware"], rows_of(content)[2]
    hardware["peak_fp8"] = {**hardware["peak"], "tflops_per_gpu": fp8_peak}
    row["time_ms"] *= row["mfu"]["mfu_percent"] / 101
    made = recount(content)["training_iterations"][2]["mfu"]
    assert made is None if fp8_peak is None else made["mfu_percent"] == pytest.approx(101)


def test_peak_that_is_not_the_datasheets_is_named(record):
    content = record[1]
    hardware = content["startup_info"]["hardware"]
    hardware.update(gpu_name="NVIDIA H200", precision="bfloat16")
    source = table_peak("NVIDIA H200", "bfloat16").source
    hardware["peak"].update(tflops_per_gpu=494.7, source=source)
    assert any("494.7" in line and "989.4" in line for line in faults(content))


def test_a_diverged_run_whose_loss_is_nan_is_honest(record):
    content = record[1]
    rows_of(content)[-1]["loss"] = content["summary"]["final_loss"] = float("nan")
    assert not faults(content)


def test_sealed_run_is_run_again_with_the_same_losses(sealed, tmp_path, capsys):
    out = tmp_path / "again"
    assert run_command(replay.main, [str(sealed), f"--out_dir={out}"]) == 0
    shown = capsys.readouterr().out
    assert f"all {STEPS} are equal to the last digit" in shown and "FLOPs/token" in shown
    assert "tokens/s       not compared" in shown and "All that can be compared here holds" in shown
    assert run_command(replay.main, [str(sealed), f"--out_dir={out}"]) == 2
    assert "has a run already" in capsys.readouterr().err


def on_a_gpu(record, **changed):
    """A copy of the record as if of a GPU; changed: a factor for each of losses, evaluations and speed."""
    side = copy.deepcopy(record)
    side["config"]["device"] = "cuda"
    side["startup_info"]["hardware"]["gpu_name"] = "NVIDIA H200"
    side["startup_info"]["data"]["fingerprint"] = changed.get("data", "ab" * 32)
    rows_of(side)[5]["loss"] *= changed.get("losses", 1)
    rows_of(side)[3]["loss"] *= 1.0001 if "losses" in changed else 1
    side["eval_steps"][-1]["val_loss"] *= changed.get("evaluations", 1)
    side["summary"]["tokens_per_sec"]["median"] *= changed.get("speed", 1)
    return side


@pytest.mark.parametrize(
    ("changed", "fails"),
    [
        ({}, []),
        ({"data": "cd" * 32}, ["data"]),
        ({"losses": 1.009, "evaluations": 0.991, "speed": 0.971}, []),
        ({"losses": 1.011}, ["losses"]),
        ({"losses": float("nan")}, ["losses"]),
        ({"evaluations": 0.989}, ["evaluations"]),
        ({"speed": 0.969}, ["tokens/s"]),
        ({"speed": 1.031}, ["tokens/s"]),
    ],
)
def test_what_differs_by_more_than_is_allowed_does_not_hold(record, changed, fails):
    found = replay.findings(on_a_gpu(record[1]), on_a_gpu(record[1], **changed))
    assert [what for what, holds, _ in found if not holds] == fails
    assert [what for what, *_ in found] == ["data", "FLOPs/token", "losses", "evaluations", "tokens/s"]


def test_what_cannot_be_compared_says_why(record):
    old, new = on_a_gpu(record[1]), on_a_gpu(record[1])
    new["startup_info"]["flops"]["totals"]["combined_formula_v2"] += 1
    new["startup_info"]["hardware"]["gpu_name"] = "NVIDIA B200"
    rows_of(new).pop()
    found = {what: (holds, text) for what, holds, text in replay.findings(old, new)}
    assert found["FLOPs/token"][0] is False
    assert found["losses"] == (False, f"iteration {STEPS - 1} has none now")
    assert found["tokens/s"][0] is None and "sealed on NVIDIA H200" in found["tokens/s"][1]
    old["summary"]["rows_after_warmup"] = 15
    assert "too few rows" in replay.findings(old, old)[-1][2]


REFUSED = {  # what a seal of another run may hold, and why it is not run again
    "weights that are not in a seal": lambda r: r["startup_info"].update(pretrained={"source": "hub"}),
    "began with weights": lambda r: r["startup_info"].update(resumed_from="out/ckpt"),
    "'__import__', no setting": lambda r: r["config"].update(__import__="os"),
    "'low_precision=x', no setting": lambda r: r["config"].update({"low_precision=x": "evil.module"}),
    "low_precision from the module evil.module": lambda r: r["config"].update(low_precision="evil.module"),
    "used 1000000 GPUs": lambda r: r["startup_info"]["hardware"].update(num_gpus=10**6),
}


@pytest.mark.parametrize("message", REFUSED)
def test_replay_refuses_what_it_cannot_or_must_not_run(record, message, tmp_path, monkeypatch, capsys):
    REFUSED[message](record[1])
    (tmp_path / "seal.json").write_text(json.dumps(make_seal(record[1])))
    monkeypatch.setattr(replay, "faults", lambda seal: [])  # a forger may make all figures fit
    assert run_command(replay.main, [str(tmp_path / "seal.json"), f"--out_dir={tmp_path / 'o'}"]) == 2
    assert message in capsys.readouterr().err and not (tmp_path / "o").exists()


@pytest.mark.parametrize(
    "damage, message",
    [
        (lambda text: text[: len(text) // 2], "is no record or seal, damaged"),
        (lambda text: "[]", "it is not a JSON object"),
        (lambda text: json.dumps(json.loads(text) | {"status": "running"}), "did not reach its last"),
        (lambda text: json.dumps({"training_iterations": []}), "of another version: KeyError"),
        (lambda text: json.dumps(json.loads(text) | {"startup_info": {}}), "of another version: KeyError"),
    ],
)
def test_file_that_cannot_be_sealed_is_one_line(record, damage, message, tmp_path, capsys):
    (path := tmp_path / "run.json").write_text(damage(record[0].read_text()))
    assert run_command(seal_command.main, [str(path)]) == 2
    error = capsys.readouterr().err
    assert message in error and str(path) in error and len(error.splitlines()) == 1


@pytest.mark.parametrize("name", ["quickstart_cpu", "qwen3_1.8b_h200"])  # of versions 2 and 1
def test_a_seal_is_not_sealed_again_and_the_command_that_is_named_checks_it(name, tmp_path, capsys):
    path = shutil.copy(ROOT / "seals" / f"{name}.seal.json", tmp_path / "seal_a.json")
    assert run_command(seal_command.main, [str(path)]) == 2
    error = capsys.readouterr().err
    assert f"{path} is a seal already" in error and len(error.splitlines()) == 1
    assert run_command(seal_command.main, error.partition("python -m tools.seal ")[2].split()) == 0
    assert [file.name for file in tmp_path.iterdir()] == ["seal_a.json"]


def test_run_record_and_cut_seal_are_no_seals(sealed, record, capsys):
    assert verify(record[0]) == 2
    assert "of a run record, `python -m tools.seal" in capsys.readouterr().err
    seal = json.loads(sealed.read_text())
    assert verify(sealed, seal | {"seal": 3}) == 2
    assert "is no seal of version 1 or 2: its 'seal' is 3" in capsys.readouterr().err
    del seal["digests"]
    assert verify(sealed, seal) == 2
    assert "damaged, or of another version: KeyError: 'digests'" in capsys.readouterr().err


@pytest.mark.parametrize("value", [None, [], {}, "a"])
def test_forged_figure_that_is_no_figure_ends_without_a_traceback(record, value, tmp_path):
    row, hardware = rows_of(record[1])[9], record[1]["startup_info"]["hardware"]
    places = [(row, "tokens_per_sec"), (row, "iter"), (row["mfu"], "calculation_method"), (hardware, "peak")]
    for place, name in [*places, (hardware, "precision"), (record[1]["summary"], "final_iter")]:
        place[name], known = value, place[name]
        assert verify(tmp_path / "seal.json", signed(make_seal(record[1]))) in (1, 2), name
        place[name] = known


def test_seal_is_never_written_over(sealed, capsys):
    assert run_command(seal_command.main, [str(sealed.with_name("run_a.json"))]) == 2
    assert "never written over" in capsys.readouterr().err


def test_secrets_of_a_record_are_not_sealed(record):
    record[1]["config"]["wandb_run_name"] = "https://me:hunter22@example.org"
    assert "hunter22" not in json.dumps(make_seal(record[1])["record"])


def test_replay_names_what_was_removed_and_shows_no_control_characters(sealed, tmp_path, monkeypatch, capsys):
    seal = json.loads(sealed.read_text())
    seal["record"]["config"]["spike_window"] = 64
    seal["code"]["reason"] = "\x1b[2Jcleared"
    sealed.write_text(json.dumps(signed(seal)))
    stopped = type("Done", (), {"reason": "not started"})()
    monkeypatch.setattr(replay, "run_process", lambda *_, **__: stopped)
    assert run_command(replay.main, [str(sealed), f"--out_dir={tmp_path / 'o'}"]) == 1
    out = capsys.readouterr().out
    assert "cleared" in out and "\x1b" not in out and "spike_window=64 was removed" in out


def test_code_that_is_not_the_records_is_named(sealed, capsys):
    seal = json.loads(sealed.read_text())
    seal["code"]["commit"] = "0" * 40
    assert verify(sealed, signed(seal)) == 1
    assert "DOES NOT AGREE: seal.code.commit" in capsys.readouterr().out
