"""The search of tools.tune, with a function of the settings in place of train.py."""

import dataclasses
import itertools

import pytest
from support.helpers import ROOT
from support.tuning import SEQUENCES, good, make_config, make_space, speed_of

from common.errors import UserError
from tools.tune.dimensions import ALLOWABLE, BATCH, DIMENSIONS, TUNED, option_of
from tools.tune.dry import plan
from tools.tune.report import explanation
from tools.tune.search import Ladder
from tools.tune.steps import AS_IT_IS, FOR_ROOM, LAST, OutOfTime, Result
from training.configuration.keys import KEYS

OOM = Result(reason="out of GPU memory", out_of_memory=True)


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return make_config(tmp_path_factory.mktemp("tune"))


class Measured:
    """measure() of a Ladder; counts its calls."""

    def __init__(self, speed=speed_of, fits=lambda setting: True, noise=lambda run: 0.0, most=10**6):
        self.speed, self.fits, self.noise, self.most, self.calls = speed, fits, noise, most, []

    def __call__(self, setting, run):
        if len(self.calls) >= self.most:
            raise OutOfTime
        self.calls.append(setting)
        return good(self.speed(setting), self.noise(len(self.calls))) if self.fits(setting) else OOM


def every_setting(space):
    """All settings that are possible here and fit by the estimate."""
    dimensions = [one.options for one in space.dimensions() if one.options]
    for chosen in itertools.product(*dimensions):
        for size in (1, 16, 48):
            setting = dict(space.as_it_is) | {"batch_size": size}
            for option in chosen:
                setting |= option.keys
            setting = space.divided(setting)
            if not space.obstacle(setting) and space.fits(setting):
                yield setting


@pytest.mark.parametrize("processes", [1, 2])
def test_the_best_of_all_settings_is_found_with_few_trials(config, processes):
    space, measured = make_space(config, processes=processes), Measured()
    ladder = Ladder(space, measured)
    found = ladder.climb()
    speeds = [speed_of(setting) for setting in every_setting(space)]
    assert speed_of(found) == pytest.approx(max(speeds), rel=1e-9) and found["batch_size"] == 16
    assert len(speeds) > 10 * len(measured.calls) and ladder.finished
    kept = [step.rung for step in ladder.steps if step.kept]
    assert kept[0] == "conservative" and kept[-1] == LAST
    assert ("strategy" in kept) == (processes == 2) and "CUDA Graphs" in kept


def test_what_is_only_within_noise_is_left_out(config):
    """Every setting has the same speed, and runs differ by up to 0.4 %."""
    wave = (0.0, 0.004, -0.003, 0.002, -0.004, 0.001, 0.003)
    measured = Measured(speed=lambda setting: 1000.0, noise=lambda run: wave[run % len(wave)])
    ladder = Ladder(make_space(config), measured)
    assert ladder.climb() == ladder.space.as_it_is, "the config stays"
    kept = [step for step in ladder.steps if step.kept]
    assert [step.rung for step in kept] == ["conservative"]
    assert any(step.note == "within noise" for step in ladder.steps)
    assert any("the config stays as it is" in text for text in explanation(ladder))


@pytest.mark.parametrize(
    ("gain", "is_kept", "runs"),
    [(1.02, True, 1), (1.009, True, 2), (1.005, True, 3), (1.004, False, 3), (1.002, False, 1)],
)
def test_a_small_gain_counts_if_repeats_confirm_it(config, gain, is_kept, runs):
    wave = (0.001, -0.001, 0.0)
    measured = Measured(
        speed=lambda setting: 1e6 * (gain if setting["use_cuda_graphs"] else 1.0),
        noise=lambda run: wave[run % len(wave)],
    )
    ladder = Ladder(make_space(config, processes=1), measured)
    ladder.climb()
    graphs = next(step for step in ladder.steps if step.rung == "CUDA Graphs")
    assert graphs.kept == is_kept
    made = measured.calls.count(graphs.setting)
    assert made >= runs if is_kept else made == runs, "what is kept is repeated at the end, too"


@pytest.mark.parametrize(("wobble", "runs"), [(0.0001, 1), (0.02, 2)])
def test_a_gain_by_which_the_rows_of_a_run_differ_too_is_repeated(config, wobble, runs):
    calls, made = [], {}

    def measure(setting, run):
        calls.append(setting)
        speed = 1.02e6 if setting["use_cuda_graphs"] else 1e6
        return Result(tuple(speed * (1 + steps * wobble) for steps in (-2, -1, 0, 0, 1, 2)), 10.0, 50.0)

    def report(step):
        made.setdefault(step.rung, calls.count(step.setting))

    Ladder(make_space(config, processes=1), measure, report).climb()
    assert made["CUDA Graphs"] == runs


