"""The second look: a bit that flips in one of two passes is found, named, and reaches no weight; without a
fault, nothing changes."""

import pytest
import torch
from support.faults import digest, saved_steps
from support.flipped_bits import BIT, ELEMENT, flip, flip_activation, flip_gradient
from support.graphed_runs import Fake, build, build_run, graphed, rate, same, weights
from support.helpers import TINY, last_run, make_dataset, write_config
from support.ranks import on_ranks

import train
from common.errors import UserError
from model import manual_attention
from ops.float8_linear import Float8Linear
from training.configuration.keys import TrainConfig
from training.configuration.rules import check
from training.faults.anomalies import AnomalyPolicy, Diverged
from training.hardware.attention_kernels import choose_attention
from training.optimization import second_look
from training.optimization.update_guard import SECOND_LOOK
from training.process.world import ALONE, World

CPU = torch.device("cpu")
BF16 = {"dtype": "bfloat16"}
WEIGHT = "blocks.0.ffn.down.weight"


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return make_dataset(tmp_path_factory.mktemp("second_look") / "tokens", train_tokens=50_000)


def iterate(parts, iterations, looks=(), step=None) -> list[tuple]:
    """(loss, norm, verdict) of each iteration; `looks` are those that look twice."""
    step = step or parts.step
    results = [step(*parts.loader.next(), rate(i), False, i in looks) for i in iterations]
    return [(r.loss.item(), r.grad_norm.item(), r.verdict.item()) for r in results]


def everything(parts) -> list[torch.Tensor]:
    """All that an iteration changes, and the generator of dropout."""
    held = weights(parts) + [t.clone() for t in parts.state.recipe.state().values()]
    return [*held, *parts.state.loss_scale.state().values(), torch.get_rng_state()]


# --- checksums ---


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.replicas
def test_a_checksum_sees_each_single_bit_and_names_it(dtype, device):
    tensor = torch.randn(37, 11, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    bits = 8 * tensor.element_size()

    def checksum(tensor):
        return second_look.checksums({"": tensor})[0].item()

    for bit in range(bits - 1):
        changed = tensor.clone()
        flip(changed, element=403, bit=bit)
        change = checksum(changed) - checksum(tensor)
        assert second_look._one_flip(change, 407) == f", as if bit {bit} of element 403 had flipped"
    assert second_look._one_flip(checksum((-tensor.float()).to(dtype)) - checksum(tensor), 407) == ""
    assert checksum(tensor.flip(0)) != checksum(tensor), "elements that change places are seen"
    assert checksum(tensor.clone()) == checksum(tensor)
    assert checksum(torch.empty(0, 7, dtype=dtype, device=device)) == 0
    one = torch.tensor(1, device=device)
    zeros = [tensor.float().index_fill(1, one, zero).to(dtype) for zero in (0.0, -0.0)]
    assert checksum(zeros[0]) != checksum(zeros[1]), "a changed sign is seen"


# --- one process ---


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"gradient_accumulation_steps": 3, "dropout": 0.1, **BF16},
        {"dtype": "float16", "gradient_accumulation_steps": 2},
        {"param_dtype": "bfloat16", "gradient_dtype": "bfloat16", "weight_rounding": "stochastic", **BF16},
        *({"low_precision": recipe, **BF16} for recipe in ("fp8_tensorwise", "fp8_delayed", "nvfp4")),
    ],
    ids=str,
)
def test_without_a_fault_a_run_with_second_looks_has_the_bits_of_one_without(dataset, keys):
    plain, looking = build(dataset, **keys), build(dataset, **keys)
    torch.manual_seed(7)
    expected = iterate(plain, range(6)), everything(plain)
    torch.manual_seed(7)
    found = iterate(looking, range(6), looks=(0, 2, 3, 5)), everything(looking)
    assert found[0] == expected[0]
    assert all(verdict == 0 for *_, verdict in found[0]) or keys.get("dtype") == "float16"
    assert same(found[1], expected[1])
    assert looking.step.second_look.differences() == {}


