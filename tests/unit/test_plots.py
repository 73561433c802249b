"""What plots/ promises: any run record, however short, broken or old, gives a PNG or one clear error."""

import json
import math
import random
import sys
from pathlib import Path

import numpy as np
import pytest
from support import warm_python
from support.helpers import HANG_S

from common.errors import UserError
from common.text import aligned
from plots import compare_runs, facts, plot_single_run, report
from plots.run_record import expand_globs, load_run, recounted, spread
from training.records import percentiles

PLOTS = Path(__file__).resolve().parents[2] / "plots"

V1, V2, V3 = "nanogpt_legacy_v1", "combined_formula_v2", "component_summation_v2025"
QWEN3 = {V1: 12_190_334_976, V2: 10_322_706_432, V3: 10_322_706_432}  # training FLOPs per token
CAUSAL_SHARE = 9_718_726_656 / 10_322_706_432
PEAK = 8 * 2250e12  # 8 dense B200
TOKENS_PER_ITER = 22 * 2 * 8 * 2048


# --- fabricated records ---


def new_record(
    iters=2000, method=V3, every=10, warmup=20, tokens_per_sec=727_000, sparse=False, measured=False
):
    """A Qwen3 1.8B run on 8 B200s as train.py logs it now, with slow warm-up steps and a few stragglers."""
    noise = random.Random(iters)
    peak = PEAK * (2 if sparse else 1)
    rows = []
    for step in range(0, iters, every):
        slow = 60.0 if step == 0 else 1.3 if step < warmup else 1.5 if noise.random() < 0.01 else 1.0
        speed = tokens_per_sec / slow * noise.gauss(1, 0.003)
        mfu = mfu_facts(speed, method, peak, sparse)
        rows.append(training_row(step, speed, mfu, noise) | {"warmup": step < warmup})
    evaluations = [step for step in range(0, iters, 250) if step]
    return {
        "run_name": "qwen3-1.8b-b200",
        "start_time": "2025-11-21T07:06:00",
        "end_time": "2025-11-21T07:56:00",
        "status": "completed",
        "config": {"arch_preset": "qwen3", "dtype": "bfloat16", "device": "cuda"},
        "startup_info": {
            "model": {"total_params": 1_830_395_904, "architecture": "qwen3"},
            "hardware": {"gpu_name": "NVIDIA B200", "num_gpus": 8, "precision": "bf16"}
            | {"peak": {"measured": measured}},
            "flops": {"totals": dict(QWEN3)},
        },
        "training_iterations": rows,
        "eval_steps": [
            {"iter": step, "train_loss": loss_at(step), "val_loss": loss_at(step) + 0.06, "lr": 3e-4}
            for step in evaluations
        ],
        "summary": {"best_val_loss": loss_at(evaluations[-1]) + 0.06 if evaluations else None},
    }


def loss_at(step):
    return 2.9 + 9.0 * math.exp(-step / 120) + 1.2 * math.exp(-step / 900)


def mfu_facts(tokens_per_sec, method, peak, sparse=False):
    mfu = tokens_per_sec * QWEN3[method] / peak
    return {
        "mfu": mfu,
        "mfu_percent": 100 * mfu,
        "mfu_causal_percent": 100 * mfu * CAUSAL_SHARE,
        "flops_per_token": QWEN3[method],
        "tokens_per_sec": tokens_per_sec,
        "hardware_peak_flops": peak,
        "gpu_name": "NVIDIA B200",
        "precision": "bf16",
        "num_gpus": 8,
        "sparse_mode": sparse,
        "calculation_method": method,
    }


