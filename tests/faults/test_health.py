"""Bad numbers: every rank leaves the update out or none does, the run says so and ends where it should;
replicas that drift apart are found."""

import dataclasses
import functools
import math
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from support.bad_losses import changed, no_gradient, times
from support.faults import saved_steps
from support.graphed_runs import Fake, build, build_run, graphed, rate, same, train, weights
from support.helpers import TINY, last_run, make_dataset, write_config
from support.ranks import on_ranks

import model
import train as program
from training.configuration.keys import TrainConfig
from training.faults import replica_check as drift
from training.faults.anomalies import MAX_PENDING, STUCK_ITERATIONS, AnomalyPolicy, Diverged
from training.optimization import update_guard
from training.optimization.step import StepResult
from training.optimization.update_guard import LOSS, LOSS_SPIKE, NORM, NORM_SPIKE, UpdateGuard
from training.process.world import WATCHDOG_FIRST_MINUTES, World
from training.records.clock import Clock

CPU = torch.device("cpu")
BAD = (math.nan, math.inf, -math.inf)
WINDOW, N = update_guard.SPIKE_WINDOW, 16  # instead of it, so that tests need few iterations
SPIKES, BOTH = {"skip_spikes": 6.0}, LOSS_SPIKE | NORM_SPIKE


@pytest.fixture(autouse=True)
def small_window(monkeypatch):
    monkeypatch.setattr(update_guard, "SPIKE_WINDOW", N)


def judge(health: UpdateGuard, loss: float, norm: float) -> int:
    verdict, overflow = health.judge(torch.tensor(loss), torch.tensor(norm))
    assert overflow.item() == (not math.isfinite(norm))
    return int(verdict.item())


def watching(count: int = N, seed: int = 0, **keys) -> UpdateGuard:
    """After `count` iterations with a loss about 3 ± 0.1 and a norm about 1 ± 0.2."""
    health = UpdateGuard(TrainConfig(**{**SPIKES, **keys}), CPU)
    generator = torch.Generator().manual_seed(seed)
    for a, b in torch.randn(count, 2, generator=generator).clamp(-2, 2).tolist():
        assert judge(health, 3 + 0.1 * a, 1 + 0.2 * b) == 0
    return health


# --- the verdict on one iteration ---


@pytest.mark.parametrize("make", [lambda: UpdateGuard(TrainConfig(), CPU), lambda: watching()])
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.bad_numbers
def test_what_is_not_finite_is_refused_with_the_reason_and_enters_no_window(make, bad):
    health = make()
    before = [tensor.clone() for tensor in health.state().values()]
    assert judge(health, bad, 1.0) & 3 == LOSS
    assert judge(health, 3.0, bad) & 3 == NORM
    assert judge(health, bad, bad) & 3 == LOSS | NORM
    assert same(list(health.state().values()), before)
    assert judge(health, 3.0, 1.0) == 0
    assert judge(health, 1e30, 1e30) == (BOTH if before else 0), "it is finite"


@pytest.mark.bad_numbers
@pytest.mark.parametrize(
    ("loss", "norm", "verdict"),
    [
        *((3 + 10 * 0.1, 1.0, LOSS_SPIKE), (3.0, 1 + 10 * 0.2, NORM_SPIKE), (4.0, 3.0, BOTH)),
        *((3 + 3 * 0.1, 1 + 3 * 0.2, 0), (0.5, 0.01, 0)),  # low is no spike
    ],
)
def test_ten_sigmas_are_a_spike_and_ordinary_noise_is_none(loss, norm, verdict):
    assert judge(watching(), loss, norm) == verdict
    assert judge(watching(skip_spikes=30.0), loss, norm) == 0
    assert judge(watching(N - 1), 50.0, 50.0) == 0, "the window is not full"