@pytest.mark.parametrize(("rate", "is_tried"), [(1e6, True), (1e4, False)])
def test_cuda_graphs_are_tried_only_where_the_gpu_may_wait_for_launches(config, rate, is_tried):
    """16 x 2048 tokens take 33 ms or 3.3 s; every option but the graphs is as fast as the first."""
    measured = Measured(speed=lambda setting: rate * (1.04 if setting["use_cuda_graphs"] else 1.0))
    ladder = Ladder(make_space(config, processes=1, fixed={"batch_size"}), measured)
    found = ladder.climb()
    step = next(step for step in ladder.steps if step.rung == "CUDA Graphs")
    assert bool(step.result) == is_tried == found["use_cuda_graphs"]
    assert is_tried or "3.28 s: nothing to gain" in step.note


@pytest.mark.parametrize("limit", [5, 7, 10, 13, 20])
def test_running_out_of_memory_is_data_and_the_largest_micro_batch_is_found(config, limit):
    """The estimate says that all fit; the GPU has less."""
    speed = lambda setting: 1e6 * setting["batch_size"]  # noqa: E731
    measured = Measured(speed, fits=lambda setting: setting["batch_size"] <= limit)
    ladder = Ladder(make_space(config), measured)
    found = ladder.climb()
    assert found["batch_size"] == max(size for size in ladder.space.batches if size <= limit)
    assert any(step.note == "out of memory" for step in ladder.steps) and ladder.finished
    assert "Did not fit" in "\n".join(explanation(ladder))


def test_an_option_that_runs_out_of_memory_is_tried_with_less(config):
    """Without recomputation only 4 sequences fit, and that is faster all the same."""
    speed = {"full": 1000.0, "selective": 1300.0, "attention": 1500.0, "memory_bound": 1800.0, "none": 2000.0}
    measured = Measured(
        speed=lambda s: speed[s["activation_checkpointing"]] * min(s["batch_size"], 16) ** 0.1,
        fits=lambda s: s["activation_checkpointing"] == "full" or s["batch_size"] <= 4,
    )
    space = make_space(config)
    ladder = Ladder(space, measured)
    found = ladder.climb()
    assert found["activation_checkpointing"] == "none" and found["batch_size"] == 4
    tried = [step.setting["batch_size"] for step in ladder.steps if step.option == "none"]
    assert tried == [16, 8, 4]


def test_the_estimate_prunes(config):
    """Nothing that does not fit by the estimate is started."""
    largest = make_space(config)
    wanted = largest.as_it_is | {"batch_size": 8, "loss_chunks": 1}
    gib = largest.needed(wanted)
    space, measured = make_space(config, gib), Measured()
    ladder = Ladder(space, measured)
    ladder.climb()
    assert all(space.fits(setting) for setting in measured.calls)
    pruned = [step for step in ladder.steps if step.note == "does not fit by the estimate"]
    assert pruned and all(step.needed_gib > gib and step.result is None for step in pruned)


def test_every_setting_makes_the_tokens_of_the_config(config):
    space, measured = make_space(config), Measured()
    Ladder(space, measured).climb()
    for setting in measured.calls:
        made = space.config(setting)
        assert made.samples_per_iter(2) * made.block_size == config.tokens_per_iter == space.tokens


def test_numbers_change_only_where_the_user_allows_it(config):
    numbers = {key for one in DIMENSIONS if one.changes_numbers for o in one.options for key in o.keys}
    measured = Measured()
    space = make_space(config)
    Ladder(space, measured).climb()
    assert all(s[key] == space.as_it_is[key] for s in measured.calls for key in numbers)
    allowed = make_space(config, allowed=("fp8_tensorwise", "fp8_delayed"))
    found = Ladder(allowed, Measured()).climb()
    assert found["low_precision"] == "fp8_tensorwise" and found["adam_dtype"] == "float32"


def test_what_a_flag_sets_is_not_searched(config):
    space = make_space(config, fixed=("activation_checkpointing", "batch_size"))
    measured = Measured()
    Ladder(space, measured).climb()
    assert {s["activation_checkpointing"] for s in measured.calls} == {config.activation_checkpointing}
    assert {s["batch_size"] for s in measured.calls} == {space.as_it_is["batch_size"]}


