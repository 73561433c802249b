"""What a reader sees in a plot: the whole run at a readable scale, every marker, and no empty panel."""

import numpy as np
import pytest
from test_plots import (
    QWEN3,
    TOKENS_PER_ITER,
    V3,
    cpu_record,
    loss_at,
    new_record,
    panels,
    resumed_record,
    write,
)

from plots import compare_runs, plot_single_run
from plots.run_record import load_run

COMPARED = "Loss (crosses: validation)"


def run_of(folder, record=None, name="run", tokens_per_iter=None):
    record = record or new_record()
    if tokens_per_iter:
        record["startup_info"]["tokens_per_iter"] = tokens_per_iter
    return load_run(write(folder, record, name))


def both(folder):
    """The loss panels of a single plot and of a comparison."""
    run = run_of(folder)
    compared = panels(compare_runs.plot([run, run], ["a", "b"]))
    return panels(plot_single_run.plot(run))["Loss"], compared[COMPARED]


def test_the_last_90_percent_of_a_run_fill_the_loss_panel(tmp_path):
    for axis in both(tmp_path):
        first, last = loss_at(200), loss_at(2000)
        low, high = axis.get_ylim()
        assert low < last and high > first, "all of the last 90 % is visible"
        assert (first - last) / (high - low) > 0.4, "and takes much of the panel's height"
        assert high < loss_at(0) / 1.5
        assert any("off the scale, to" in text.get_text() for text in axis.texts)


def test_a_short_run_shows_its_whole_fall(tmp_path):
    axis = panels(plot_single_run.plot(run_of(tmp_path, new_record(490))))["Loss"]
    assert axis.get_ylim()[1] > loss_at(0) and not axis.texts


def test_the_mean_is_in_front_of_the_raw_curve(tmp_path):
    for axis in both(tmp_path):
        raw, mean = axis.lines[:2]
        assert raw.get_alpha() < 0.5 and raw.get_zorder() <= mean.get_zorder()
        assert len(raw.get_ydata()) == len(mean.get_ydata()) == 200
        assert mean.get_ydata()[0] == pytest.approx(np.mean(raw.get_ydata()[:3]))  # fewer at the ends
        assert mean.get_ydata()[100] == pytest.approx(np.mean(raw.get_ydata()[98:103]))
        assert "mean of 4" in mean.get_label()


def test_a_few_points_are_not_smoothed(tmp_path):
    axis = panels(plot_single_run.plot(run_of(tmp_path, new_record(60))))["Loss"]
    assert len([line for line in axis.lines if len(line.get_xdata()) == 6]) == 1


@pytest.mark.parametrize("sizes", [(1000, 1000), (1000, 2000)])
def test_losses_of_several_runs_are_drawn_over_tokens_on_a_logarithmic_axis(tmp_path, sizes):
    """At the tokens that their weights have seen: both losses are measured before an iteration's update."""
    named = zip(("a", "b"), sizes, strict=True)
    runs = [run_of(tmp_path, name=name, tokens_per_iter=size) for name, size in named]
    compared = panels(compare_runs.plot(runs, ["a", "b"]))
    axis = compared[COMPARED]
    assert axis.get_xlabel() == "tokens" and axis.get_yscale() == "log" and not axis.child_axes
    ticks = axis.yaxis.get_major_formatter().format_ticks(axis.get_yticks())
    assert len(ticks) > 2 and "10" not in "".join(ticks).replace("10.", ""), ticks  # no powers of ten
    starts = [line.get_xdata()[:2].tolist() for line in axis.lines]  # of each run: raw, mean, validation
    assert starts == [[n * size for n in pair] for size in sizes for pair in ((0, 10), (0, 10), (250, 500))]
    assert compared["Throughput"].get_xlabel() == "iteration"
    runs[1] = run_of(tmp_path, name="does_not_say")
    assert panels(compare_runs.plot(runs, ["a", "b"]))[COMPARED].get_xlabel() == "iteration"


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("x", ["tokens", "time", "flops"])
def test_losses_are_drawn_over_what_is_asked_for(tmp_path, x):
    """In a plot of one run and of several; the marks of a single run are there, too."""
    record = resumed_record() | {"checkpoints": [{"iter": 500}]}
    run = run_of(tmp_path, record, tokens_per_iter=TOKENS_PER_ITER)
    steady = record["training_iterations"][30]["time_ms"] / 60_000  # minutes
    size = {"tokens": TOKENS_PER_ITER, "time": steady, "flops": TOKENS_PER_ITER * QWEN3[V3]}[x]
    label = {"tokens": "tokens", "time": "minutes of training", "flops": "FLOPs"}[x]
    single = panels(plot_single_run.plot(run, x))["Loss"]
    for axis in (single, panels(compare_runs.plot([run, run], ["a", "b"], x))[COMPARED]):
        assert axis.get_xlabel() == label and not axis.child_axes
        assert axis.lines[0].get_xdata()[50] == pytest.approx(500 * size, rel=0.05)
    resumed, saved = (
        next(i for i in single.lines if i.get_label() == name) for name in ("resumed", "checkpoint")
    )
    assert resumed.get_xdata()[0] == pytest.approx(599.5 * size, rel=0.05)
    assert saved.get_xdata() == pytest.approx([500 * size], rel=0.05)


