"""AdamW: torch's own where everything is fp32, its arithmetic where weights or moments are bf16; and a GPU's:
who owns a working copy, when publish() copies, what is kept. There the plain form is in place of the kernel,
which tests/gpu/test_adamw.py compares with torch's."""

import sys
import types
from dataclasses import replace
from importlib.machinery import ModuleSpec
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.graphed_runs import build
from support.helpers import TINY, make_dataset
from support.tensors import close
from support.updates import update
from torch.testing._internal.distributed.fake_pg import FakeStore

import model_builder
from common.errors import UserError
from model_builder import build_model
from ops.quantization import adamw as plain
from ops.quantization.adamw import Scalars, plain_adamw
from ops.quantization.random_bits import WEIGHTS
from training.configuration.dtypes import DTYPES
from training.configuration.keys import TrainConfig
from training.optimization import adamw
from training.optimization.adamw import AdamW, _bias_corrections
from training.optimization.optimizer import build_optimizer, describe_optimizer
from training.process.world import World
from training.strategies.parallelize import parallelize
from training.strategies.replicated import Bucket
from training.strategies.strategy import Shard, norm, norms

SHAPES = {"matrix": (12, 7), "norm": (5,), "nothing": (0, 7)}  # of a sharded matrix a rank may have no row
STEPS = 20


def shards(dtype=torch.float32, seed=0) -> list[Shard]:
    generator = torch.Generator().manual_seed(seed)
    made = []
    for name, shape in SHAPES.items():
        local = torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
        made.append(Shard(name, local, local))
    return made


def config(**keys) -> TrainConfig:
    return TrainConfig(**{"learning_rate": 1e-2, "weight_decay": 0.1, **keys})


def give_gradients(made: list[Shard], step: int) -> None:
    """Gradients of several magnitudes, the same for every list of shards."""
    generator = torch.Generator().manual_seed(1000 + step)
    for shard in made:
        gradient = torch.randn(shard.local.shape, generator=generator) * 10.0 ** (step % 3 - 1)
        shard.local.grad = gradient.to(shard.local.dtype)


class TorchAdamW:
    """torch's fused one, driven as ours."""

    def __init__(self, made: list[Shard]):
        self.shards = made
        groups = [
            {"params": [s.local for s in made if s.is_matrix], "weight_decay": 0.1},
            {"params": [s.local for s in made if not s.is_matrix], "weight_decay": 0.0},
        ]
        self.engine = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), fused=True)

    def kept(self, shard):
        return self.engine.state[shard.local]

    def step(self, rate, divisor, found_inf):
        self.engine.grad_scale, self.engine.found_inf = divisor, found_inf
        for group in self.engine.param_groups:
            group["lr"] = rate  # a tensor: a Python number would have other bits
        self.engine.step()


def trained_beside_torch_s(settings: TrainConfig, dtype=torch.float32):
    """What ours and torch's fused one, in fp32, have made of the same weights: {name: tensor} of both."""
    ours, theirs = shards(dtype), shards()
    found = []
    for made, optimizer in ((ours, build_optimizer(ours, settings)), (theirs, TorchAdamW(theirs))):
        train(made, optimizer)
        state = {f"{s.name}.{k}": t.clone() for s in made for k, t in optimizer.kept(s).items()}
        found.append(state | {s.name: s.local.detach().clone() for s in made})
    return found


def train(made: list[Shard], optimizer, steps=range(STEPS)) -> None:
    for step in steps:
        give_gradients(made, step)
        update(optimizer, 1e-2 / (1 + step), 4.0)


def test_fp32_is_torch_s_fused_adamw_bit_for_bit():
    ours, theirs = trained_beside_torch_s(config())
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())


@pytest.mark.parametrize("part", [1, 5, 2**22])
def test_the_plain_form_with_nothing_in_bf16_does_what_torch_s_does(monkeypatch, part):
    """Also in parts, of which the last may be shorter."""
    monkeypatch.setattr(plain, "CHUNK", part)
    monkeypatch.setattr(adamw, "fused_adamw", plain.plain_adamw)
    ours, theirs = trained_beside_torch_s(config())
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("dtypes", "weights", "moments"),  # how far both may be from those in fp32
    [
        ({"adam_dtype": "bfloat16"}, 2e-4, 1e-2),
        ({"param_dtype": "bfloat16"}, 1e-2, 5e-3),
        ({"adam_dtype": "bfloat16", "param_dtype": "bfloat16"}, 1e-2, 1e-2),
    ],
)
def test_bf16_storage_follows_fp32_within_its_rounding(dtypes, weights, moments):
    """bf16 has 8 significant bits: rounding to nearest is at most 2^-9 = 0.2 % off, at every update."""
    settings = config(**dtypes)
    found, expected = trained_beside_torch_s(settings, getattr(torch, settings.param_dtype))
    for name in ("matrix", "norm"):
        assert found[f"{name}.step"] == STEPS
        for key, dtype, bound in (
            (name, settings.param_dtype, weights),
            (f"{name}.exp_avg", settings.adam_dtype, moments),
            (f"{name}.exp_avg_sq", settings.adam_dtype, moments),
        ):
            assert str(found[key].dtype) == f"torch.{dtype}"
            close(found[key], expected[key], bound)


