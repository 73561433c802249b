"""The optimizer: torch's own where everything is fp32, its arithmetic where weights or moments are bf16."""

import pytest
import torch
from support.helpers import TINY
from support.tensors import close
from support.updates import update

from model_builder import build_model
from ops.quantization import adamw as plain
from training.configuration.keys import TrainConfig
from training.optimization import adamw
from training.optimization.optimizer import build_optimizer, describe_optimizer
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
    found = []
    for made, build in (
        (shards(dtype), lambda made: build_optimizer(made, settings)),
        (shards(), TorchAdamW),
    ):
        optimizer = build(made)
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


def test_the_norm_of_millions_of_gradients_is_that_of_doubles():
    """One after another, fp32 squares would be 1e-4 off at 5 million."""
    gradient = torch.full((5_000_000,), 0.1)
    exact = gradient[0].item() * 5_000_000**0.5
    assert norms([gradient]).item() == pytest.approx(exact, rel=1e-9)
    assert norm([gradient]).item() == pytest.approx(exact, rel=1e-7)
