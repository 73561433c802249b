"""bench.precision: its rows, what they say about the published study, and the whole command on the CPU."""

import contextlib
import io
import json
import shutil
import subprocess
import sys
import types

import pytest
from support import warm_python
from support.helpers import ROOT, TINY, make_dataset

from bench import precision, process, runner
from bench.precision import COLUMNS, table_rows
from bench.precision_rows import B200_FLOPS, CONFIG, PUBLISHED, ROWS, published
from bench.process import end_with_status
from mfu_versions import model_builder_v3 as v3
from training.configuration.files_and_flags import load_config
from training.pretrained.settings import load_run_config

SHAPE = "n_layer n_head num_key_value_heads n_embd d_ff block_size batch_size device compile".split()
SIZES = [f"--{key}={TINY[key]}" for key in SHAPE] + ["--gradient_accumulation_steps=1", "--peak_tflops=1"]
SHORT = ["--seeds=1,2", "--loss_iters=6", "--iters=2", "--warmup=1", *SIZES]

# What the study's tokens/s are, counted with the logits in every row: MFU in percent of a B200's bf16 peak
# with attention in full, and with its causal half.
CORRECTED = """1 42.0 37.5, 2 44.6 39.8, 3 46.2 41.3, 4 55.7 49.7, 5 44.4 39.7, 6 53.3 47.6, 7 44.8 40.0,
    8 53.7 47.9, 9 45.3 40.4, 10 52.6 47.0, 11 41.5 37.1, 12 49.1 43.8, 13 44.0 39.3, 14 51.5 45.9"""


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    return make_dataset(tmp_path_factory.mktemp("matrix") / "tokens", eot_id=0)


@pytest.fixture(scope="module", autouse=True)
def warm():
    """The benchmark's runs are forks of a process that has imported torch."""
    calls = types.SimpleNamespace(**{name: getattr(subprocess, name) for name in ("DEVNULL", "STDOUT")})
    calls.TimeoutExpired, calls.Popen = subprocess.TimeoutExpired, warm_python.Popen
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process, "subprocess", calls)
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


def read_table(folder) -> dict:
    return json.loads((folder / "table.json").read_text())


def row_of(content: dict, name: str) -> dict:
    return next(row for row in content["rows"] if row["row"] == name)


# --- the rows ---


@pytest.mark.parametrize("line", CORRECTED.split(","))
def test_the_published_mfu_follows_from_the_studys_formula_and_is_corrected_by_ours(line):
    """The study's: 6 (N - N_embedding) + 12 L H D T FLOPs for a token. N counts a tied matrix once, so the
    logits are in it only where they have weights of their own. Row 12 is printed 0.013 higher than its
    tokens/s give."""
    name, *percents = line.split()
    row, found = ROWS[name], published(ROWS[name])
    config = load_config([str(ROOT / CONFIG), f"--weight_tying={row.own['weight_tying']}"]).model_config()
    counted = v3.build_model(config).count_parameters()["total"] - config.vocab_size * config.n_embd
    flops = 6 * counted + 12 * config.n_layer * config.attention_width * config.block_size
    percent = 100 * found["study's tokens/s"] * flops / B200_FLOPS
    assert percent == pytest.approx(found["study's MFU %"], abs=0.014 if name == "12" else 0.006)
    assert [f"{found[column]:.1f}" for column in ("corrected %", "its causal %")] == percents


def test_the_studys_14_distinct_rows_and_both_kinds_of_rounding():
    study = {name: row for name, row in ROWS.items() if row.published}
    assert list(study) == [str(number) for number in range(1, 15)]
    assert len({str((row.own["param_dtype"], row.keys(28))) for row in study.values()}) == 14
    figures = {row["row"]: row for row in table_rows([])}
    assert figures["9"]["study's tokens/s"] == 77_487.93 and figures["9"]["study's memory %"] == 70.88
    assert not {*PUBLISHED} & figures["21"].keys() and {*PUBLISHED} < COLUMNS.keys()
    for name, row in study.items():
        twin = ROWS.get(f"{name}s")
        assert (twin is not None) == (row.own["param_dtype"] == "bfloat16")
        if twin:
            assert twin.keys(28) == {**row.keys(28), "weight_rounding": "stochastic"}
            assert not twin.published


@pytest.mark.parametrize(("blocks", "last"), [(28, 4), (8, 1), (2, 1), (20, 3)])
def test_15_percent_of_the_blocks_stay_in_bf16(blocks, last):
    assert ROWS["24"].keys(blocks)["low_precision_skip_last"] == last
    assert "low_precision_skip_last" not in ROWS["7"].keys(blocks)


# --- the command ---