def test_without_it_no_pass_is_repeated_and_nothing_is_summed(dataset, monkeypatch):
    monkeypatch.setattr(second_look, "checksums", lambda tensors: pytest.fail("summed"))
    parts, forwards = build(dataset, gradient_accumulation_steps=2), []
    parts.state.strategy.module.register_forward_pre_hook(lambda *_: forwards.append(1))
    iterate(parts, range(3))
    assert len(forwards) == 6


def test_a_second_look_reads_no_value(dataset, refuse_reading):
    parts = build(dataset, gradient_accumulation_steps=2, **BF16)
    parts.step.is_first = False  # the first micro-step of a process looks for a multiple of the loss
    batch = parts.loader.next()
    refuse_reading()
    parts.step(*batch, 1e-2, False, True)


@pytest.mark.parametrize("wrong", [0, 1], ids=["first pass", "second pass"])
@pytest.mark.parametrize("steps", [1, 2])
def test_a_bit_flipped_in_a_gradient_is_named_and_reaches_no_weight(dataset, wrong, steps):
    parts = build(dataset, gradient_accumulation_steps=steps)
    flip_gradient(parts.state.strategy, 2 + wrong, WEIGHT)
    good = iterate(parts, range(2), looks=(0,))
    before = weights(parts)
    assert [verdict for *_, verdict in [*good, *iterate(parts, [2], looks=(2,))]] == [0, 0, SECOND_LOOK]
    assert same(weights(parts), before)
    found = parts.step.second_look.differences()
    assert list(found) == [f"gradient of {WEIGHT}"]
    assert f"as if bit {BIT} of element {ELEMENT} had flipped" in found[f"gradient of {WEIGHT}"]
    assert iterate(parts, [3])[0][2] == 0 and not same(weights(parts), before)


@pytest.mark.parametrize("wrong", [0, 1], ids=["first pass", "second pass"])
def test_a_bit_flipped_in_an_activation_is_found_with_all_that_follows_from_it(dataset, wrong):
    parts = build(dataset, gradient_accumulation_steps=2)
    flip_activation(parts.state.strategy, 2 + wrong)  # after one iteration without a second look
    before = iterate(parts, range(1)) and weights(parts)
    assert iterate(parts, [1], looks=(1,))[0][2] == SECOND_LOOK
    assert same(weights(parts), before)
    found = parts.step.second_look.differences()
    assert "the loss" in found and f"gradient of {WEIGHT}" in found
    once, again = (float(word.strip(",")) for word in found["the loss"].split()[1:4:2])
    assert once != again and abs(once - again) < 0.1


@pytest.mark.parametrize(
    ("keys", "what"),
    [
        (BF16, "(working weights)"),
        ({**BF16, "low_precision": "fp8_tensorwise"}, "(quantized columns)"),
        ({**BF16, "low_precision": "fp8_delayed"}, "(quantized columns)"),
    ],
)
def test_a_lasting_flip_in_a_working_copy_is_found(dataset, keys, what):
    parts = build(dataset, gradient_accumulation_steps=2, **keys)
    strategy = parts.state.strategy
    iterate(parts, range(2), looks=(0,))
    layers = [m for m in strategy.module.modules() if isinstance(m, Float8Linear)]

    def flip_copy():
        flip(layers[1].quantized.columns if layers else strategy.working_copies()[WEIGHT], bit=3)
        return weights(parts)

    before = flip_copy()
    assert iterate(parts, [2])[0][2] == 0, "nobody looks, and the numbers look right"
    assert not same(weights(parts), before)
    before = flip_copy()
    assert iterate(parts, [3], looks=(3,))[0][2] == SECOND_LOOK
    assert same(weights(parts), before)
    (name,) = parts.step.second_look.differences()
    assert what in name


# --- CUDA Graphs, with a fake ---


