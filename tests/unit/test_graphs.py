"""CUDA Graphs. On a CPU: which captures are trusted, and that nothing is lost with one that is not. On a GPU:
each known way to break a capture, with what the eager step gives and what the replays give."""

import contextlib
import functools

import pytest
import torch
from support.graphed_runs import ITERATIONS, Fake, build, graphed, same, train, weights
from support.helpers import TINY, last_run, make_dataset, write_config

from common.errors import RunError
from training.cuda_graphs import graphed_step as graphs_module
from training.cuda_graphs.graphed_step import EAGER_ITERS, REFERENCES
from training.cuda_graphs.parity import UPDATE_TOLERANCE
from training.optimization.step import StepResult
from training.optimization.update_guard import LOSS_SPIKE


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return make_dataset(tmp_path_factory.mktemp("graphs") / "tokens", train_tokens=100_000)


def state_of(parts) -> list[torch.Tensor]:
    """All that an iteration changes: also random numbers, the spike window and what low precision keeps."""
    return [*weights(parts), *(tensor.clone() for tensor in parts.state.optional_tensors().values())]


@pytest.fixture(scope="module")
def eager(dataset):
    """eager(iterations, **keys): the results of the eager step, and the state after them."""

    @functools.cache
    def eager(iterations=ITERATIONS, **keys):
        parts = build(dataset, **keys)
        return train(parts, iterations=range(iterations)), state_of(parts)

    return eager


# --- which captures are trusted, on a CPU ---


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"gradient_accumulation_steps": 3, "dropout": 0.1, "skip_spikes": 6.0},
        {"dtype": "float16"},
        {"dtype": "bfloat16", "param_dtype": "bfloat16", "adam_dtype": "bfloat16"},
        {"dtype": "bfloat16", "param_dtype": "bfloat16", "weight_rounding": "stochastic"},
        {"dtype": "bfloat16", "low_precision": "fp8_delayed"},
    ],
)
def test_every_call_makes_one_iteration_whatever_the_gate_does_in_between(dataset, eager, graph_lines, keys):
    (expected, state), parts, fake = eager(**keys), build(dataset, **keys), Fake()
    step = graphed(parts, fake)
    assert train(parts, step) == expected
    assert same(state_of(parts), state)
    assert fake.captures == 2  # without and with the gradient's sum
    assert step.snapshot is None and step.references == []
    assert step.choice == {"asked": "CUDA Graph", "used": "CUDA Graph", "reason": None}
    first, second, third = graph_lines()[-3:]
    assert first == "CUDA Graph: capture after 10 iterations"
    assert second.startswith("CUDA Graph: replaying from iteration 10 (bit-equal to the eager step;")
    also = "CUDA Graph: replaying also with the gradient's sum (bit-equal to the eager step;"
    assert third.startswith(also)


def fails(run, fake):
    raise RuntimeError("operation not permitted when stream is capturing\nCUDA kernel errors might be ...")


def half_the_gradient(run, fake):
    def replay():
        fake.step.state.loss_scale.scale.mul_(2.0)  # the losses stay; the update sees half
        packed = run()
        fake.step.state.loss_scale.scale.div_(2.0)
        packed[1] *= 0.5
        return packed

    return replay


def other_weights(run, fake):
    def replay():
        packed = run()
        for shard in fake.step.state.strategy.shards:
            shard.local.data.mul_(1.01)
        return packed

    return replay


def another_verdict(run, fake):
    place = [name for name in StepResult._fields if name != "grad_sum"].index("verdict")

    def replay():
        packed = run()
        packed[place] = LOSS_SPIKE
        return packed

    return replay


def gradients_stay(run, fake):
    def replay():
        packed = run()
        fake.step.state.strategy.buckets[0].flat.fill_(1e-9)
        return packed

    return replay


def frozen(which: slice):
    """Inputs that keep the values of the first replay, as Python numbers in a capture would."""

    def spoil(run, fake):
        first = []

        def replay():
            inputs = fake.step.inputs[which]
            first.extend([] if first else [tensor.clone() for tensor in inputs])
            for tensor, value in zip(inputs, first, strict=True):
                tensor.copy_(value)
            return run()

        return replay

    return spoil