@pytest.fixture(scope="module")
def finished(tmp_path_factory, tokens, warm):
    """(arguments, folder, output) of a run of three rows, one of which fails."""
    folder = tmp_path_factory.mktemp("finished") / "out"
    # 48 is no multiple of the 32 that mxfp8's blocks have
    arguments = [*SHORT, f"--dataset={tokens}", "--d_ff=48"]
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        assert precision.main([*arguments, f"--output={folder}", "--rows=1,5,21"]) == 1
    return arguments, folder, output.getvalue()


def test_the_matrix_has_speed_and_paired_losses_and_a_failing_row(finished):
    _, folder, output = finished
    content = read_table(folder)
    first, tensorwise, failed = (row_of(content, name) for name in ("1", "21", "5"))
    for row in (first, tensorwise):
        assert row["tokens/s"] > 0 and row["MFU %"] > 0
        # documents do not see each other, so the causal count is below its half of the scores
        assert row["causal %"] < row["MFU %"]
        assert row["of fp8 %"] is None  # a CPU emulates
        assert sorted(row["losses"]) == ["1", "2"] and "failed" not in row["note"]
        mean, spread = row["held-out loss"]
        assert mean == pytest.approx(sum(row["losses"].values()) / 2) and spread > 0
    changes = [100 * (tensorwise["losses"][seed] / first["losses"][seed] - 1) for seed in ("1", "2")]
    assert tensorwise["from row 1 %"][0] == pytest.approx(sum(changes) / 2)
    assert first["from row 1 %"] is None
    assert (first["executed as"], tensorwise["executed as"]) == ("bf16", "fp32, emulates fp8_tensorwise")
    assert failed["held-out loss"] is None and failed["tokens/s"] is None
    assert "speed 5, loss 5, seed 1, loss 5, seed 2 failed: " in failed["note"]
    assert "multiples of 32" in failed["note"] and failed["note"] in output
    assert row_of(content, "10")["note"] == "the logits' gradient in e5m2; untied; not run"
    assert (folder / "table.md").read_text().rstrip("\n") in output
    assert not list(folder.glob("runs/*/checkpoints"))


def test_held_out_losses_are_those_of_the_records_on_windows_that_fit_the_split(finished):
    _, folder, _ = finished
    losses = row_of(read_table(folder), "21")["losses"]
    for seed, loss in losses.items():
        (path,) = folder.glob(f"runs/loss-21--seed-{seed}.1/run_*.json")
        record = json.loads(path.read_text())
        assert record["config"]["seed"] == int(seed) and record["config"]["learning_rate"] == 6e-4
        assert [(step["iter"], step["val_loss"]) for step in record["eval_steps"]] == [(6, loss)]
        assert record["config"]["eval_iters"] == 7  # 124 windows, 16 at a time