def test_a_refused_value_does_not_enter_the_window_and_an_accepted_one_replaces_the_oldest():
    health = watching()
    window, accepted = (tensor.clone() for tensor in health.state().values())
    for _ in range(3 * N):
        assert judge(health, 40.0, 1.0) == LOSS_SPIKE
    assert torch.equal(health.window, window) and torch.equal(health.accepted, accepted)
    assert judge(health, 3.05, 1.1) == 0
    window[:, 0] = torch.tensor([3.05, 1.1])
    assert torch.equal(health.window, window) and health.accepted == N + 1


def test_a_loss_that_never_varies_has_no_spikes_of_rounding():
    health = UpdateGuard(TrainConfig(**SPIKES), CPU)
    for _ in range(2 * N):
        assert judge(health, 2.0, 1.0) == 0
    assert judge(health, 2.0 + 1e-5, 1.0 + 1e-5) == 0
    assert judge(health, 2.0 * 1.01, 1.0) == LOSS_SPIKE
    in_bf16 = UpdateGuard(TrainConfig(**SPIKES, reduce_dtype="bfloat16"), CPU)
    for _ in range(2 * N):
        judge(in_bf16, 2.0, 1.0)
    assert judge(in_bf16, 2.0 * 1.01, 1.0) == 0, "one step of bf16 is 0.8 %"