def training_row(step, tokens_per_sec, mfu, noise):
    row = {
        "iter": step,
        "loss": loss_at(step) + noise.gauss(0, 0.04),
        "time_ms": 1000 * TOKENS_PER_ITER / tokens_per_sec,
        "lr": 3e-4 * min(1, (step + 1) / 200),
        "tokens_per_sec": tokens_per_sec,
        "mfu": mfu,
        "memory": {"allocated_gb": 13.53, "reserved_gb": 111.2, "max_allocated_gb": 103.26 if step else 60.0},
    }
    if step % 50 == 0:
        row["gradients"] = {"global_norm": 0.4 + 6 * math.exp(-step / 60) + abs(noise.gauss(0, 0.05))}
    return row


def resumed_record(iters=1000, stop=600):
    """Killed at 640, gone on from the checkpoint of 600 at half of the speed: the second attempt's record."""
    first, second = new_record(stop + 40), new_record(iters, tokens_per_sec=363_500)
    kept = [row | {"attempt": 1} for row in first["training_iterations"] if row["iter"] < stop]
    lost = [row | {"attempt": 1} for row in first["training_iterations"] if row["iter"] >= stop]
    made = [row | {"attempt": 2} for row in second["training_iterations"] if row["iter"] >= stop]
    made = [row | {"warmup": row["iter"] < stop + 20} for row in made]
    return second | {
        "attempt": 2,
        "attempts": [{"attempt": 1, "start_iter": 0}, {"attempt": 2, "start_iter": stop}],
        "training_iterations": kept + made,
        "superseded": {"training_iterations": lost},
    }


def cpu_record(iters=60):
    record = new_record(iters, every=1, warmup=3, tokens_per_sec=4000)
    reason = "a CPU has no published peak; set peak_tflops to state one"
    for row in record["training_iterations"]:
        row |= {"mfu": None, "mfu_reason": reason, "memory": {}}
    record["startup_info"]["hardware"] = {"gpu_name": None, "num_gpus": 0, "precision": "float32"}
    return record | {"config": {"device": "cpu", "arch_preset": "gpt2"}}


def old_record(iters=200, method=V1):
    """A field log: -100.0 for the first MFU, evaluation inside time_ms, 1e9 for no validation loss."""
    record = new_record(iters, method, every=1, warmup=5)
    for row in record["training_iterations"]:
        del row["warmup"], row["tokens_per_sec"]
        if row["iter"] % 50 == 0:
            row["time_ms"] *= 20
            row["mfu"] = mfu_facts(row["mfu"]["tokens_per_sec"] / 20, method, PEAK)
    record["training_iterations"][0]["mfu"] = -100.0
    losses = [{"iter": step, "train_loss": 3.0, "val_loss": 3.1} for step in range(0, iters, 50)]
    kept = {key: record[key] for key in ("run_name", "start_time", "config", "training_iterations")}
    return kept | {"eval_steps": losses, "best_val_loss": 1e9}


def write(folder, record, name="run_20251121_070600"):
    path = folder / f"{name}.json"
    path.write_text(record if isinstance(record, str) else json.dumps(record))
    return path


# --- a seal ---


@pytest.mark.parametrize("version", [1, 2])
def test_the_record_within_a_seal_is_read(version, tmp_path):
    record = new_record(300)
    plain, sealed = (
        load_run(write(tmp_path, content, name))
        for name, content in {"run_a": record, "seal_a": {"seal": version, "record": record}}.items()
    )
    assert sealed.record == plain.record and sealed.best_val_loss == plain.best_val_loss
    assert sealed.columns.keys() == plain.columns.keys()
    for name, values in plain.columns.items():
        np.testing.assert_array_equal(values, sealed.columns[name])


@pytest.mark.parametrize("record", [None, [], {"training_iterations": 3}])
def test_a_seal_without_a_record_is_one_clear_line(record, tmp_path):
    with pytest.raises(UserError, match="is not a run record: it has no list of training_iterations"):
        load_run(write(tmp_path, {"seal": 2, "record": record}, "seal_a"))


