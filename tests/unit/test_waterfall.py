"""The way from 100 % to the measured MFU: exact for every clock, ceiling and peak, known or not."""

import pytest

from tools.profile.breakdown import split_profiler
from tools.profile.parts import GROUPS, IDLE, PROFILER, group_of
from tools.profile.waterfall import STEPS, Work, peak_clock_mhz, waterfall

PARTS = {
    "qkv forward": 500.0,
    "qkv recompute": 40.0,
    "attention forward": 130.0,
    "casts": 90.0,
    "communication: all-reduce": 25.0,
    IDLE: 15.0,
}
FOUND = {"parts": [{"part": part, "ms": ms} for part, ms in PARTS.items()], "wall_ms": sum(PARTS.values())}
MODEL = Work(matmul=400e12, attention=50e12)
UNKNOWN_CLOCK = (None, "no GPU")


@pytest.mark.parametrize("clock", [(1500.0, None), (1980.0, None), UNKNOWN_CLOCK])
@pytest.mark.parametrize("alone", [450.0, 300.0, None])
def test_the_steps_add_up_exactly_to_the_measured_mfu(clock, alone):
    found = waterfall(MODEL, FOUND, 1e15, clock, (1830.0, None), alone)
    assert found["mfu_percent"] == pytest.approx(100 * 450 / 800)
    lost = sum(step["points"] or 0 for step in found["steps"])
    assert 100 - lost == pytest.approx(found["mfu_percent"], abs=1e-9)
    assert found["steps"][-1]["left_percent"] == pytest.approx(found["mfu_percent"], abs=1e-9)
    assert 450 + sum(step["ms"] or 0 for step in found["steps"]) == pytest.approx(FOUND["wall_ms"])


@pytest.mark.parametrize(
    ("unprofiled", "idle", "own"), [(794.0, 9.0, 6.0), (770.0, 0.0, 15.0), (801.0, 15.0, 0)]
)
def test_what_only_the_profiler_takes_is_no_idle_time_of_the_training(unprofiled, idle, own):
    """It comes out of the idle time, and never out of the kernels."""
    wall = FOUND["wall_ms"]
    parts = [
        {"part": part, "ms": ms, "group": group_of(part), "percent": 100 * ms / wall}
        for part, ms in PARTS.items()
    ]
    found = {"parts": parts, "wall_ms": wall}
    split_profiler(found, unprofiled)
    ms = {row["part"]: row["ms"] for row in found["parts"]}
    assert ms.get(PROFILER, 0) == pytest.approx(own) and sum(ms.values()) == pytest.approx(800)
    assert ms[IDLE] == pytest.approx(idle) and ms["casts"] == PARTS["casts"]
    assert sum(row["percent"] for row in found["parts"]) == pytest.approx(100)
    falls = waterfall(MODEL, found, 1e15, UNKNOWN_CLOCK, UNKNOWN_CLOCK, None)
    assert falls["mfu_percent"] == pytest.approx(100 * 450 / (800 - own))
    assert falls["steps"][-1]["left_percent"] == pytest.approx(falls["mfu_percent"], abs=1e-9)


def test_an_unknown_clock_is_null_with_its_reason():
    found = waterfall(MODEL, FOUND, 1e15, UNKNOWN_CLOCK, (1830.0, None), None)
    assert found["steps"][0]["step"] == "clock" and found["steps"][0]["ms"] is None
    assert any("no GPU" in note for note in found["notes"])


def test_faster_than_the_formula_gives_points_back_and_says_so():
    found = waterfall(MODEL, FOUND, 1e15, UNKNOWN_CLOCK, (1830.0, None), 300.0)
    ceiling = next(step for step in found["steps"] if step["step"] == "ceiling")
    assert ceiling["points"] < 0 and any("gives points back" in note for note in found["notes"])


def test_without_a_peak_the_steps_are_milliseconds():
    found = waterfall(MODEL, FOUND, None, UNKNOWN_CLOCK, UNKNOWN_CLOCK, 450.0)
    assert found["unit"] == "ms" and found["mfu_percent"] is None
    assert sum(step["ms"] for step in found["steps"]) == FOUND["wall_ms"]
    assert any("--peak_tflops" in note for note in found["notes"])


def test_the_peak_of_an_h100_is_reached_at_its_boost_clock():
    facts = {"capability": [9, 0], "multiprocessors": 132}
    assert peak_clock_mhz(989.4e12, facts)[0] == pytest.approx(1830, abs=1)
    assert peak_clock_mhz(312e12, {"capability": [8, 0], "multiprocessors": 108})[0] == pytest.approx(
        1410, abs=1
    )
    assert peak_clock_mhz(165.2e12, {"capability": [8, 9], "multiprocessors": 128})[0] is None


def test_every_group_of_parts_is_a_step():
    assert {*GROUPS} - {"profiler"} == {*STEPS} - {"clock", "ceiling"}
