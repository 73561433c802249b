"""The way from 100 % to the measured MFU: exact for every clock, ceiling and peak, known or not."""

import pytest

from tools.profile.parts import GROUPS, OF_PROFILER
from tools.profile.waterfall import STEPS, ModelFlops, clock_ratio, waterfall

MS = dict(zip(GROUPS, (500.0, 130.0, 40.0, 90.0, 25.0, 15.0), strict=False))
FOUND = {"parts": [{"group": group, "ms": ms} for group, ms in MS.items()], "wall_ms": sum(MS.values())}
MODEL = ModelFlops(matmul=400e12, attention=50e12)


@pytest.mark.parametrize("ratio", [1.22, 0.92, None])
@pytest.mark.parametrize("alone", [450.0, 300.0, None])
def test_the_steps_add_up_exactly_to_the_measured_mfu(ratio, alone):
    found = waterfall(MODEL, FOUND, 1e15, ratio, "no GPU", alone)
    assert found["mfu_percent"] == pytest.approx(100 * 450 / 800)
    lost = sum(step["points"] or 0 for step in found["steps"])
    assert 100 - lost == pytest.approx(found["mfu_percent"], abs=1e-9)
    assert found["steps"][-1]["left_percent"] == pytest.approx(found["mfu_percent"], abs=1e-9)
    assert 450 + sum(step["ms"] or 0 for step in found["steps"]) == pytest.approx(FOUND["wall_ms"])
    notes = " ".join(found["notes"])
    assert found["steps"][0]["step"] == "clock", "null where it is unknown, with the reason"
    assert (found["steps"][0]["ms"] is None) == ("no GPU" in notes) == (ratio is None)


def test_faster_than_the_formula_gives_points_back_and_says_so():
    found = waterfall(MODEL, FOUND, 1e15, None, "no GPU", 300.0)
    ceiling = next(step for step in found["steps"] if step["step"] == "ceiling")
    assert ceiling["points"] < 0 and any("gives points back" in note for note in found["notes"])


def test_without_a_peak_the_steps_are_milliseconds():
    found = waterfall(MODEL, FOUND, None, None, "", 450.0)
    assert found["unit"] == "ms" and found["mfu_percent"] is None
    assert {step["step"]: step["ms"] for step in found["steps"]} == MS
    assert any("--peak_tflops" in note for note in found["notes"])


@pytest.mark.parametrize(
    ("peak", "capability", "multiprocessors", "mhz"),
    [(989.4e12, [9, 0], 132, 1830), (312e12, [8, 0], 108, 1410), (165.2e12, [8, 9], 128, None)],
)
def test_the_peak_is_reached_at_the_boost_clock(peak, capability, multiprocessors, mhz):
    facts = {"capability": capability, "multiprocessors": multiprocessors}
    ratio, reason = clock_ratio(peak, facts, {"sm_clock_mhz": 1000.0})
    assert ratio == (mhz and pytest.approx(mhz / 1000, abs=1e-3)) and bool(reason) == (mhz is None)
    if mhz:
        assert clock_ratio(peak, facts, {"gpu_reason": "no NVML"}) == (None, "no NVML")


def test_every_group_of_parts_is_a_step():
    assert {*GROUPS} - {OF_PROFILER} == {*STEPS} - {"clock", "ceiling"}