def second_replay_fails(run, fake):
    replays = iter([run])

    def replay():
        return next(replays, lambda: 1 / 0)()

    return replay


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (fails, "RuntimeError: operation not permitted when stream is capturing"),
        (half_the_gradient, "its replay differs from the eager step: grad_norm by 5.0e-01 (allowed 0.01)"),
        (other_weights, "update of weights by"),
        (another_verdict, "verdict by inf (allowed 0)"),
        (gradients_stay, "gradients left over by inf (allowed 0)"),
        (frozen(slice(0, 2)), "loss by"),
        (frozen(slice(2, 3)), "update of weights by"),
        (second_replay_fails, "ZeroDivisionError: division by zero"),
    ],
    ids=["error", "gradient", "weights", "verdict", "stale", "batch", "rate", "second"],
)
def test_a_bad_capture_is_refused_and_costs_nothing(dataset, eager, graph_lines, spoil, reason):
    """Also no number of the generator, which draws dropout's masks."""
    expected, state = eager(dropout=0.1)
    parts, fake = build(dataset, dropout=0.1), Fake(spoil)
    step = graphed(parts, fake)
    assert train(parts, step) == expected
    assert same(state_of(parts), state)
    assert fake.captures == 1 and fake.closed and not step.replays
    assert step.choice["used"] == "eager step" and reason in step.choice["reason"]
    assert "\n" not in step.choice["reason"]
    assert graph_lines()[-1] == f"CUDA Graph: not used, the eager step runs on: {step.choice['reason']}"


def rounds(run, fake):
    def replay():
        packed = run()
        for shard in fake.step.state.strategy.shards:
            shard.local.data.mul_(1 + 1e-6)
        return packed * (1 + 1e-6)

    return replay


def test_rounding_is_within_tolerance_and_the_run_goes_on_from_the_eager_state(dataset, eager, graph_lines):
    expected, state = eager(EAGER_ITERS)
    parts = build(dataset)
    step = graphed(parts, Fake(rounds))
    assert train(parts, step, range(EAGER_ITERS)) == expected
    assert same(state_of(parts), state)
    assert step.choice["used"] == "CUDA Graph"
    assert "within tolerance of the eager step: at most" in graph_lines()[-1]
    assert f"update of weights (allowed {UPDATE_TOLERANCE:g})" in graph_lines()[-1]


def test_a_capture_that_stops_agreeing_when_the_sum_is_added_ends_all_replays(dataset, eager):
    def second_fails(run, fake):
        if fake.captures == 2:
            raise RuntimeError("no memory")
        return run

    (expected, state), parts = eager(), build(dataset)
    step = graphed(parts, Fake(second_fails))
    results = train(parts, step)
    assert results[16][2] is None  # that iteration was a replay without the sum; one row lacks it
    assert [r[:2] for r in results] == [e[:2] for e in expected]
    assert results[20] == expected[20]
    assert same(state_of(parts), state)
    assert step.choice == {"asked": "CUDA Graph", "used": "eager step", "reason": "RuntimeError: no memory"}


def reason_against(dataset, fake, iterations=12) -> str:
    """Why a run makes no capture."""
    parts = build(dataset)
    step = graphed(parts, fake)
    train(parts, step, range(iterations))
    assert fake.captures == 0 and step.choice["used"] == "eager step"
    assert fake.closed == (iterations >= EAGER_ITERS)
    return step.choice["reason"]


@pytest.mark.parametrize("which", range(REFERENCES))
def test_a_step_that_waits_is_not_captured(dataset, which):
    """Perhaps only in one of the iterations that are looked at."""
    found, fake = iter(range(REFERENCES)), Fake()
    fake.eager_with_waits = lambda run: (run(), ["training/step.py:31"] if next(found) == which else [])
    assert reason_against(dataset, fake) == "the step waits for the GPU at training/step.py:31"


def test_one_rank_that_cannot_keeps_all_from_it_and_one_that_cannot_go_on_ends_all(dataset, monkeypatch):
    """Before any takes memory for a snapshot; rank 1 fails where rank 0 does not."""
    others = {None: "no room", True: True}
    monkeypatch.setattr(graphs_module, "gather_objects", lambda value, world: [value, others[value]])
    monkeypatch.setattr(graphs_module, "Snapshot", lambda state: pytest.fail("taken too early"))
    assert reason_against(dataset, Fake()) == "rank 1: no room"
    others[True] = False
    with pytest.raises(RunError, match=r"the capture broke off \(rank 1: no room\), and FSDP cannot go on"):
        reason_against(dataset, Fake())


