"""What compare_runs says about the speed of runs: equal ones are rarely told apart, different ones are."""

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
from support.helpers import ROOT

from common.errors import UserError
from plots import compare_runs, comparison_text, verdict
from plots.run_record import load_run
from plots.verdict import MIN_ROWS, RUN_NOISE, compare, t_975, within_run


def simulated(random, rows=100, speed=60_000.0, between=0.7 * RUN_NOISE) -> np.ndarray:
    """tokens/s of a run: rows of 0.3 % noise that depend on their neighbors, a GPU that becomes warm, a stall
    now and then, and what makes this run as a whole faster or slower than its equals."""
    dependence, noise = 0.7, np.zeros(rows)
    fresh = random.normal(size=rows)
    noise[0] = fresh[0]
    for row in range(1, rows):
        noise[row] = dependence * noise[row - 1] + math.sqrt(1 - dependence**2) * fresh[row]
    warm = -0.003 * (1 - np.exp(-np.arange(rows) / (rows / 3)))
    stalls = np.where(random.random(rows) < 0.01, 1.3, 1.0)
    return speed * np.exp(0.003 * noise + warm + between * random.normal()) / stalls


def side(random, repeats, **keys):
    return [simulated(random, **keys) for _ in range(repeats)]


# --- statistics ---


@pytest.mark.parametrize(
    "here, there, noise",
    [(2, 2, 0.0015), (2, 2, 0.03), (5, 1, 0.01), (1, 5, 0.03), (3, 2, 0.005), (8, 8, 0.0015), (2, 8, 0.03)],
)
def test_at_most_6_percent_of_comparisons_of_equal_runs_claim_a_difference(here, there, noise):
    """However much equal runs differ: 2 to 8 runs a side, and 5 against 1."""
    random, trials, claims = np.random.default_rng(0), 1000, 0
    for _ in range(trials):
        speeds = [6e4 * np.exp(noise * random.normal(size=runs)) for runs in (here, there)]
        sides = [[np.full(MIN_ROWS if len(each) == 1 else 1, speed) for speed in each] for each in speeds]
        claims += compare(*sides).is_difference
    assert 0.03 * trials <= claims <= 0.06 * trials, "and the interval is no wider than it must be"


@pytest.mark.parametrize("repeats, rows", [(1, 16), (1, 100), (3, 40)])
def test_of_rows_that_depend_on_each_other_too(repeats, rows):
    random = np.random.default_rng(0)
    pairs = [[side(random, repeats, rows=rows) for _ in "ab"] for _ in range(200)]
    assert sum(compare(*pair).is_difference for pair in pairs) <= 0.06 * 200


@pytest.mark.parametrize("factor, repeats", [(1.01, 3), (1 / 1.01, 3), (1.02, 1)])
def test_a_change_of_1_percent_is_found_with_three_repeats_and_one_of_2_percent_with_one(factor, repeats):
    random = np.random.default_rng(1)
    found = [compare(side(random, repeats, speed=60_000 * factor), side(random, repeats)) for _ in range(40)]
    assert sum(one.is_difference and (one.change > 0) == (factor > 1) for one in found) >= 36
    assert sum(one.low <= factor - 1 <= one.high for one in found) >= 36


def test_more_rows_alone_do_not_make_the_interval_of_two_single_runs_narrower():
    random, least = np.random.default_rng(3), 2 * t_975(8) * math.sqrt(2) * RUN_NOISE
    found = [compare(side(random, 1, rows=2000), side(random, 1, rows=2000)) for _ in range(20)]
    assert least < np.median([one.high - one.low for one in found]) < 1.1 * least


def test_the_table_of_repeats_in_the_documents_is_what_the_method_gives():
    page = (ROOT / "docs/bench.md").read_text()
    stated = re.findall(r"^\| (\d+) \| ± ([\d.]+) % \|$", page, re.M)
    assert len(stated) == 4 and f"standard deviation of {100 * RUN_NOISE:.1f} %" in page
    for repeats, margin in ((int(repeats), float(margin)) for repeats, margin in stated):
        freedom = 2 * repeats - 2 or verdict.RUN_NOISE_FREEDOM
        assert margin == round(100 * RUN_NOISE * t_975(freedom) * math.sqrt(2 / repeats), 1)


def test_runs_that_lie_near_each_other_by_chance_have_at_least_the_noise_of_their_rows():
    rows = 6e4 * np.exp(0.01 * np.random.default_rng(4).normal(size=64))
    found = compare([rows, rows[::-1]], [rows, rows[::-1]])
    least = t_975(2) * math.sqrt(within_run(np.log(rows)))
    assert 0.9 * least < found.high < 1.2 * least


def test_rows_that_depend_on_each_other_count_for_less():
    random = np.random.default_rng(5)
    independent = random.normal(size=(200, 256))
    dependent = np.repeat(random.normal(size=(200, 32)), 8, axis=1)  # eight equal rows, then eight others
    for rows, truth in ((independent, 1 / 256), (dependent, 1 / 32)):
        estimates = [within_run(run) for run in rows]
        assert 0.9 * truth < np.mean(estimates) < 2 * truth
        assert np.mean(rows.mean(axis=1) ** 2) == pytest.approx(truth, rel=0.3)