def test_a_glob_takes_a_run_once_and_seals_that_stand_alone(tmp_path):
    """run_*.seal.json is the earlier name of a seal, beside its record."""
    files = [write(tmp_path, new_record(20), name) for name in ("run_a", "run_a.seal", "run_b.seal")]
    assert expand_globs([str(tmp_path / "run_*.json")]) == [files[0], files[2]]
    assert expand_globs(list(map(str, files))) == [files[0], files[2]], "as a shell expands it"
    assert expand_globs([str(files[1])]) == [files[1]]


def test_published_seals_are_plotted_compared_and_reported(tmp_path):
    names = ("quickstart_cpu", "qwen3_1.8b_h200")
    seals = [str(PLOTS.parent / "seals" / f"{name}.seal.json") for name in names]
    for command, files in ((plot_single_run, seals[:1]), (compare_runs, seals), (report, seals[1:])):
        out = tmp_path / f"out.{'html' if command is report else 'png'}"
        assert command.main([*files, f"--output={out}"]) == 0
        assert out.stat().st_size > 10_000
        out.unlink()


# --- one run ---


ENDING = ("summary", "end_time")  # what a record lacks whose run was killed between two log lines
KILLED = {key: value for key, value in new_record(300).items() if key not in ENDING} | {"status": "running"}
SHAPES = {
    "complete": new_record(),
    "one iteration": new_record(1),
    "no iteration": new_record(0),
    "killed": KILLED,
    "failed": KILLED | {"status": "failed"},
    "cpu": cpu_record(),
    "resumed": resumed_record(),
    "old": old_record(),
    "old, one iteration": old_record(1),
    "bare": {"training_iterations": [{}, {"iter": 1, "loss": None, "mfu": -100.0}, {"loss": 3.0, "mfu": {}}]},
    "wrong types": dict(training_iterations=[], eval_steps=None, startup_info=3, config=[], summary=""),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_any_run_gives_a_png_and_a_page_beside_its_record(shape, tmp_path, capsys):
    path = write(tmp_path, SHAPES[shape])
    assert plot_single_run.main([str(path)]) == 0
    assert report.main([str(path)]) == 0 and "</h1>" in path.with_suffix(".html").read_text()
    png = path.with_suffix(".png")
    assert png.read_bytes().startswith(b"\x89PNG") and str(png) in capsys.readouterr().out


def test_the_peak_of_a_cpu_is_not_called_that_of_a_gpu(tmp_path):
    record = new_record(100, measured=True)
    record["config"]["device"] = "cpu"
    assert load_run(write(tmp_path, record)).peak == "2250.0 TFLOPS, measured"


@pytest.mark.parametrize(
    ("record", "kind"),
    [
        (new_record(100), "2,250 TFLOPS per GPU"),
        (new_record(100, sparse=True), "4,500 TFLOPS per GPU, 2:4 sparse"),
        (new_record(100, measured=True), "2,250 TFLOPS per GPU, measured"),
    ],
)
def test_an_mfu_names_its_formula_and_its_peak(tmp_path, record, kind):
    run = load_run(write(tmp_path, record))
    assert f"MFU by {V3} of {kind}" in panels(plot_single_run.plot(run))
    assert f"MFU by {V3}, peak {kind}" in facts.describe(run)


def panels(fig):
    return {" ".join(axis.get_title(loc="left").split()): axis for axis in fig.axes}


def test_an_mfu_above_100_percent_is_called_an_error(tmp_path, capsys):
    assert compare_runs.main([str(write(tmp_path, new_record(100, tokens_per_sec=2_000_000)))]) == 0
    assert "an MFU above 100 % is an error of measurement" in capsys.readouterr().err


def test_the_first_step_does_not_flatten_the_step_times(tmp_path):
    axis = panels(plot_single_run.plot(load_run(write(tmp_path, new_record()))))["Step time"]
    assert axis.get_ylim()[1] < 2000  # steps of 1 s; the first takes 60 s
    assert any("off the scale" in text.get_text() for text in axis.texts)


def test_dollars_in_a_name_are_not_a_formula(tmp_path):
    path = write(tmp_path, new_record(20), r"$\oops$ at $5")
    assert plot_single_run.main([str(path)]) == 0
    assert compare_runs.main([str(path)]) == 0


def test_output_is_for_one_run(tmp_path, capsys):
    first, second = write(tmp_path, new_record(20), "a"), write(tmp_path, new_record(20), "b")
    target = tmp_path / "new" / "x.png"
    assert plot_single_run.main([str(first), "--output", str(target)]) == 0 and target.exists()
    assert plot_single_run.main([str(first), str(second), "--output", str(target)]) == 2
    assert plot_single_run.main([str(first), "--output", str(tmp_path / "x.pdf")]) == 2
    assert "must end in .png" in capsys.readouterr().err


# --- what counts as a measurement ---


@pytest.mark.parametrize("iters", [30, 90, 100, 1000])
def test_spread_of_a_plot_is_that_of_the_records_summary(iters, tmp_path):
    run = load_run(write(tmp_path, new_record(iters)))
    for name in ("time_ms", "tokens_per_sec", "mfu_percent"):
        found = percentiles.spread(run.columns[name][run.timed].tolist())
        assert spread(run, name) == pytest.approx((found["median"], found["p10"], found["p90"]), rel=1e-15)


def test_a_resumed_run_has_each_iteration_once_two_warm_ups_and_the_medians_of_its_last_attempt(tmp_path):
    run = load_run(write(tmp_path, resumed_record()))
    assert run.columns["iter"].tolist() == list(range(0, 1000, 10))
    assert spread(run, "tokens_per_sec")[0] == pytest.approx(363_500, rel=0.01)
    assert run.columns["iter"][run.timed].tolist() == list(range(620, 1000, 10))
    assert spread(load_run(write(tmp_path, new_record(10, every=1), "warming_up")), "time_ms") is None
    found = panels(plot_single_run.plot(run))
    assert [line.get_xdata()[0] for line in found["Loss"].lines if line.get_label() == "resumed"] == [599.5]
    spans = [(p.get_x(), p.get_x() + p.get_width(), p.get_label()) for p in found["Throughput"].patches]
    assert [span[:2] for span in spans] == [(-0.5, 10.5), (599.5, 610.5)]
    assert [label == "warm-up" for *_, label in spans] == [True, False]


def test_old_logs_lose_five_iterations_and_their_evaluations(tmp_path):
    record = old_record()
    run = load_run(write(tmp_path, record))
    timed = run.columns["iter"][run.timed & np.isfinite(run.columns["time_ms"])]
    assert sorted({*range(200)} - {*timed.tolist()}) == [0, 1, 2, 3, 4, 50, 100, 150]
    assert run.mfu_methods == (V1,)
    rows = [row["mfu"] for row in record["training_iterations"][1:] if row["iter"] % 50]
    found = run.columns["mfu_percent"]
    assert found[np.isfinite(found)].tolist() == pytest.approx([mfu["mfu_percent"] for mfu in rows])


def test_a_billion_is_not_a_validation_loss(tmp_path):
    record = new_record(20) | {"eval_steps": [], "summary": {"best_val_loss": 1e9}}
    assert load_run(write(tmp_path, record)).best_val_loss is None
    assert load_run(write(tmp_path, record | {"summary": {"best_val_loss": 2.5}})).best_val_loss == 2.5


def test_tokens_per_sec_is_found_wherever_it_was_logged(tmp_path):
    mfu = {"mfu": 0.4, "tokens_per_sec": 20.0}
    rows = [
        {"iter": 0, "tokens_per_sec": 10.0, "mfu": mfu},
        {"iter": 1, "mfu": mfu},
        {"iter": 2, "mfu": None},
    ]
    record = {"training_iterations": rows, "training_progress": [{"iter": 2, "tokens_per_sec": 30.0}]}
    run = load_run(write(tmp_path, record))
    assert run.columns["tokens_per_sec"].tolist() == [10, 20, 30]
    assert run.columns["mfu_percent"][:2].tolist() == [40, 40]


# --- several runs ---


def test_mfus_by_two_formulas_are_refused_until_all_are_recounted_by_one(tmp_path, capsys):
    paths = [str(write(tmp_path, new_record(100, V1), "a")), str(write(tmp_path, new_record(100, V3), "b"))]
    assert compare_runs.main(paths) == 2
    message = capsys.readouterr().err
    assert V1 in message and V3 in message and "--method v1|v2|v3" in message and message.count("\n") == 1
    assert not list(tmp_path.glob("*.png"))
    for asked in ("v3", V3):
        assert compare_runs.main([*paths, "--method", asked]) == 0
        out = capsys.readouterr().out
        assert V1 not in out and out.count(V3) == 1 and (tmp_path / "compare_runs.png").exists()


def test_a_recount_is_tokens_times_flops_over_peak(tmp_path):
    run = load_run(write(tmp_path, new_record(100, V1)))
    recount = recounted(run, V3)
    quotient = spread(run, "mfu_percent")[0] / spread(recount, "mfu_percent")[0]
    assert quotient == pytest.approx(1.1809, abs=1e-4)
    again = recounted(recount, V1)
    assert again.columns["mfu_percent"].tolist() == pytest.approx(run.columns["mfu_percent"].tolist())


def test_an_old_log_cannot_be_recounted_but_keeps_its_own_method(tmp_path, capsys):
    paths = [str(write(tmp_path, old_record(), "old")), str(write(tmp_path, new_record(100), "new"))]
    assert compare_runs.main([*paths, "--method", "v3"]) == 2
    message = capsys.readouterr().err
    assert "old.json" in message and "startup_info.flops" in message
    assert compare_runs.main([*paths, "--method", "v1"]) == 0


def test_a_run_without_mfu_joins_any_comparison(tmp_path, capsys):
    paths = [str(write(tmp_path, cpu_record(), "cpu")), str(write(tmp_path, new_record(100, V1), "gpu"))]
    assert compare_runs.main([*paths, "--method", "v3"]) == 0
    assert compare_runs.main(paths) == 0
    assert compare_runs.main([str(write(tmp_path, new_record(0), "empty")), paths[0]]) == 0


def test_the_table_holds_what_was_measured(tmp_path, capsys):
    path = write(tmp_path, KILLED, "probe")
    assert compare_runs.main([str(path)]) == 0
    named, table = capsys.readouterr().out.split("\n\n")[:2]
    assert named.startswith("A  ") and "/probe: qwen3" in named
    for fact in ("8 x NVIDIA B200", "bf16", "2,250 TFLOPS per GPU", V3):
        assert fact in " ".join(named.split()), fact
    row = table.splitlines()[2]
    median, low, high = spread(load_run(path), "tokens_per_sec")
    mfu = spread(load_run(path), "mfu_percent")[0]
    assert f"{median:,.0f}  {low:,.0f} to {high:,.0f}" in row and mfu == pytest.approx(41.69, abs=0.1)
    for cell in ("A ", "running, or killed", "103.26", f"{mfu:.2f}", f"{loss_at(250) + 0.06:.4f}"):
        assert cell in row, (cell, row)


def test_columns_are_aligned_also_beside_wide_characters():
    lines = aligned(["run", "tokens/s"], [["日本語", "12"], ["plain", "1,234,567"]], ["run"])
    assert lines == [
        "run      tokens/s",
        "------  ---------",
        "日本語         12",  # as wide as six letters
        "plain   1,234,567",
    ]
    assert aligned(["a"], [["1e5"]], [], "github") == ["|   a |", "|-----|", "| 1e5 |"]  # text stays as it is


def test_different_peaks_are_a_warning(tmp_path, capsys):
    other = new_record(100)
    for row in other["training_iterations"]:
        row["mfu"]["hardware_peak_flops"] = 8 * 989.4e12
    records = {"sparse": new_record(100, sparse=True), "h200": other, "b200": new_record(100)}
    paths = [str(write(tmp_path, record, name)) for name, record in records.items()]
    assert compare_runs.main(paths) == 0
    listing = "2,250 TFLOPS per GPU and 4,500 TFLOPS per GPU, 2:4 sparse and 989.4 TFLOPS per GPU"
    assert f"WARNING: these MFUs are of different peaks ({listing})" in capsys.readouterr().err
    runs = [load_run(Path(path)) for path in paths]
    labels = [text.get_text() for text in compare_runs.plot(runs, list(records)).legends[0].get_texts()]
    assert [label.endswith("4,500 TFLOPS per GPU, 2:4 sparse") for label in labels] == [True, False, False]
    assert compare_runs.main(paths[:1]) == 0 and "WARNING" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("one", "other", "differ"),
    [
        ({"name": "llama", "sha256": "aa"}, {"name": "qwen", "sha256": "bb"}, True),
        ({"name": "llama", "sha256": "aa"}, {"name": "a folder", "sha256": "aa"}, False),
        ({"name": "gpt2"}, {"name": "qwen", "sha256": "bb"}, True),
        ({"name": "char", "chars": ["a"]}, {"name": "char", "chars": ["b"]}, True),
        ("gpt2", {"name": "gpt2"}, False),
        (None, {"name": "gpt2"}, False),
    ],
)
def test_losses_of_different_tokenizers_share_no_axis(tmp_path, capsys, one, other, differ):
    paths = []
    for name, tokenizer in (("one", one), ("other", other)):
        record = new_record(100) | {"eval_steps": [{"iter": 50, "train_loss": 3.0, "val_loss": 3.1}]}
        if tokenizer:  # None: the log does not say
            record["startup_info"]["data"] = {"sources": [{"meta": {"tokenizer": tokenizer}}]}
        paths.append(str(write(tmp_path, record, name)))
    assert compare_runs.main(paths) == 0
    assert ("nats per token" in capsys.readouterr().err) == differ
    figure = compare_runs.plot([load_run(Path(path)) for path in paths], ["one", "other"])
    titles = {axis.get_title(loc="left").split(" by ")[0] for axis in figure.axes}
    assert titles == {"MFU", "Throughput"} | (set() if differ else {"Loss (crosses: validation)"})
    assert ("different tokenizers" in figure.get_supxlabel()) == differ