def test_weights_on_their_way_arrive_before_a_replay_and_at_its_end(dataset):
    events = []

    def noted(run, fake):
        return lambda: (events.append("replay"), run())[1]

    parts = build(dataset)
    parts.state.strategy.settle = lambda: events.append("settle")
    train(parts, graphed(parts, Fake(noted)), range(EAGER_ITERS + 2), sums=())
    assert events[-6:] == ["settle", "replay", "settle"] * 2


def test_a_snapshot_that_does_not_fit_is_not_begun(dataset, monkeypatch):
    monkeypatch.setattr(graphs_module, "free_host_bytes", lambda: 2**10)
    assert "GiB of host memory" in reason_against(dataset, Fake())


def test_the_clock_stops_for_the_gate_and_for_no_iteration(dataset):
    parts, events = build(dataset), []

    def noted(*arguments):
        events.append("step")
        return parts.step(*arguments)

    @contextlib.contextmanager
    def paused():
        events.append("pause")
        yield
        events.append("go on")

    train(parts, graphed(parts, Fake(), noted, paused), range(EAGER_ITERS + 1), sums=())
    eager = ["step"] * (EAGER_ITERS - REFERENCES)
    gate = ["pause", *["step"] * REFERENCES, "go on"]  # the replays; a fake makes them by the step
    assert events == [*eager, "pause", "go on", *["step"] * REFERENCES, *gate, "step"]


def test_another_shape_runs_eagerly_between_replays(dataset):
    plain, parts = build(dataset), build(dataset)
    step = graphed(parts, Fake())
    for each, run in ((plain, plain.step), (parts, step)):
        train(each, run, range(12))
        x, y = each.loader.next()
        run(x[:, :2].contiguous(), y[:, :2].contiguous(), 1e-3)
        train(each, run, range(3))
    assert same(weights(parts), weights(plain))
    assert step.choice["used"] == "CUDA Graph"


def test_a_gradient_that_is_not_finite_is_no_difference(dataset):
    """In both references, so that the gate compares inf with inf."""
    parts = build(dataset)
    step = graphed(parts, Fake())
    train(parts, step, range(EAGER_ITERS - REFERENCES))
    before = weights(parts)
    parts.state.loss_scale.scale.fill_(float("inf"))
    results = train(parts, step, range(REFERENCES))
    parts.state.loss_scale.scale.fill_(1.0)
    assert [result[3] for result in results] == [1.0] * REFERENCES
    assert same(weights(parts), before)
    assert step.choice["used"] == "CUDA Graph"


def test_after_close_the_step_is_eager(dataset, eager):
    parts, fake = build(dataset), Fake()
    step = graphed(parts, fake)
    results = train(parts, step, range(12))
    step.close()
    assert fake.closed
    assert results + train(parts, step, range(12, 14)) == eager(14)[0]


def test_a_run_that_ends_early_says_so(dataset):
    assert reason_against(dataset, Fake(), 5) == "the run ended within its first 10 iterations"


TRY_IT = "off; try --use_cuda_graphs=True, "


@pytest.mark.parametrize(
    "config, flags, line",
    [
        ("speedrun_124m", (), TRY_IT),
        ("qwen3_1.7b", ("--use_fsdp=True", "--low_precision=fp8_tensorwise"), "off, the eager step runs"),
    ],
)
def test_who_may_wait_for_the_host_is_told_to_try_a_graph(run, capsys, config, flags, line):
    run(f"config/{config}.py", "--dry_run=True", "--gpu=H100", "--use_cuda_graphs=False", *flags)
    (found,) = [text for text in capsys.readouterr().out.splitlines() if text.startswith("CUDA Graph:")]
    assert found.split(None, 2)[2].startswith(line) and len(found) <= 80


def test_train_runs_eagerly_what_cannot_be_captured(dataset, tmp_path, run, capsys):
    config = write_config(tmp_path / "run.py", **TINY, dataset=str(dataset), out_dir=str(tmp_path / "out"))
    assert run(config, "--use_cuda_graphs=True") == 0
    reason = "device='cpu' has no CUDA Graphs"
    lines = [line for line in capsys.readouterr().out.splitlines() if "CUDA Graph" in line]
    assert [line.split(None, 2)[2] for line in lines] == [f"not used, the eager step runs: {reason}"]
    content = last_run(tmp_path / "out")
    expected = {"asked": "CUDA Graph", "used": "eager step", "reason": reason}
    assert content["startup_info"]["cuda_graphs"] == expected and content["status"] == "completed"