def test_a_stall_does_not_change_the_usual_speed_but_is_told():
    random = np.random.default_rng(6)
    rows = simulated(random)
    stalled = rows.copy()
    stalled[[20, 50, 51, 80]] /= 3
    found = compare([stalled], [rows])
    assert abs(found.change) < 0.001 and found.with_stalls == pytest.approx(1 / 1.08 - 1, abs=0.01)


def test_the_points_of_students_t_are_those_of_its_density():
    x = (np.arange(100_000) + 0.5) / 100_000  # share of the way from 0 to the point
    for freedom, point in verdict.T_975.items():
        log_density = -(freedom + 1) / 2 * np.log1p((x * point) ** 2 / freedom)
        log_scale = math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)
        density = np.exp(log_density + log_scale) / math.sqrt(freedom * math.pi)
        assert 0.5 + point * density.mean() == pytest.approx(0.975, abs=5e-5), freedom
    assert t_975(8.9) == 2.306 and t_975(1e9) == t_975(120)


def test_too_few_rows_are_an_error_that_says_how_many_there_must_be():
    rows = np.full(MIN_ROWS, 1e5)
    assert not compare([rows], [rows]).is_difference
    with pytest.raises(UserError, match=f"too few rows: {MIN_ROWS - 1}, at least {MIN_ROWS}"):
        compare([rows[1:]], [rows])
    assert compare([rows[:2] * 1.1] * 3, [rows[:2]] * 3).is_difference  # each repeat counts as one
    with pytest.raises(UserError, match="too few rows: 0, at least 1"):
        compare([rows, rows[:0]], [rows])


def test_numbers_from_anybody_give_a_verdict():
    huge, tiny = np.full(20, 1e30), np.full(20, 1e-30)
    for one, other in ((huge, tiny), (tiny, huge)):
        assert compare([one], [other]).is_difference
        assert compare([one, other], [other, one]).text("B", "A")


# --- what is printed ---


CLOCK = {"sm_clock_mhz": 1755.0, "power_w": 690.0, "temperature_c": 60.0}


def write_run(folder, name, speeds, config=None, software=None, startup=None, **row):
    """A run record whose rows have these tokens/s."""
    rows = [
        {"iter": i, "loss": 3.0, "time_ms": 9.0, "lr": 1e-3, "mfu": None, "mfu_reason": "test"}
        | {"tokens_per_sec": float(speed), "warmup": False, "attempt": 1, **CLOCK, **row}
        for i, speed in enumerate(speeds)
    ]
    record = {
        "run_name": name,
        "status": "completed",
        "config": {"out_dir": name, "batch_size": 16, "block_size": 8, "d_ff": 9, "seed": 1} | (config or {}),
        "startup_info": {
            "software": {"torch": "2.11", "driver": "580", **(software or {})},
            "git": {"commit": "1234", "modified": False},
            "hardware": {"gpu_name": "H200", "num_gpus": 1, "peak": {"tflops": 989.4}},
            **(startup or {}),
        },
        "training_iterations": rows,
        "attempt": 1,
    }
    path = folder / f"{name}.json"
    path.write_text(json.dumps(record))
    return str(path)


@pytest.fixture
def printed(capsys, monkeypatch):
    """printed(*arguments): the output of compare_runs, which draws nothing."""
    monkeypatch.setattr(compare_runs, "plot", lambda runs, labels, x: None)
    monkeypatch.setattr(compare_runs.figure, "save", lambda figure, path: None)

    def printed(*arguments):
        assert compare_runs.main(list(arguments)) == 0
        return capsys.readouterr().out

    return printed


def runs_of(folder, letter, repeats, speed, **keys):
    random = np.random.default_rng(ord(letter))
    names = [f"{letter}{i}" for i in range(1, repeats + 1)]
    return [write_run(folder, name, simulated(random, 50, speed), **keys) for name in names]


def test_without_a_baseline_each_run_is_compared_with_the_first(tmp_path, printed):
    paths = [*runs_of(tmp_path, "a", 2, 60_000), *runs_of(tmp_path, "b", 1, 63_000)]
    output = printed(*paths)
    assert "\nB is not distinguishable from A: " in output
    line = next(line for line in output.splitlines() if line.startswith("C is "))
    found = compare(*([comparison_text.speeds(load_run(Path(path)))] for path in (paths[2], paths[0])))
    low, high = 100 * found.low, 100 * found.high
    interval = f"95 % interval {low:.1f} to {high:.1f} %, noise assumed"
    assert line == f"C is {100 * found.change:.1f} % faster than A, {interval}"
    assert output.count("Noise assumed: each side has one run") == 1, "what that means is said once"
    assert 3 < low < 5 < high < 7