def test_the_config_stays_if_nothing_is_faster(config):
    space = make_space(config)
    measured = Measured(speed=lambda setting: 5e6 if setting == space.as_it_is else speed_of(setting) / 10)
    assert Ladder(space, measured).climb() == space.as_it_is


@pytest.mark.parametrize("most", range(1, 24))
def test_the_best_is_valid_whenever_the_time_is_over(config, most):
    space, measured = make_space(config, processes=1), Measured(most=most)
    ladder = Ladder(space, measured)
    found = ladder.climb()
    assert len(measured.calls) <= most and found in measured.calls
    assert speed_of(found) >= speed_of(space.as_it_is), "never worse than the config as it is"
    assert ladder.finished or "goes on from here" in explanation(ladder)[-1]


def test_a_config_that_fails_is_an_error_with_the_reason(config):
    failed = Result(reason="no dataset of this name")
    with pytest.raises(UserError, match="no trial succeeded.*no dataset of this name"):
        Ladder(make_space(config), lambda setting, run: failed).climb()


def test_a_careful_setting_that_fails_leaves_the_config_as_it_is(config):
    space = make_space(config)

    def measure(setting, run):
        return good(1000.0) if setting["compile"] else Result(reason="eager is broken")

    ladder = Ladder(space, measure)
    assert ladder.climb()["compile"] and ladder.finished


def test_nothing_that_fits_is_an_error_of_one_line(config):
    with pytest.raises(
        UserError, match=r"no setting fits: the smallest \(.*needs .* GiB by the estimate"
    ) as e:
        Ladder(make_space(config, gib=0.5, processes=1), Measured()).climb()
    assert "\n" not in str(e.value)


def test_the_climb_begins_with_sharding_where_nothing_else_fits(config):
    space = make_space(config)
    needs = {o.name: space.needed(space.first() | o.keys) for one in DIMENSIONS for o in one.options}
    tight = make_space(config, gib=(needs["ZeRO-1"] + needs["DDP"]) / 2)
    tight.batches = [space.batch_size(space.first())]
    assert tight.first()["use_zero1"] and not space.first()["use_zero1"]


SPENDS = {"activation_checkpointing": "none", "loss_chunks": 1, "batch_size": 16}


def slower_sharded(setting):
    sharded = setting["use_zero1"] or setting["use_fsdp"]
    return speed_of({**setting, "use_zero1": False, "use_fsdp": False}) * (0.99 if sharded else 1.0)


def between_ddp_and_zero1(config):
    """A space whose memory holds the largest setting with ZeRO-1 and not without it."""
    space = make_space(config)
    needs = [
        space.needed({**space.as_it_is, **SPENDS, "use_zero1": zero1, "use_fsdp": False, "compile": True})
        for zero1 in (False, True)
    ]
    return make_space(config, gib=sum(needs) / 2)


def test_no_level_is_tried_that_only_recomputes_more(config):
    measured = Measured()
    found = Ladder(make_space(config), measured).climb()
    tried = {setting["activation_checkpointing"] for setting in measured.calls}
    assert found["activation_checkpointing"] == "none" and tried == {"full", "none"}


def test_no_level_that_recomputes_more_is_tried_after_one_with_the_largest_useful_micro_batch(config):
    """16 sequences are enough. Without recomputation 4 fit; with memory_bound 16 do, which is slower."""
    measured = Measured(
        speed=lambda s: (
            (1.3e6 if s["activation_checkpointing"] == "none" else 1e6)
            * (1 + (min(s["batch_size"], 16) / 100 if s["activation_checkpointing"] == "full" else 0))
        ),
        fits=lambda s: s["activation_checkpointing"] != "none" or s["batch_size"] <= 4,
    )
    ladder = Ladder(make_space(config, processes=1), measured)
    ladder.climb()
    tried = [step.option for step in ladder.steps if step.rung == "recomputation" and step.result]
    assert [option for option in tried if option != "none"] == ["memory_bound"]


def test_sharding_that_gains_nothing_is_taken_for_the_memory_that_it_frees(config):
    ladder = Ladder(between_ddp_and_zero1(config), Measured(speed=slower_sharded))
    found = ladder.climb()
    assert found["use_zero1"] or found["use_fsdp"]
    assert {key: found[key] for key in SPENDS} == SPENDS, "which needs that memory"
    assert any(text.startswith("Taken for the memory") for text in explanation(ladder))
    roomy = Ladder(make_space(config), Measured(speed=slower_sharded))
    assert not roomy.climb()["use_zero1"], "there is enough memory without it"