def test_graphs_look_twice_in_a_capture_of_their_own(dataset, graph_lines):
    looks = (0, 15, 18, 21)
    plain, parts = (build(dataset, gradient_accumulation_steps=2) for _ in range(2))
    fake = Fake()
    step = graphed(parts, fake)
    assert iterate(parts, range(24), looks, step) == iterate(plain, range(24))
    assert same(weights(parts), weights(plain))
    assert fake.captures == 2 and step.choice["used"] == "CUDA Graph"
    assert graph_lines()[-1].startswith("CUDA Graph: replaying also with a second look (bit-equal")


def test_a_flip_during_a_replay_is_named_after_later_replays(dataset):
    """A replay overwrites the memory of the one before; the difference is read at a log row."""
    parts = build(dataset, gradient_accumulation_steps=2)
    step = graphed(parts, Fake())
    iterate(parts, range(16), (0, 13, 15), step)
    flip_gradient(parts.state.strategy, 1, WEIGHT)
    before = weights(parts)
    assert iterate(parts, [16], (16,), step)[0][2] == SECOND_LOOK
    assert same(weights(parts), before)
    assert [verdict for *_, verdict in iterate(parts, range(17, 22), (18, 20), step)] == [0] * 5
    assert list(parts.step.second_look.differences()) == [f"gradient of {WEIGHT}"]


# --- processes ---


TWO = "--gradient_accumulation_steps=2"
STRATEGIES = {
    "ddp": [TWO],
    "ddp, one micro-step": ["--dtype=bfloat16", "--reduce_dtype=bfloat16"],
    "zero1": ["--use_zero1=True", "--dtype=bfloat16", TWO],
    "zero1, one micro-step": ["--use_zero1=True"],
    "fsdp": ["--use_fsdp=True", TWO],
    "fsdp in bf16": ["--use_fsdp=True", "--dtype=bfloat16", "--reduce_dtype=bfloat16", TWO],
    "fsdp, one micro-step": ["--use_fsdp=True"],
    "fsdp, fp8": ["--use_fsdp=True", "--dtype=bfloat16", "--low_precision=fp8_delayed", TWO],
    "zero1, fp8": ["--use_zero1=True", "--dtype=bfloat16", "--low_precision=fp8_tensorwise", TWO],
}
OF_RANK_1 = [name for name in STRATEGIES if name != "fsdp, one micro-step"]


class Rank:
    """One strategy's parts on this rank."""

    def __init__(self, config: str, strategy: str, world: World):
        self.parts, self.world = build_run([config, *STRATEGIES[strategy]], world), world
        self.strategy, self.step = self.parts.state.strategy, self.parts.step
        self.generator = torch.Generator().manual_seed(world.rank)

    def iterate(self, second_look: bool = False):
        shape = (self.parts.config.micro_steps, 2, 33)
        ids = torch.randint(self.parts.config.vocab_size, shape, generator=self.generator)
        return self.step(ids[..., :-1], ids[..., 1:], 1e-2, False, second_look)

    def changes(self, *looks: bool) -> list[torch.Tensor]:
        """The loss of each iteration, and all that it changes."""
        found = [[self.iterate(look).loss, *everything(self.parts)] for look in looks]
        return [tensor for each in found for tensor in each]

    def suffer(self, plant) -> dict:
        """What a second look finds after plant() on rank 1."""
        self.iterate(second_look=True)
        if self.world.rank == 1:
            plant(self.strategy)
        before, result = weights(self.parts), self.iterate(second_look=True)
        found = {"verdict": result.verdict.item(), "unchanged": same(before, weights(self.parts))}
        found["names"] = list(self.step.second_look.differences())
        policy = AnomalyPolicy(self.parts.config, self.world, record=None, start=7)
        policy.second_look = self.step.second_look
        policy.add(self.iterate())
        policy.add(result)
        with pytest.raises(Diverged) as error:
            policy.read_now()
        return found | {"message": str(error.value), "next verdict": self.iterate(True).verdict.item()}


def layer_of(strategy) -> Float8Linear:
    return strategy.module.get_submodule(WEIGHT.removesuffix(".weight"))