def test_with_a_baseline_the_records_are_repeats_of_two_sides(tmp_path, printed, capsys):
    a, b = runs_of(tmp_path, "a", 3, 60_600), runs_of(tmp_path, "b", 3, 60_000)
    output = printed(*b, "--baseline", *a)
    assert [line.split()[0] for line in output.splitlines()[:6]] == ["A1", "A2", "A3", "B1", "B2", "B3"]
    (line,) = (line for line in output.splitlines() if line.startswith("B is "))
    assert " % slower than A, 95 % interval 0." in line
    assert "\nA is faster" not in output and "C is" not in output and "assumed" not in output
    assert compare_runs.main([*b, "--baseline", b[0]]) == 2
    assert "is on both sides" in capsys.readouterr().err


def test_too_few_rows_are_said_with_what_to_do(tmp_path, printed):
    paths = [write_run(tmp_path, name, [1e5] * 7) for name in ("a", "b")]
    output = printed(*paths)
    assert f"B against A: too few rows: 7, at least {MIN_ROWS}" in output and "--baseline A1.json" in output
    assert "too few" not in printed(paths[0])


def test_sides_with_different_numbers_of_gpus_are_compared_per_gpu_too(tmp_path, printed):
    two = {"hardware": {"gpu_name": "H200", "num_gpus": 2, "peak": {"tflops": 989.4}}}
    (a,) = runs_of(tmp_path, "a", 1, 60_000)
    (b,) = runs_of(tmp_path, "b", 1, 117_600, startup=two, sm_clock_mhz=1720.0)
    output = printed(a, b)
    (each,) = re.findall(r"\n  per GPU, of which they have different numbers: (\S+) %", output)
    assert -3 < float(each) < -1
    assert "  SM clock, MHz: 1,755 (A), 1,720 (B)" in output
    (c,) = runs_of(tmp_path, "c", 1, 60_000)
    assert "per GPU, of" not in printed(a, c) + printed(b, c, "--baseline", a)


def test_recipe_of_low_precision_and_each_fact_of_the_gpus_are_named(tmp_path, printed):
    gpus = [{"uuid": f"GPU-{n}", "power_limit_w": 700.0} for n in (3, 4)]
    in_fp8 = {"machine": {"gpus": gpus}, "low_precision": {"recipe": "fp8_tensorwise", "scope": "layers"}}
    a = runs_of(tmp_path, "a", 1, 60_000, startup={"machine": {"gpus": gpus[:1]}})
    output = printed(*a, *runs_of(tmp_path, "b", 1, 60_000, startup=in_fp8))
    assert "fp8_tensorwise" in output and "  machine.gpus.uuid: GPU-3 (A), GPU-3, GPU-4 (B)" in output
    assert "power_limit_w" not in output


def test_what_differs_is_listed_by_kind_the_shortest_first(tmp_path, printed):
    a = runs_of(tmp_path, "a", 2, 60_000, throttle={})
    changed = {"batch_size": 22, "block_size": 4, "d_ff": 64, "seed": 2}
    b = runs_of(tmp_path, "b", 2, 60_000, config=changed, software={"torch": "2.13"}, throttle={})
    cold = {"power_w": 650.0, "temperature_c": 50.0, "throttle": {"power_limit": 0.25}}
    output = printed(*b, *runs_of(tmp_path, "c", 1, 60_000, **cold), "--baseline", *a)
    assert output[output.index("Software: what") : output.index("\n  block_size")].splitlines() == [
        "Software: what differs",
        "  software.torch: 2.11 (A1, A2, B3), 2.13 (B1, B2)",
        "",
        "Clocks and power: what differs",
        "  power, W: 690 (A1, A2, B1, B2), 650 (B3)",
        "  temperature, °C: 60 (A1, A2, B1, B2), 50 (B3)",
        "  clock lowered by: nothing (A1, A2, B1, B2), power_limit 25 % (B3)",
        "",
        "Settings: what differs",
        "  batch_size: 16 (A1, A2, B3), 22 (B1, B2)",
    ]
    assert "Machine" not in output


@pytest.mark.parametrize("number", [2, 30])
def test_no_line_is_longer_than_100_columns(tmp_path, printed, number):
    paths = [
        write_run(
            tmp_path,
            f"{i}{'long name ' * (i % 3) * 8}"[:200],
            np.logspace(0, 3 * (i % 10), 20),
            config={f"key_{'x' * 90}": "v" * 90 + str(i), "seed": i},
            software={"torch": "2" * 300 if i else "1"},
            sm_clock_mhz=1e29 / (i + 1),
        )
        for i in range(number)
    ]
    lines = printed(*paths).splitlines()
    assert [line for line in lines if len(line) > 100] == []
    assert sum(line.startswith(("B is ", "B against")) for line in lines) == 1
    assert sum(" is " in line and "than A" in line for line in lines) >= (number - 1) // 2


def test_names_go_on_after_z():
    assert comparison_text.letters(28)[24:] == ["Y", "Z", "AA", "AB"]