def test_an_axis_that_a_log_does_not_tell_is_refused(tmp_path, capsys):
    path = str(write(tmp_path, new_record(100)))
    assert plot_single_run.main([path, "--x=flops"]) == 2
    error = capsys.readouterr().err
    assert "does not say its FLOPs; take --x iter" in error and error.count("\n") == 1
    assert plot_single_run.main([path, "--x=time"]) == 0


def test_a_loss_that_is_not_positive_leaves_the_axis_linear(tmp_path):
    record = new_record()
    record["training_iterations"][50]["loss"] = 0.0
    axis = panels(compare_runs.plot([run_of(tmp_path, record)], ["a"]))[COMPARED]
    assert axis.get_yscale() == "linear"


def test_equal_evaluation_losses_do_not_hide_each_other(tmp_path):
    record = new_record()
    for step in record["eval_steps"]:
        step["val_loss"] = step["train_loss"]
    axis = panels(plot_single_run.plot(run_of(tmp_path, record)))["Loss"]
    train, val = (line for line in axis.lines if line.get_label().startswith("evaluation"))
    assert train.get_markerfacecolor() == "none" and val.get_marker() == "x"
    assert train.get_marker() != val.get_marker()


@pytest.mark.parametrize("iters", [0, 1, 60])
def test_no_panel_is_empty_and_a_line_says_why(tmp_path, iters):
    run = run_of(tmp_path, cpu_record(iters))
    for fig in (plot_single_run.plot(run), compare_runs.plot([run], ["a"])):
        assert all(axis.lines for axis in fig.axes)
        assert not {"MFU", "Peak memory"} & panels(fig).keys()
        assert "MFU" in fig.get_supxlabel()
    assert ("a CPU has no published peak" in plot_single_run.plot(run).get_supxlabel()) == bool(iters)
    assert len(plot_single_run.plot(run_of(tmp_path, new_record(), "full")).axes) == 7


def test_clock_and_power_have_panels_where_they_were_logged(tmp_path):
    record = new_record(60)
    for number, row in enumerate(record["training_iterations"]):
        row |= {"sm_clock_mhz": 1500.0 + number, "power_w": 600.0 + number}
    record["training_iterations"][1] |= {"sm_clock_mhz": None, "power_w": None}  # shorter than a sample
    found = panels(plot_single_run.plot(run_of(tmp_path, record)))
    assert found["GPU clock"].lines[0].get_ydata().tolist() == [1500, 1502, 1503, 1504, 1505]
    assert found["GPU power"].lines[0].get_ydata().tolist() == [600, 602, 603, 604, 605]
    fig = plot_single_run.plot(run_of(tmp_path, new_record(60)))
    assert "GPU clock" not in panels(fig) and "GPU clock was not logged." in fig.get_supxlabel()


def test_an_earlier_attempt_at_another_speed_is_in_sight(tmp_path):
    record = resumed_record()
    low, high = panels(plot_single_run.plot(run_of(tmp_path, record)))["Throughput"].get_ylim()
    speeds = [row["tokens_per_sec"] for row in record["training_iterations"] if not row["warmup"]]
    assert low < min(speeds) < 400_000 and 700_000 < max(speeds) < high


# --- what differs ---


def compared(folder, capsys, *configs):
    paths = []
    for number, config in enumerate(configs):
        record = new_record(20)
        record["config"] = config
        paths.append(str(write(folder, record, f"run_{number}")))
    assert compare_runs.main(paths) == 0
    return capsys.readouterr().out


def test_settings_that_a_record_lacks_are_not_the_same(tmp_path, capsys):
    same = "The settings that these records share are the same, but for out_dir."
    output = compared(tmp_path, capsys, {"seed": 1, "out_dir": "a"}, {"seed": 1, "out_dir": "b"})
    assert same in output and "not recorded" not in output
    assert "The settings" not in compared(tmp_path, capsys, {"seed": 1})
    several = {"seed": 1, "dtype": "bfloat16", "d_ff": None}
    output = compared(tmp_path, capsys, several, {"seed": 1}, several, {"seed": 1})
    assert same in output and "  not recorded in B, D: dtype, d_ff\n" in output
    assert "  d_ff: None (A), 64 (B)\n" in compared(tmp_path, capsys, several, {**several, "d_ff": 64})
    output = compared(tmp_path, capsys, several, {})
    assert "  not recorded in B: everything\n" in output and "are the same" not in output
    assert "These records share no settings." in compared(tmp_path, capsys, {}, {})
    older = {**several, **{f"key_{number}": 1 for number in range(200)}}
    output = compared(tmp_path, capsys, several, older)
    assert "not recorded in A: key_0, " in output and " ... " in output and len(output) < 2000


def test_long_values_are_short_lines_also_from_anybody_and_if_only_their_ends_differ(tmp_path, capsys):
    long = "/data/" * 20
    output = compared(tmp_path, capsys, {"dataset": long + "1"}, {"dataset": long + "2"})
    (line,) = (line for line in output.splitlines() if line.startswith("  dataset: "))
    assert "1 (A), " in line and "are the same" not in output
    output = compared(tmp_path, capsys, {"dataset": "a\x1b[2J\nb" * 50}, {"dataset": "c"}, {})
    (line,) = (line for line in output.splitlines() if line.startswith("  dataset: "))
    assert "\x1b" not in output and len(line.split(" (A)")[0]) <= 55 and line.endswith("c (B)")
    assert "  not recorded in C: everything" in output
