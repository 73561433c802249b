"""The learning rate is a pure function of the iteration: warm-up, then the schedule, then min_lr."""

import itertools
import math

import pytest

from training.configuration.keys import KEYS, TrainConfig
from training.optimization.schedule import SCHEDULES, WSD_DECAYS, learning_rate

PEAK, FLOOR, WARMUP, END = 1e-2, 1e-3, 10, 110
DECAYS = ("cosine", "linear", "wsd")


def config(**keys) -> TrainConfig:
    defaults = dict(learning_rate=PEAK, min_lr=FLOOR, warmup_iters=WARMUP, lr_decay_iters=END)
    return TrainConfig(**{**defaults, **keys})


def rates(start: int, stop: int, **keys) -> list[float]:
    return [learning_rate(i, config(**keys)) for i in range(start, stop)]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_warm_up_rises_in_equal_steps_from_above_zero_to_the_peak(schedule):
    warmup = rates(0, WARMUP + 1, lr_schedule=schedule)
    assert warmup[0] > 0 and warmup[-1] == pytest.approx(PEAK)
    for i, rate in enumerate(warmup):
        assert math.isclose(rate, PEAK * (i + 1) / (WARMUP + 1))


@pytest.mark.parametrize("schedule", DECAYS)
def test_decay_falls_from_the_peak_to_min_lr_and_stays_there(schedule):
    decay = rates(WARMUP, END + 20, lr_schedule=schedule)
    assert all(later <= earlier for earlier, later in itertools.pairwise(decay))
    assert max(decay) == decay[0] == pytest.approx(PEAK)
    assert decay[END - 1 - WARMUP] > FLOOR
    assert decay[END - WARMUP :] == pytest.approx([FLOOR] * 20)


def test_cosine_follows_its_formula_wsd_over_all_is_linear_and_constant_stays_at_the_peak():
    for i in (WARMUP, 35, 60, 85, END):
        share = 0.5 * (1 + math.cos(math.pi * (i - WARMUP) / (END - WARMUP)))
        assert math.isclose(learning_rate(i, config()), FLOOR + share * (PEAK - FLOOR))
    wsd = rates(WARMUP, END + 1, lr_schedule="wsd", wsd_decay_fraction=1.0)
    assert wsd == pytest.approx(rates(WARMUP, END + 1, lr_schedule="linear"))
    assert rates(WARMUP, 3 * END, lr_schedule="constant") == pytest.approx([PEAK] * (3 * END - WARMUP))


# --- wsd_decay_shape ---

# learning_rate 1, min_lr 0: the decay of 40 iterations begins at iteration 60 of 100
GOLDEN = {
    "linear": {59: 1.0, 60: 1.0, 70: 0.75, 80: 0.5, 90: 0.25, 99: 0.025, 100: 0.0, 200: 0.0},
    "cosine": {60: 1.0, 70: 0.8535533905932737, 80: 0.5, 90: 0.14644660940672624, 99: 0.0015413331334360181},
    "1-sqrt": {60: 1.0, 70: 0.5, 80: 0.2928932188134524, 90: 0.1339745962155614, 99: 0.01257911709342502},
}


@pytest.mark.parametrize("shape", GOLDEN)
def test_each_shape_of_the_wsd_decay_has_the_values_of_its_formula(shape):
    keys = {"learning_rate": 1.0, "min_lr": 0.0, "lr_decay_iters": 100, "wsd_decay_fraction": 0.4}
    wsd = config(lr_schedule="wsd", wsd_decay_shape=shape, **keys)
    for i, share in GOLDEN[shape].items():
        assert learning_rate(i, wsd) == pytest.approx(share, rel=1e-7, abs=1e-12), i
    assert learning_rate(100, wsd) == learning_rate(1000, wsd) == 0.0


def test_the_wsd_decay_is_linear_unless_stated():
    assert set(KEYS["wsd_decay_shape"].choices) == WSD_DECAYS.keys() == GOLDEN.keys()
    stated = {"wsd_decay_shape": "linear", "wsd_decay_fraction": 0.2}
    assert rates(0, END, lr_schedule="wsd") == rates(0, END, lr_schedule="wsd", **stated)