def test_a_second_call_runs_what_is_missing_alone(finished, tmp_path, monkeypatch, capsys):
    arguments, first, _ = finished
    folder = shutil.copytree(first, tmp_path / "out")
    before = read_table(folder)
    started, run_entry = [], runner.run_entry

    def counted(entry, *rest):
        started.append(entry.name)
        run_entry(entry, *rest)

    monkeypatch.setattr(runner, "run_entry", counted)
    again = [*arguments, f"--output={folder}"]
    assert precision.main([*again, "--rows=1,21"]) == 0
    assert started == [] and "6 of 6 runs are finished" in capsys.readouterr().out
    assert precision.main([*again, "--rows=5", "--phase=speed"]) == 1 and started == ["speed 5"]  # it failed
    started.clear()
    assert row_of(read_table(folder), "21") == row_of(before, "21")
    # one phase alone still shows what the other has found
    assert precision.main([*again, "--rows=1", "--phase=speed"]) == 0
    assert started == [] and row_of(read_table(folder), "21")["losses"] == row_of(before, "21")["losses"]
    # what another process finishes meanwhile is not run, and is in the table
    (aside := tmp_path / "aside").mkdir()
    for name in ("loss-1--seed-1.1", "loss-21--seed-1.1"):
        (folder / "runs" / name).rename(aside / name)

    def while_another_runs(entry, *rest):
        (aside / "loss-21--seed-1.1").rename(folder / "runs/loss-21--seed-1.1")
        counted(entry, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(runner, "run_entry", while_another_runs)
        assert precision.main([*again, "--rows=1,21"]) == 0
    assert started == ["loss 1, seed 1"]
    assert row_of(read_table(folder), "21")["losses"] == row_of(before, "21")["losses"]
    started.clear()
    # a damaged result, another seed and other settings are run
    (folder / "runs/loss-21--seed-1.1/result.json").write_text('{"phase": "loss"')
    assert precision.main([*again, "--rows=21", "--seeds=1,2,3", "--phase=loss"]) == 0
    assert started == ["loss 21, seed 1", "loss 21, seed 3"]
    assert row_of(read_table(folder), "21")["losses"].keys() == {"1", "2", "3"}
    started.clear()
    assert precision.main([*again, "--rows=21", "--seeds=2", "--phase=loss", "--learning_rate=1e-3"]) == 0
    assert started == ["loss 21, seed 2"]


def test_a_row_says_what_ran_otherwise_than_asked(finished, tmp_path, capsys):
    arguments, first, _ = finished
    folder = shutil.copytree(first, tmp_path / "out")
    path = folder / "runs/speed-21.1/result.json"
    result = json.loads(path.read_text())
    assert result["facts"]["fallbacks"] == []
    result["facts"]["fallbacks"] = ["asked for sdpa (sdpa [flex attention] failed: no kernel)"]
    about = result.pop("about")  # an earlier version kept it so
    path.write_text(json.dumps({**about, "entry": result}))
    assert precision.main([*arguments, f"--output={folder}", "--rows=1,21"]) == 0
    output = capsys.readouterr().out
    assert "6 of 6 runs are finished" in output
    (line,) = (line for line in output.splitlines() if line.startswith("|  21 "))
    assert "asked for sdpa (sdpa [flex attention] failed: no kernel)" in line


HOLDS = """
import sys
from pathlib import Path
from bench.runner import claim
with claim(Path(sys.argv[1])) as ours:
    print(ours, flush=True)
    sys.stdin.read()
"""


def test_processes_that_share_a_folder_divide_its_runs(finished, tmp_path, capsys):
    arguments, first, _ = finished
    folder = shutil.copytree(first, tmp_path / "out")
    shutil.rmtree(folder / "runs/loss-21--seed-1.1")
    lock = folder / "runs/loss-21--seed-1.lock"
    command = [*arguments, f"--output={folder}", "--rows=21", "--phase=loss"]
    holds = [sys.executable, "-c", HOLDS, lock]
    with subprocess.Popen(holds, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "True\n"
        assert precision.main(command) == 0
        other.kill()
    said = capsys.readouterr().out
    assert "loss 21, seed 1: another process is at it" in said
    assert list(row_of(read_table(folder), "21")["losses"]) == ["2"]
    assert precision.main(command) == 0  # its process ended without a result
    assert sorted(row_of(read_table(folder), "21")["losses"]) == ["1", "2"]


def test_loss_from_hugging_faces_weights_takes_the_studys_settings(tmp_path, tokens):
    from support.hf_models import save

    weights = save("qwen3", tmp_path / "weights")
    given = ["--device=cpu", "--compile=False", "--phase=loss", "--block_size=32", "--seeds=7"]
    arguments, overrides = precision.parse([*given, f"--hf={weights}", f"--dataset={tokens}"])
    runs = {run.about["row"]: run for run in precision.runs_of("loss", arguments, tmp_path, overrides)}
    assert runs["1"].about["settings"].startswith("loss: config/cpt_qwen3_1.7b_4096.py --init_weights=hf:")
    for name in ("1", "13"):  # row 13 of the study is untied; these weights are tied
        config = load_run_config(runs[name].argv)
        assert runs[name].problem is None
        assert config.weight_tying and config.doc_masking and config.seed == 7
        assert (config.learning_rate, config.beta2, config.warmup_iters) == (2e-5, 0.999, 100)
        assert config.wsd_decay_shape == "cosine" and config.max_iters == config.eval_interval == 300
    assert config.low_precision == "nvfp4" and config.low_precision_scope == "layers_and_head"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--rows=1,99"], "there is no row '99'"),
        (["--rows=15"], "rows 15 to 20 of the study repeat 9 to 14"),
        (["--rows=1,20"], "rows 15 to 20 of the study repeat 9 to 14"),
        (["--seeds=one"], "'one' is not a whole number"),
        (["--phase=both"], "invalid choice"),
        (["--low_precision=nvfp4"], "low_precision is the benchmark's to set; use --rows"),
        (["--seed=3"], "use --rows, --seeds"),
        (["--learning_rat=1"], "did you mean 'learning_rate'"),
        (["--hf=nowhere"], "--hf needs --dataset"),
        (["--dataset=nowhere/tokens"], "there is no folder"),
    ],
)
def test_what_cannot_be_asked_for_is_refused_before_anything_runs(flags, message, tmp_path, capsys):
    assert end_with_status(precision.main, [*SHORT, f"--output={tmp_path / 'out'}", *flags]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.glob("out/runs/*"))


@pytest.mark.parametrize(
    ("most", "flags", "expected"),
    [
        (2**21, [], 7),
        (2**21, ["--eval_batch_size=4"], 31),
        (2**21, ["--eval_batch_size=200"], 1),
        (1280, [], 2),
    ],
)
def test_the_held_out_loss_is_of_all_windows_if_they_are_few(
    tokens, tmp_path, monkeypatch, most, flags, expected
):
    monkeypatch.setattr(precision, "EVAL_TOKENS", most)
    arguments, overrides = precision.parse([*SHORT, f"--dataset={tokens}", "--rows=1", *flags])
    run = precision.runs_of("loss", arguments, tmp_path, overrides)[0]
    assert load_run_config(run.argv).eval_iters == expected