@pytest.mark.bad_numbers
def test_a_loss_that_falls_as_in_training_raises_no_alarm_and_a_spike_in_it_does(monkeypatch):
    """10.8 towards 2.5 with noise, norms with a heavy tail: 4000 iterations, a window of the real size."""
    monkeypatch.setattr(update_guard, "SPIKE_WINDOW", WINDOW)
    health = UpdateGuard(TrainConfig(**SPIKES), CPU)
    noise = torch.randn(2, 4000, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    i = torch.arange(4000)
    losses = 2.5 + 8.3 * torch.exp(-i / 150) + 0.03 * noise[0] + 1.0 * (i == 2000)
    norms = (0.4 + 4 * torch.exp(-i / 80)) * torch.exp(0.2 * noise[1])
    pairs = enumerate(zip(losses.tolist(), norms.tolist(), strict=True))
    assert [i for i, (loss, norm) in pairs if judge(health, loss, norm)] == [2000]


def test_judging_reads_no_value(refuse_reading):
    health, values = watching(), (torch.tensor(3.0), torch.tensor(1.0))
    refuse_reading()
    health.judge(*values)


# --- one process: the step ---


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return make_dataset(tmp_path_factory.mktemp("health") / "tokens", train_tokens=50_000)


def spoilt(parts, faults: dict) -> None:
    """parts whose micro-step number n, counted from now, has the fault faults[n]."""
    forward, count = parts.state.strategy.forward, iter(range(10**6))

    def spoil(*arguments):
        n = next(count)
        return faults[n](forward, *arguments) if n in faults else forward(*arguments)

    parts.state.strategy.forward = spoil


def all_state(parts) -> list[torch.Tensor]:
    return weights(parts) + [tensor.clone() for tensor in parts.state.update_guard.state().values()]


NAN = changed(lambda loss: loss + math.nan)  # with a gradient that is finite
FAULTS = [
    (NAN, LOSS),
    (changed(lambda loss: loss - math.inf), LOSS),
    (changed(lambda loss: loss * math.nan), LOSS | NORM),
    *((times(factor), LOSS | NORM) for factor in (math.nan, 1e60)),
    (times(1000), BOTH),
]
BF16 = {"dtype": "bfloat16", "param_dtype": "bfloat16"}
OF_STORAGE = [{}, {**BF16, "adam_dtype": "bfloat16"}, {**BF16, "weight_rounding": "stochastic"}]


@pytest.mark.parametrize(
    "keys", [{}, BF16 | {"adam_dtype": "bfloat16"}, BF16 | {"weight_rounding": "stochastic"}]
)
@pytest.mark.bad_numbers
def test_a_bad_iteration_leaves_every_bit_and_the_next_update_is_the_one_that_was_due(dataset, keys):
    keys = {**keys, **SPIKES, "gradient_accumulation_steps": 2}
    parts, undisturbed = build(dataset, **keys), build(dataset, **keys)
    for each in (parts, undisturbed):
        train(each, iterations=range(N))
    spoilt(parts, {4 * n + 1: fault for n, (fault, _) in enumerate(FAULTS)})  # every other iteration's second
    for _, reason in FAULTS:
        before = all_state(parts)
        (result,) = train(parts, iterations=[0])
        assert int(result[4]) & reason == reason  # its verdict
        assert same(all_state(parts), before)
        undisturbed.loader.next()  # the same data later
        assert train(parts, iterations=[1]) == train(undisturbed, iterations=[1])
        assert same(all_state(parts), all_state(undisturbed))


# --- captured iterations ---


def test_replays_judge_as_the_eager_step_does_and_a_spike_among_them_is_left_out(dataset):
    eager, parts, fake = build(dataset, **SPIKES), build(dataset, **SPIKES), Fake()
    spoilt(eager, {20: times(1000)})
    spoilt(parts, {22: times(1000)})  # a capture makes two of the iterations before it again
    expected = train(eager, sums=())
    results = train(parts, graphed(parts, fake), sums=())
    assert fake.captures == 1 and fake.step.choice["used"] == "CUDA Graph", fake.step.choice
    assert results == expected
    assert [i for i, result in enumerate(results) if result[4]] == [20]
    assert same(all_state(parts), all_state(eager))


def test_a_capture_that_judges_otherwise_is_refused(dataset):
    def lenient(run, fake):
        return lambda: (run(), fake.step.state.update_guard.accepted.add_(1))[0]

    parts = build(dataset, **SPIKES)
    step = graphed(parts, Fake(lenient))
    train(parts, step, range(12))
    assert "update of accepted by" in step.choice["reason"], step.choice


# --- what the run makes of it ---


class Events(list):
    def add_event(self, iteration, kind, **facts):
        self.append({"iter": iteration, "kind": kind, **facts})


def result(verdict: int = 0, loss: float = 3.0, norm: float = 1.0) -> StepResult:
    verdict, loss, norm = (torch.tensor(float(value)) for value in (verdict, loss, norm))
    return StepResult(loss, norm, None, torch.zeros(()), verdict, *torch.ones(3))


def verdicts(start: int = 0, **keys) -> AnomalyPolicy:
    return AnomalyPolicy(TrainConfig(**keys), World(0, 0, 1, CPU), Events(), start)


def settle(made: AnomalyPolicy, *results: StepResult) -> list[dict]:
    for each in results:
        made.add(each)
    made.read_now()
    return made.record


NAN_LOSS, NAN_NORM = result(LOSS | LOSS_SPIKE, loss=math.nan), result(NORM | NORM_SPIKE, norm=math.nan)
SPIKE = result(LOSS_SPIKE, loss=9.0)


@pytest.mark.parametrize(
    ("bad", "what", "kind"),
    [(NAN_LOSS, "loss", "nonfinite_loss"), (NAN_NORM, "gradient norm", "nonfinite_gradient")],
)
def test_stop_names_the_iteration_and_where_to_go_on_from(bad, what, kind):
    made = verdicts(start=1000)
    message = f"the {what} of iteration 1002 is nan; its update .* Resume from iteration 1,000 with"
    with pytest.raises(Diverged, match=message):
        settle(made, result(), result(), bad, result())
    assert kinds(made.record) == [(1002, kind)]
    with pytest.raises(Diverged, match="Start again with a lower learning_rate"):
        settle(verdicts(), bad)


def test_skip_goes_on_counts_and_notes_each_iteration():
    made = verdicts(on_nonfinite="skip", skip_spikes=6.0)
    events = settle(made, result(), NAN_LOSS, result(), SPIKE, NAN_NORM, result())
    assert kinds(events) == [(1, "nonfinite_loss"), (3, "spike"), (4, "nonfinite_gradient")]
    assert "the loss 9.0000 beyond 6 sigmas of the last 128" in events[1]["message"]
    settle(made, result(), SPIKE)
    assert made.record[-1]["iter"] == 7
    assert made.take_skipped() == 4 and made.take_skipped() == 0


def test_too_many_in_a_row_end_the_run_also_across_rows():
    made = verdicts(on_nonfinite="skip", max_skips=3)
    settle(made, NAN_LOSS, SPIKE, result(), NAN_LOSS, SPIKE)
    with pytest.raises(Diverged, match="the last of 3 updates skipped in a row"):
        settle(made, SPIKE, result())
    assert settle(verdicts(on_nonfinite="skip", max_skips=3), *[SPIKE, SPIKE, result()] * 5)


def test_float16_may_overflow_until_its_scale_has_no_way_left():
    overflow = result(NORM | NORM_SPIKE, norm=math.inf)
    made = verdicts(dtype="float16")
    assert settle(made, *[overflow] * (STUCK_ITERATIONS - 1), result(), *[overflow] * 9) == []
    assert made.take_skipped() == STUCK_ITERATIONS + 8
    with pytest.raises(Diverged, match="no gradient was finite in the last 30 iterations"):
        settle(made, *[overflow] * (STUCK_ITERATIONS - 9))
    with pytest.raises(Diverged, match="the loss of iteration 1 is nan"):
        settle(verdicts(dtype="float16"), overflow, NAN_LOSS)


def test_an_iteration_is_noted_once_and_before_long_also_without_a_row():
    made = verdicts(on_nonfinite="skip")
    settle(made, NAN_LOSS)
    settle(made)
    assert len(made.record) == 1 and made.in_a_row == 1
    made = verdicts()
    with pytest.raises(Diverged, match="the loss of iteration 7 is nan"):
        for n in range(MAX_PENDING):
            made.add(NAN_LOSS if n == 7 else result())
    assert not made.pending


# --- whole runs, one process ---


@pytest.fixture
def config(dataset, tmp_path):
    keys = {**TINY, "max_iters": 24, "log_interval": 10, "dataset": str(dataset)}
    return write_config(tmp_path / "run.py", **keys, out_dir=str(tmp_path / "out"))


@pytest.fixture
def inject(monkeypatch):
    """inject(iteration, fault): that iteration's forward, counted from the process's first, is spoilt."""
    forward = model.Transformer.forward

    def inject(iteration: int, fault=NAN) -> None:
        count = iter(range(10**6))

        def spoil(self, *arguments):
            plain = functools.partial(forward, self)
            if not torch.is_grad_enabled() or not self.training or arguments[0].device.type == "meta":
                return plain(*arguments)
            return fault(plain, *arguments) if next(count) == iteration else plain(*arguments)

        monkeypatch.setattr(model.Transformer, "forward", spoil)

    return inject


def kinds(events: list[dict]) -> list[tuple[int, str]]:
    return [(event["iter"], event["kind"]) for event in events]


@pytest.mark.bad_numbers
def test_by_default_a_run_stops_before_it_saves_and_names_the_iteration(run, config, inject, tmp_path, capfd):
    inject(13)
    assert run(config, "--checkpoint_interval=8") == 1
    error = capfd.readouterr().err
    assert "the loss of iteration 13 is nan; its update was made on no rank" in error
    assert "Resume from iteration 8 with a lower learning_rate" in error
    assert "Traceback" not in error
    record = last_run(tmp_path / "out")
    assert kinds(record["events"]) == [(13, "nonfinite_loss")]
    assert saved_steps(tmp_path / "out") == [8]  # 16 was due after the fault and before the next row
    assert record["status"] == "failed"


@pytest.mark.bad_numbers
def test_skip_leaves_the_update_out_and_the_run_completes(run, config, inject, tmp_path):
    inject(13)
    assert run(config, "--on_nonfinite=skip") == 0
    record = last_run(tmp_path / "out")
    assert [(e["iter"], e["kind"], e["ranks"]) for e in record["events"]] == [(13, "nonfinite_loss", [0])]
    skipped = {row["iter"]: row.get("skipped_updates", 0) for row in record["training_iterations"]}
    assert skipped == {0: 0, 10: 0, 20: 1, 23: 0}
    (log,) = (tmp_path / "out").glob("run_*.log")
    assert "the loss of iteration 13 is nan; its update was made on no rank" in log.read_text()
    assert saved_steps(tmp_path / "out") == [24]


@pytest.mark.bad_numbers
def test_a_resumed_run_judges_spikes_by_the_window_of_the_run_before(run, config, inject, tmp_path):
    """Without it, the window would not be full by then."""
    flags = ["--skip_spikes=6", "--max_iters=24", "--learning_rate=1e-3"]
    assert run(config, *flags, "--checkpoint_interval=18", "--keep_last=None") == 0
    inject(2, times(100))
    resume = ["--init_from=resume", "--resume_from=step-00000018"]
    assert run(config, *flags, *resume) == 0
    assert kinds(last_run(tmp_path / "out")["events"]) == [(20, "spike")]


# --- two processes ---


STRATEGIES = {
    "ddp": [],
    "ddp in bf16": ["--dtype=bfloat16", "--reduce_dtype=bfloat16"],
    "zero1": ["--use_zero1=True"],
    "fsdp": ["--use_fsdp=True"],
    "hybrid": ["--use_fsdp=True", "--fsdp_sharding=hybrid"],  # two machines of one process
}
ON_ONE_RANK = {  # in its first micro-step -> the verdict
    "nan loss": (NAN, LOSS),
    "infinite loss": (changed(lambda loss: loss + math.inf), LOSS),
    "nan gradient": (no_gradient, NORM),
    "spike": (times(1000), BOTH),
}


def of_strategy(config: str, name: str, world: World) -> dict:
    """What this rank finds where rank 1 has these faults, and at last a bit that others do not have."""
    world = dataclasses.replace(world, local_size=1 if name == "hybrid" else world.size)
    parts = build_run([config, *STRATEGIES[name], "--skip_spikes=6"], world)
    strategy, generator = parts.state.strategy, torch.Generator().manual_seed(world.rank)
    agree, agreed = strategy.loss_and_norm, []

    def noted():
        loss, norm = agree()
        agreed[:] = loss.item(), norm.item()
        return loss, norm

    strategy.loss_and_norm = noted

    def iterate() -> StepResult:
        ids = torch.randint(parts.config.model_config().vocab_size, (2, 4, 33), generator=generator)
        return parts.step(ids[..., :-1], ids[..., 1:], 1e-2)

    def held() -> list[torch.Tensor]:
        return all_state(parts) + [shard.parameter.data.clone() for shard in strategy.shards]

    if world.rank == 1:
        spoilt(parts, {2 * (N + 2 + n): fault for n, (fault, _) in enumerate(ON_ONE_RANK.values())})
    found: dict = {"good": [iterate().verdict.item() for _ in range(N + 1)]}  # which fill the window
    found["loss"] = iterate().loss.item()
    found["agreed"] = list(agreed)
    for fault in ON_ONE_RANK:
        before, result = held(), iterate()
        unchanged = same(before, held())
        found[fault] = int(result.verdict), str(result.loss.item()), unchanged, drift.differences(parts.state)
    before, verdict = held(), iterate().verdict.item()
    found["then"] = verdict, any(map(torch.equal, before, held()))

    check = drift.ReplicaCheck(parts.state, parts.config, Clock(CPU), record=None, start=0)
    check.interval = 10
    check.after_update(9)
    replicated = [shard for shard in strategy.shards if shard.replicas > 1][-1:]
    if world.rank == 1 and replicated:
        weight = replicated[0].local.data.view(-1)
        weight[3] = torch.nextafter(weight[3], torch.tensor(9.0))
    found["held"], found["drift"] = [shard.name for shard in replicated], None
    try:
        check.after_update(15)  # not due
        check.after_update(21)
    except drift.ReplicasDiffer as error:
        found["drift"] = str(error)
    return found


def of_a_run(config: str, world: World) -> str:
    """How a run ends in which the replicas are compared after the first iteration, and rank 1 has a loss that
    is no number in the second."""
    make = program.EagerStep

    def with_a_fault(strategy, *arguments, **options):
        parts = SimpleNamespace(state=SimpleNamespace(strategy=strategy))
        spoilt(parts, {3: NAN} if world.rank == 1 else {})
        return make(strategy, *arguments, **options)

    program.EagerStep, program.init_world = with_a_fault, lambda config, store: world
    try:
        program.main([config, "--max_iters=20", "--log_interval=5", "--drift_check_interval=1"])
    except Diverged as error:
        return str(error)
    return "completed"


def of_a_rank(world: World, config: str) -> dict:
    update_guard.SPIKE_WINDOW = N
    found = {name: of_strategy(config, name, world) for name in STRATEGIES}
    found["run"] = of_a_run(config, world)  # with the group of the consensus
    groups = dist.distributed_c10d._world.pg_map
    limits = [group._get_backend(CPU).options._timeout for group in groups]
    return found | {"limits": [limit.total_seconds() / 60 for limit in limits]}


@pytest.fixture(scope="module")
def two(dataset, tmp_path_factory):
    """What each of two ranks found."""
    folder = tmp_path_factory.mktemp("two")
    # 65 rows do not divide by 2
    keys = {**TINY, "vocab_size": 65, "learning_rate": 1e-3, "gradient_accumulation_steps": 2}
    config = write_config(folder / "run.py", **keys, dataset=str(dataset), out_dir=str(folder / "out"))
    return on_ranks(2, "faults.test_health:of_a_rank", config)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("fault", ON_ONE_RANK)
@pytest.mark.bad_numbers
def test_what_is_bad_on_one_rank_is_left_out_by_all(two, strategy, fault):
    """Item 17: one verdict; weights, moments, steps and window keep every bit, on both ranks."""
    first, second = (rank[strategy][fault] for rank in two)
    bits = ON_ONE_RANK[fault][1]
    assert first[0] == second[0] and (first[0] & (3 if bits < 4 else 15)) == bits, (first, second)
    assert first[2:] == second[2:] == [True, [[], []]]
    if "loss" in fault:
        assert math.isfinite(float(first[1])) and not math.isfinite(float(second[1]))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_is_judged_is_the_mean_loss_and_one_norm_and_good_iterations_are_made(two, strategy):
    first, second = (rank[strategy] for rank in two)
    rounding = 2**-7 if "bf16" in strategy else 1e-6  # the loss travels with the gradients
    assert first["loss"] != second["loss"] and first["agreed"] == second["agreed"]
    mean, norm = first["agreed"]
    assert mean == pytest.approx((first["loss"] + second["loss"]) / 2, rel=rounding) and norm > 0
    assert not any(first["good"]) and first["then"] == second["then"] == [0, False], "all of it changes"


@pytest.mark.hang
def test_every_group_has_the_time_limit_of_the_run(two):
    """Those of hybrid sharding are made by torch: its own 10 or 30 minutes would end a run unexplained."""
    limits = two[0]["limits"]
    assert len(limits) >= 3, "of all ranks, of the consensus, of hybrid sharding"
    assert set(limits) == {TrainConfig.start_timeout_minutes + WATCHDOG_FIRST_MINUTES}


@pytest.mark.bad_numbers
def test_every_rank_ends_the_run_and_names_the_one_with_the_bad_loss(two):
    first, second = (rank["run"] for rank in two)
    assert first == second
    assert first.startswith("the loss of iteration 1 is nan on rank 1; its update was made on no rank.")


# --- replicas ---


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.replicas
def test_one_bit_on_one_rank_is_found_at_the_next_check(two, strategy):
    """Item 18. Of an update that was made by 2 ranks nobody knows which is right, so both are named."""
    first, second = (rank[strategy] for rank in two)
    assert first["held"] == second["held"] and first["drift"] == second["drift"]
    if strategy == "fsdp":  # no two ranks hold the same
        assert first["held"] == [] and first["drift"] is None
        return
    assert f"after iteration 21 rank 0, 1 hold different bits of {first['held'][0]}" in first["drift"]
    assert "last equal at iteration 10: resume from a checkpoint" in first["drift"]


@pytest.mark.replicas
def test_the_odd_one_out_is_named_where_most_agree():
    assert drift._odd_ones([0, 1, 2, 3], [7, 7, 8, 7]) == [2]
    assert drift._odd_ones([1, 3, 5], [0, 7, 0, 7, 0, 9]) == [5]
    assert drift._odd_ones([0, 1, 2, 3], [7, 8, 8, 7]) == [0, 1, 2, 3]
    assert drift._odd_ones([0, 1], [7, 8]) == [0, 1]
    assert drift._odd_ones([0, 1, 2], [7, 7, 7]) == []


@pytest.mark.replicas
def test_under_hybrid_sharding_ranks_are_compared_with_those_that_hold_the_same_part(monkeypatch):
    monkeypatch.setattr(drift, "replicated", lambda state: {"w": None})
    monkeypatch.setattr(drift, "checksums", lambda held: [torch.tensor([1])])
    monkeypatch.setattr(
        drift, "all_gather", lambda everyone, mine: everyone.copy_(torch.tensor([1, 2, 1, 9]))
    )
    state = SimpleNamespace(world=World(0, 0, 4, CPU), strategy=SimpleNamespace(parts=2))
    assert drift.differences(state) == ([1, 3], ["w"])


@pytest.mark.parametrize(("interval", "checks"), [(10, [11, 19, 31]), (0, []), (1, [3, 7, 11])])
def test_checks_are_made_at_the_first_row_after_they_are_due(monkeypatch, interval, checks):
    made = []
    monkeypatch.setattr(drift, "differences", lambda state: (made.append(iteration), ([], []))[1])
    config = TrainConfig(drift_check_interval=interval)
    check = drift.ReplicaCheck(None, config, Clock(CPU), record=None, start=0)
    for iteration in range(3, 33, 4):  # a row is every fourth
        check.after_update(iteration)
    assert made[:3] == checks


@pytest.mark.replicas
def test_replicas_that_differ_are_never_saved(run, config, monkeypatch, tmp_path, capfd):
    """The comparison is due at iteration 1,000; the bit changes between the saves at 8 and 16."""
    answers = iter([([], []), ([1], ["head.weight"])])
    monkeypatch.setattr(drift, "differences", lambda state: next(answers))
    assert run(config, "--checkpoint_interval=8", "--drift_check_interval=1000") == 1
    error = capfd.readouterr().err
    assert "after iteration 15 rank 1 holds different bits of head.weight" in error
    assert "last equal at iteration 8" in error
    assert saved_steps(tmp_path / "out") == [8]


# --- the real thing, on a GPU ---

ON_GPU = {"device": "cuda", "dtype": "bfloat16", "n_embd": 128, "d_ff": 256, "block_size": 64, **SPIKES}


@pytest.mark.gpu
@pytest.mark.bad_numbers
def test_captured_iterations_skip_a_spike_as_the_eager_ones_do_without_waiting(dataset):
    from support.graphed_runs import captured

    keys = {**ON_GPU, "num_key_value_heads": 4}
    runs = []
    for make in (lambda parts: parts.step, captured):
        parts = build(dataset, **keys)
        step = make(parts)
        results = train(parts, step, range(20), sums=())
        before = all_state(parts)
        window = parts.state.update_guard.window
        usual, batch = window.clone(), parts.loader.next()
        window.div_(100)  # so that what comes next is a spike
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            bad = step(*batch, rate(20))
        finally:
            torch.cuda.set_sync_debug_mode("default")
        window.copy_(usual)
        assert bad.verdict.item() == BOTH
        assert same(all_state(parts), before)
        results += train(parts, step, range(21, 26), sums=())
        assert not any(result[4] for result in results)  # verdicts
        runs.append((results, all_state(parts)))
    assert step.choice["used"] == "CUDA Graph", step.choice
    step.close()
    assert runs[1][0] == runs[0][0]
    assert same(runs[1][1], runs[0][1])