@pytest.mark.parametrize("dtypes", [{}, {"adam_dtype": "bfloat16"}, {"adam_dtype": "8bit"}])
@pytest.mark.parametrize("param_dtype", ["float32", "bfloat16"])
def test_the_record_names_the_optimizer_that_is_built(dtypes, param_dtype):
    keys = {"device": "cpu", "param_dtype": param_dtype, **dtypes}
    settings = TrainConfig(**{**TINY, **keys})
    built = build_optimizer(shards(getattr(torch, param_dtype)), settings)
    said = describe_optimizer(build_model(settings.model_config()), settings)["type"]
    form = built._form(torch.zeros(1))
    assert form is {adamw.FUSED: adamw.fused_adamw, adamw.PLAIN: plain.plain_adamw}[said]


STOCHASTIC = {"param_dtype": "bfloat16", "adam_dtype": "bfloat16", "weight_rounding": "stochastic"}


def test_a_second_moment_in_bf16_forgets_at_every_beta_that_is_allowed():
    """And would not at 0.999: the reason why that is refused."""

    def forgotten(beta2: float, **keys) -> float:
        made = shards()
        optimizer = build_optimizer(made, config(adam_dtype="bfloat16", beta2=beta2, **keys))
        train(made, optimizer, range(1))
        square = optimizer.kept(made[0])["exp_avg_sq"]
        before = square.float().clone()
        for _ in range(300):
            for shard in made:
                shard.local.grad = torch.zeros_like(shard.local)
            update(optimizer, 1e-2)
        return (square.float().sum() / before.sum()).item()

    assert forgotten(0.95) < 1e-6
    assert forgotten(0.99) < 0.1  # fp32: 0.05
    assert forgotten(0.999) == 1.0  # fp32: 0.74
    assert forgotten(0.999, weight_rounding="stochastic") == pytest.approx(0.74, rel=0.02)


@pytest.mark.parametrize("dtypes", [{"adam_dtype": "bfloat16"}, STOCHASTIC])
def test_the_step_is_all_tensor_work(monkeypatch, dtypes):
    """Also the rate's: if a value were read, a GPU would be waited for, and a graph would keep one rate."""
    made = shards(torch.bfloat16 if "param_dtype" in dtypes else torch.float32)
    optimizer = build_optimizer(made, config(**dtypes))
    give_gradients(made, 0)
    scalars = torch.tensor(1e-2), torch.tensor(4.0), torch.tensor(0.0)

    def refuse(*_):
        raise AssertionError("a tensor's value was read")

    for name in ("item", "tolist", "__bool__", "__float__", "__int__"):
        monkeypatch.setattr(torch.Tensor, name, refuse)
    optimizer.step(*scalars)


@pytest.fixture(autouse=True)
def kernel(monkeypatch):
    fake = types.SimpleNamespace(Scalars=Scalars, triton_adamw=plain_adamw)
    monkeypatch.setitem(sys.modules, "ops.triton_kernels.adamw", fake)
    return fake


@pytest.fixture
def triton(monkeypatch):
    found = types.ModuleType("triton")
    found.__spec__ = ModuleSpec("triton", None)
    monkeypatch.setitem(sys.modules, "triton", found)


def one_pass(optimizer: AdamW) -> AdamW:
    """The same, as a GPU would have it."""
    optimizer.on_gpu = optimizer.writes_copies = True
    return optimizer


# --- the update ---


def test_bias_corrections_are_those_of_doubles():
    """In fp32 the second would be 6e-5 off at the first step."""
    steps, betas = (1, 2, 1000), (0.9, 0.999)
    found = _bias_corrections(torch.tensor(steps, dtype=torch.float32), betas)
    expected = [1 - betas[0] ** n for n in steps], [(1 - betas[1] ** n) ** 0.5 for n in steps]
    for ours, wanted in zip(found, expected, strict=True):
        assert [each.item() for each in ours] == pytest.approx(wanted, rel=1e-7)