def of_a_rank(world: World, config: str) -> dict:
    everything_found = {}
    for name in STRATEGIES:
        plain, looking = Rank(config, name, world), Rank(config, name, world)
        expected, found = plain.changes(*[False] * 3), looking.changes(True, False, True)
        faults = {
            "gradient": lambda strategy: flip_gradient(strategy, 1, WEIGHT),
            "activation": lambda strategy: flip_activation(strategy, 0),
        }
        if name == "zero1":  # the first row is rank 0's
            faults["copy"] = lambda strategy: flip(strategy.working_copies()[WEIGHT], bit=3)
        if name == "fsdp, fp8":
            faults["copy"] = lambda strategy: flip(layer_of(strategy).quantized.rows, bit=3)
        everything_found[name] = {"same bits": same(expected, found)} | {
            fault: Rank(config, name, world).suffer(plant) for fault, plant in faults.items()
        }
    return everything_found


@pytest.fixture(scope="module")
def ranks(dataset, tmp_path_factory):
    """What each of two ranks found, of which the second has the faults."""
    folder = tmp_path_factory.mktemp("ranks")
    config = write_config(folder / "run.py", **{**TINY, "batch_size": 2, "dataset": str(dataset)})
    return on_ranks(2, "faults.test_second_look:of_a_rank", config)


def found_by(ranks, strategy: str, fault: str) -> tuple[dict, dict]:
    """Of both ranks, which refuse the update."""
    both = [rank[strategy][fault] for rank in ranks]
    assert [(found["verdict"], found["unchanged"]) for found in both] == [(SECOND_LOOK, True)] * 2
    return both


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_ranks_without_a_fault_have_the_bits_of_a_run_without_second_looks(ranks, strategy):
    assert [rank[strategy]["same bits"] for rank in ranks] == [True, True]


@pytest.mark.parametrize("strategy", OF_RANK_1)
@pytest.mark.parametrize("fault", ["gradient", "activation"])
def test_the_rank_that_computes_wrongly_is_named_and_no_rank_makes_the_update(ranks, strategy, fault):
    first, second = found_by(ranks, strategy, fault)
    assert not first["names"] and f"gradient of {WEIGHT}" in second["names"]
    assert first["message"] == second["message"] and "different bits: rank 1 (" in first["message"]
    assert first["next verdict"] == second["next verdict"] == 0


def test_with_one_micro_step_fsdp_compares_what_is_reduced_and_says_so(ranks):
    both = found_by(ranks, "fsdp, one micro-step", "activation")
    assert all(f"gradient of {WEIGHT}, mean over the ranks, so" in " ".join(one["names"]) for one in both)
    assert ["the loss" in one["names"] for one in both] == [False, True]


@pytest.mark.parametrize(
    ("strategy", "copy"),
    [("zero1", "(working weights)"), ("fsdp, fp8", "(quantized rows)")],  # zero1: of rows that rank 0 updates
)
def test_a_lasting_flip_in_one_ranks_working_copy_is_found(ranks, strategy, copy):
    assert [one["names"] for one in found_by(ranks, strategy, "copy")] == [[], [f"{WEIGHT} {copy}"]]


# --- whole runs ---


@pytest.fixture
def config(dataset, tmp_path):
    keys = {**TINY, "max_iters": 24, "log_interval": 5, "dataset": str(dataset), "checkpoint_interval": 8}
    return write_config(tmp_path / "run.py", **keys, out_dir=str(tmp_path / "out"))


