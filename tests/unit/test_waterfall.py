"""The way from 100 % to the measured MFU: exact for every clock, ceiling and peak, known or not."""

import pytest

from tools.profile.parts import GROUPS
from tools.profile.waterfall import clock_ratio, waterfall

MS = dict(zip(GROUPS, (500.0, 130.0, 40.0, 90.0, 25.0, 15.0), strict=False))
FOUND = {"parts": [{"step": step, "ms": ms} for step, ms in MS.items()], "wall_ms": sum(MS.values())}
MODEL = (400e12, 50e12)


@pytest.mark.parametrize("ratio", [1.22, 0.92, None])
@pytest.mark.parametrize("alone", [450.0, 300.0, None])
def test_the_steps_add_up_exactly_to_the_measured_mfu(ratio, alone):
    found = waterfall(MODEL, FOUND, 1e15, ratio, alone)
    steps = {step["step"]: step for step in found["steps"]}
    assert tuple(steps) == ("clock", "matmuls alone", *MS)
    assert found["mfu_percent"] == pytest.approx(100 * 450 / 800)
    assert 100 - sum(step["points"] or 0 for step in steps.values()) == pytest.approx(found["mfu_percent"])
    assert steps["idle"]["left_percent"] == pytest.approx(found["mfu_percent"], abs=1e-9)
    assert 450 + sum(step["ms"] or 0 for step in steps.values()) == pytest.approx(FOUND["wall_ms"])
    # null where it is unknown
    assert (steps["clock"]["ms"] is None) == (ratio is None)
    assert (steps["matmuls alone"]["points"] is None) == (alone is None)
    assert steps["attention"]["ms"] == pytest.approx(130 - 50 * (ratio or 1))
    if alone == 300:
        assert steps["matmuls alone"]["points"] < 0, "faster than the formula gives points back"


def test_without_a_peak_the_steps_are_milliseconds():
    found = waterfall(MODEL, FOUND, None, None, 450.0)
    assert found["unit"] == "ms" and found["mfu_percent"] is None
    assert {step["step"]: step["ms"] for step in found["steps"]} == MS


@pytest.mark.parametrize(
    ("peak", "capability", "multiprocessors", "mhz"),
    [(989.4e12, [9, 0], 132, 1830), (312e12, [8, 0], 108, 1410), (165.2e12, [8, 9], 128, None)],
)
def test_the_peak_is_reached_at_the_boost_clock(peak, capability, multiprocessors, mhz):
    facts = {"capability": capability, "multiprocessors": multiprocessors}
    assert clock_ratio(peak, facts, 1000.0) == (mhz and pytest.approx(mhz / 1000, abs=1e-3))
    assert clock_ratio(peak, facts, None) is None