def test_each_weight_has_its_own_step_rate_decay_and_bias_correction():
    weights = [torch.nn.Parameter(torch.linspace(-1, 1, 12).view(shape)) for shape in ((12,), (4, 3))]
    others = [torch.nn.Parameter(weight.detach().clone()) for weight in weights]
    shards = [Shard(f"w{i}", weight, weight) for i, weight in enumerate(weights)]
    ours = one_pass(AdamW(shards, TrainConfig(beta2=0.999, weight_decay=0.1)))
    groups = [{"params": [weight], "weight_decay": 0.1 * i} for i, weight in enumerate(others)]
    theirs = torch.optim.AdamW(groups, betas=(0.9, 0.999))
    for i in range(6):
        for weight, other in zip(weights, others, strict=True):
            late = weight is weights[1] and i < 2  # its step is behind that of the other
            other.grad = None if late else torch.full_like(other, 10.0 ** (i % 3 - 1))
            weight.grad = None if late else 4 * other.grad
        ours.shards = [shard for shard in shards if shard.local.grad is not None]
        for group in theirs.param_groups:
            group["lr"] = 1e-2 / (1 + i)
        update(ours, 1e-2 / (1 + i), 4.0)
        theirs.step()
    for shard, other in zip(shards, others, strict=True):
        torch.testing.assert_close(shard.local, other, rtol=1e-6, atol=1e-8)
        for name, expected in theirs.state[other].items():
            torch.testing.assert_close(ours.kept(shard)[name], expected, rtol=1e-6, atol=1e-9)


# --- which optimizer a device has ---


class OnGpu(torch.nn.Parameter):
    is_cuda = True


def gpu_shards(dtype=torch.float32) -> list[Shard]:
    """Of parameters that say that they are on a GPU."""
    locals_ = [OnGpu(torch.ones(shape, dtype=dtype)) for shape in ((3, 2), (3,))]
    return [Shard(f"w{i}", local, local) for i, local in enumerate(locals_)]