def test_a_run_ends_with_what_differed_and_its_checkpoint_is_as_it_was(
    run, config, monkeypatch, tmp_path, capfd
):
    looks = ["--replay_check_interval=10"]
    assert run(config, *looks, "--keep_last=None", f"--out_dir={tmp_path / 'good'}") == 0
    make = train.build_step

    def with_a_fault(config, strategy, *rest):
        flip_gradient(strategy, 3, WEIGHT)  # iteration 0 looks, then 10
        return make(config, strategy, *rest)

    monkeypatch.setattr(train, "build_step", with_a_fault)
    assert run(config, *looks) == 1
    said = capfd.readouterr().err
    assert "iteration 10 computed a micro-step twice, with different bits: rank 0 (" in said
    assert f"gradient of {WEIGHT} (sum " in said
    assert "Resume from iteration 8 without it" in said and "first iteration of this start" not in said
    record = last_run(tmp_path / "out")
    (event,) = record["events"]
    assert (event["iter"], event["kind"], event["ranks"]) == (10, "second_look", [0])
    assert event["tensors"] == [f"gradient of {WEIGHT}"] and record["status"] == "failed"
    assert saved_steps(tmp_path / "out") == [8]
    assert digest(tmp_path / "out", 8) == digest(tmp_path / "good", 8)


def test_a_difference_in_the_first_iteration_may_be_the_settings(dataset):
    parts = build(dataset)
    flip_activation(parts.state.strategy, 0)
    policy = AnomalyPolicy(TrainConfig(replay_check_interval=100), ALONE, None, start=300)
    policy.second_look = parts.step.second_look
    assert policy.wants_second_look(300) and not policy.wants_second_look(301)
    assert policy.wants_second_look(400) and not policy.wants_second_look(350)
    policy.add(parts.step(*parts.loader.next(), 1e-2, False, True))
    with pytest.raises(Diverged, match="these settings do not repeat their bits"):
        policy.read_now()
    never = AnomalyPolicy(TrainConfig(), ALONE, None, start=0)
    assert not any(map(never.wants_second_look, range(3)))
    resumed = AnomalyPolicy(TrainConfig(replay_check_interval=4), ALONE, None, start=5)
    assert [i for i in range(5, 13) if resumed.wants_second_look(i)] == [5, 8, 12]


# --- settings that do not repeat ---


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"dropout": 0.1, "use_cuda_graphs": True}, "a CUDA Graph draws new ones for dropout=0.1"),
        ({"attention_backend": "manual"}, "may choose another softmax for attention_backend='manual'"),
    ],
)
def test_settings_that_do_not_repeat_are_refused_by_name(keys, message):
    with pytest.raises(UserError, match=f"replay_check_interval=100 .*{message}"):
        check(TrainConfig(replay_check_interval=100, **keys), 1)
    check(TrainConfig(**keys), 1)
    check(TrainConfig(replay_check_interval=100, compile=False, device="cpu", **keys), 1)


def test_attention_whose_backward_does_not_repeat_is_refused_by_name(monkeypatch):
    class Varies(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q):
            return q.clone()

        @staticmethod
        def backward(ctx, dq):
            return dq + torch.rand_like(dq) * 1e-6

    def attend(q, k, v, dropout_p=0.0):
        return manual_attention(Varies.apply(q), k, v, dropout_p)

    backends = {"sdpa": lambda *_: [("kernel", attend)]}
    monkeypatch.setattr("training.hardware.attention_kernels.BACKENDS", backends)
    arguments = ("sdpa", TrainConfig(**TINY).model_config(), torch.float32, CPU, manual_attention)
    assert choose_attention(*arguments).used == "sdpa"
    with pytest.raises(UserError, match=r"sdpa \[kernel\] failed: its backward has other bits each time"):
        choose_attention(*arguments, repeats=True)
    monkeypatch.undo()
    assert choose_attention(*arguments, repeats=True).used == "sdpa"


def test_flash_attention_is_asked_for_a_backward_that_repeats(monkeypatch):
    asked = []

    def attend(q, k, v, dropout_p=0.0, **options):
        asked.append(options)
        return manual_attention(q, k, v, dropout_p)

    backends = {"flash_attn_2": lambda *_: [("flash-attn 2", attend)]}
    monkeypatch.setattr("training.hardware.attention_kernels.BACKENDS", backends)
    arguments = ("flash_attn_2", TrainConfig(**TINY).model_config(), torch.float32, CPU, manual_attention)
    choose_attention(*arguments)
    choose_attention(*arguments, repeats=True)
    assert asked == [{}, {"deterministic": True}]