# --- bad input, and the scripts as a user starts them ---


def test_a_glob_finds_records_in_a_folder_with_brackets_or_is_an_error(tmp_path, capsys):
    path = tmp_path / "out [1]" / "run_a.json"
    path.parent.mkdir()
    path.write_text("{}")
    assert expand_globs([str(tmp_path / "out [1]" / "run_*.json")]) == [path]
    assert compare_runs.main([str(tmp_path / "run_*.json")]) == 2
    assert "nothing matches" in capsys.readouterr().err
    assert plot_single_run.main([str(tmp_path)]) == 2
    assert "Is a directory" in capsys.readouterr().err


def test_missing_matplotlib_comes_with_the_command_that_installs_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UserError, match="pip install matplotlib"):
        plot_single_run.plot(load_run(write(tmp_path, new_record(20))))


def test_the_scripts_run_from_any_folder_with_a_quoted_glob(tmp_path):
    write(tmp_path, new_record(100), "run_1")
    write(tmp_path, new_record(100, V1), "run_2")
    keywords = dict(cwd=tmp_path, capture_output=True, text=True, timeout=HANG_S)
    single, refused = (
        warm_python.run([sys.executable, str(PLOTS / script), "run_*.json"], **keywords)
        for script in ("plot_single_run.py", "compare_runs.py")
    )
    assert single.returncode == 0 and single.stdout.split() == ["wrote", "run_1.png", "wrote", "run_2.png"]
    assert refused.returncode == 2 and refused.stderr.startswith("error: ")
    assert "Traceback" not in refused.stderr