@pytest.mark.parametrize("adam_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("param_dtype", ["float32", "bfloat16"])
def test_a_gpu_s_optimizer_keeps_what_a_cpu_s_keeps(triton, param_dtype, adam_dtype):
    """The same names and dtypes in every combination: so their checkpoints are interchangeable."""
    config = TrainConfig(param_dtype=param_dtype, adam_dtype=adam_dtype)
    dtype = DTYPES[param_dtype]
    on_cpu = [Shard(s.name, s.local, torch.nn.Parameter(s.local.data)) for s in gpu_shards(dtype)]
    kept = []
    for shards in (gpu_shards(dtype), on_cpu):
        optimizer = build_optimizer(shards, config)
        assert optimizer.writes_copies == (shards is not on_cpu)
        states = [optimizer.kept(shard) for shard in shards]
        kept.append([{name: (t.dtype, t.shape) for name, t in state.items()} for state in states])
    assert kept[0] == kept[1]


def test_a_gpu_without_triton_is_an_error_that_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(UserError, match="needs Triton.*not installed.*reinstall torch"):
        build_optimizer(gpu_shards(), TrainConfig())


# --- stochastic rounding ---


def test_the_kernel_gets_each_weights_key_place_and_count_of_updates(triton, kernel):
    """A skipped update does not count, so the next one draws the bits that were due."""
    calls = []
    kernel.triton_adamw = lambda weight, *others: calls.append((weight, others[4].step.item(), others[-1]))
    shards = [replace(shard, start=24) for shard in gpu_shards(torch.bfloat16)]
    config = TrainConfig(param_dtype="bfloat16", weight_rounding="stochastic")
    optimizer = build_optimizer(shards, config)
    for shard in shards:
        shard.local.grad = torch.ones_like(shard.local)
    for found_inf in (0.0, 0.0, 1.0, 0.0):
        update(optimizer, found_inf=found_inf)
    assert [step for _, step, _ in calls] == [1, 1, 2, 2, 2, 2, 3, 3]
    (first, _, (key, start)), (second, _, (other, other_start)) = calls[:2]
    assert first is shards[0].local and second is shards[1].local and start == other_start == 24
    assert (key[3], other[3]) == (WEIGHTS, WEIGHTS + 1) and key[0] == other[0] >= 0
    update(build_optimizer(shards, replace(config, weight_rounding="nearest")))
    assert [rounding for *_, rounding in calls[-2:]] == [None, None]


# --- working copies ---


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return make_dataset(tmp_path_factory.mktemp("adamw") / "tokens", train_tokens=20_000)


def assert_copies_are_the_rounded_weights(shards: list[Shard]) -> None:
    for shard in shards:
        if shard.working_copy is not None:
            rounded = shard.local.detach().to(shard.working_copy.dtype)
            assert torch.equal(shard.working_copy, rounded), shard.name


@pytest.mark.parametrize("dtypes", [("bfloat16", "float32"), ("float32", "bfloat16"), ("float32", "float32")])
def test_the_update_writes_the_copies_and_publish_copies_only_after_loading(dataset, monkeypatch, dtypes):
    keys = {"dtype": dtypes[0], "param_dtype": dtypes[1]}
    parts, reference = (build(dataset, **keys) for _ in range(2))
    shards, counts = parts.state.strategy.shards, []
    for each in (parts, reference):
        copy = mock.Mock(wraps=each.state.strategy._copy_back)  # working copies from the optimizer's weights
        monkeypatch.setattr(each.state.strategy, "_copy_back", copy)
        counts.append(copy)
    one_pass(parts.step.optimizer)
    for i in range(4):
        batch = parts.loader.next()
        loss, expected = (p.step(*batch, 1e-2 / (1 + i)).loss for p in (parts, reference))
        assert abs(loss - expected) < (1e-2 if "bfloat16" in dtypes else 1e-5), i
        assert_copies_are_the_rounded_weights(shards)
    assert [copy.call_count for copy in counts] == [0, 4]
    for shard in shards:
        shard.local.data.add_(0.5)  # as a checkpoint that is loaded
    parts.state.after_load({})
    assert counts[0].call_count == 1
    assert_copies_are_the_rounded_weights(shards)
    model = parts.state.strategy.module
    for shard, parameter in zip(shards, model.parameters(), strict=True):
        assert torch.equal(parameter, shard.local.to(parameter.dtype))


@pytest.fixture(params=[0, 1])
def world(request):
    """One of two ranks; the other one is imagined."""
    dist.init_process_group("fake", store=FakeStore(), rank=request.param, world_size=2)
    yield World(request.param, request.param, 2, torch.device("cpu"), local_size=2)
    dist.destroy_process_group()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("use_zero1", [True, False])
def test_a_working_copy_is_the_memory_that_the_model_computes_with(world, use_zero1, dtype):
    """With ZeRO-1 that is this rank's rows, also if they are fewer and if both dtypes are fp32."""
    config = TrainConfig(**{**TINY, "vocab_size": 65, "dtype": dtype, "use_zero1": use_zero1})
    model = model_builder.build_model(config.model_config(), dtype=DTYPES[dtype]).init_weights("cpu", 0)
    strategy = parallelize(model, config, world)
    optimizer = one_pass(build_optimizer(strategy.shards, config))
    for shard in strategy.shards:
        has_copy = shard.is_matrix and (use_zero1 or dtype == "bfloat16")
        assert (shard.working_copy is not None) == has_copy, shard.name
        shard.local.grad = torch.ones_like(shard.local)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    update(optimizer)
    assert_copies_are_the_rounded_weights(strategy.shards)
    for shard in strategy.shards:
        changed = (shard.parameter != before[shard.name]).flatten(1 if shard.is_matrix else 0).any(-1)
        rows = -(-len(shard.parameter) // 2)
        mine = slice(world.rank * rows, (world.rank + 1) * rows)
        if shard.is_matrix and use_zero1:
            assert changed[mine].all() and changed.sum() == len(shard.local), shard.name
        else:
            assert changed.all(), shard.name


# --- the norm ---


def test_norms_of_millions_of_gradients_and_of_a_whole_bucket_are_those_of_doubles():
    """One after another, fp32 squares would be 1e-4 off at 5 million. Neither the rows that pad a matrix in a
    bucket count, nor the loss behind the gradients."""
    gradient = torch.full((5_000_000,), 0.1)
    exact = gradient[0].item() * 5_000_000**0.5
    assert norms([gradient]).item() == pytest.approx(exact, rel=1e-9)
    assert norm([gradient]).item() == pytest.approx(exact, rel=1e-7)
    grads = {"a": torch.randn(65, 3), "b": torch.randn(7, 5), "c": torch.randn(5)}
    parameters = {name: torch.nn.Parameter(torch.zeros_like(grad)) for name, grad in grads.items()}
    bucket = Bucket(parameters, 4, torch.device("cpu"))
    bucket.loss.fill_(100.0)
    for name, grad in grads.items():
        bucket.views[name][: len(grad)].add_(grad)
    assert len(bucket.views["a"]) == 68
    expected = torch.cat([grad.flatten() for grad in grads.values()]).double().norm()
    assert norm(bucket.gradients).item() == pytest.approx(expected.item(), rel=1e-7)