def test_what_was_taken_for_its_room_goes_if_the_room_is_not_needed(config):
    no_room = Measured(
        speed=slower_sharded, fits=lambda setting: setting["activation_checkpointing"] != "none"
    )
    ladder = Ladder(between_ddp_and_zero1(config), no_room)
    found = ladder.climb()
    assert any(step.note == FOR_ROOM for step in ladder.steps)
    assert not found["use_zero1"] and not found["use_fsdp"]
    assert found["activation_checkpointing"] == "selective"


@pytest.mark.parametrize("size", [1, 48])
def test_a_stated_micro_batch_of_any_size_is_searched_to_the_end(config, size):
    stated = dataclasses.replace(config, batch_size=size, gradient_accumulation_steps=SEQUENCES // size)
    ladder = Ladder(make_space(stated, fixed={"batch_size"}), Measured(speed=slower_sharded))
    assert ladder.climb()["batch_size"] == size and ladder.finished


def test_going_back_to_fp32_weights_leaves_the_rounding_that_moments_in_bf16_need(config):
    """Both options set weight_rounding; each alone frees memory that is not used in the end."""
    space = between_ddp_and_zero1(config)
    tight = make_space(config, gib=space.machine.memory.gib, allowed=("weights_bf16", "adam_bf16"))
    tight.is_short = lambda setting: True
    measured = Measured(speed=lambda setting: 1e6 * (0.98 if setting["adam_dtype"] == "float32" else 1.0))
    ladder = Ladder(tight, measured)
    ladder.climb()
    assert {"stored weights", "Adam moments"} & set(ladder.replaced)
    for setting in measured.calls:
        if "bfloat16" in (setting["adam_dtype"], setting["param_dtype"]):
            assert setting["weight_rounding"] == "stochastic"


def test_the_goal_memory_gives_up_five_percent_of_the_speed_at_most(config):
    space = make_space(config, processes=1)
    memory = {"full": 10.0, "selective": 20.0, "attention": 25.0, "memory_bound": 28.0, "none": 30.0}

    def measure(setting, run):
        level = setting["activation_checkpointing"]
        speeds = {"full": 900.0, "selective": 1160.0, "attention": 1170.0, "memory_bound": 1180.0}
        speed = speeds.get(level, 1200.0)
        return Result((speed,) * 4, memory[level], 50.0)

    for goal, level in (("tokens_per_sec", "none"), ("memory", "selective")):
        ladder = Ladder(space, measure, goal=goal)
        ladder.climb()
        assert ladder.chosen()["activation_checkpointing"] == level


def test_the_plan_starts_nothing_and_has_every_rung(config):
    steps = plan(make_space(config, processes=1))
    assert [step.rung for step in steps][:2] == [AS_IT_IS, "conservative"]
    dimensions = {one.name for one in make_space(config, processes=1).dimensions()}
    assert dimensions <= {step.rung for step in steps}
    assert all(step.needed_gib > 0 for step in steps)


# --- the table ---


def test_dimensions_are_made_of_keys_and_their_choices():
    assert set(TUNED) <= set(KEYS)
    for one in DIMENSIONS:
        assert one.options or one.name == BATCH
        for option in one.options:
            for key, value in option.keys.items():
                assert not KEYS[key].choices or value in KEYS[key].choices, (one.name, key, value)
                assert type(value) in KEYS[key].types
    assert len(set(ALLOWABLE)) == len(ALLOWABLE)


def test_the_careful_option_needs_the_least_memory(config):
    """So within noise, the setting with less memory stays."""
    space = make_space(config, processes=1)
    first = space.first() | {"batch_size": 16, "compile": True}
    for one in space.dimensions():
        if one.options and one.name != "compile" and not one.makes_room and not one.changes_numbers:
            needed = [space.needed(space.with_option(first, option)) for option in one.options]
            assert needed == sorted(needed), one.name


def test_the_page_lists_the_rungs_in_their_order():
    page = (ROOT / "docs/tuning.md").read_text()
    section = page.partition("## Settings found by measurement")[2].partition("\n## ")[0]
    rows = [line.split("|")[1].strip() for line in section.splitlines() if line.startswith("| ")]
    assert [row for row in rows if row in {one.name for one in DIMENSIONS}] == [
        one.name for one in DIMENSIONS
    ]
    assert all(f"`{name}`" in section for name in ALLOWABLE if "+head" not in name)


def test_a_setting_has_one_option_of_each_dimension(config):
    first = make_space(config).first()
    found = {one.name: option_of(one, first) for one in DIMENSIONS if not one.changes_numbers and one.options}
    assert all(found.values()), found
