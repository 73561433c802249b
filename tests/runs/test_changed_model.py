"""A model that somebody changes trains right, as CONTRIBUTING.md's examples do, or is refused by name."""

from types import ModuleType

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.changed_models import (
    EXAMPLES,
    FROZEN,
    HEAD,
    IN_TRAINING,
    NUMBER,
    OTHERS,
    SHARED,
    TABLE,
    TORCHS,
    changed,
    edited,
    train_changed,
)
from support.graphed_runs import build
from support.helpers import ROOT, TINY, checkpoint_tensors, last_run, make_dataset
from torch.testing._internal.distributed.fake_pg import FakeStore

from common.errors import UserError
from generation.source import compute_in
from model import Head
from training.configuration.keys import TrainConfig
from training.optimization.optimizer import build_optimizer
from training.process.world import ALONE, World
from training.strategies.parallelize import parallelize

SHAPE = (4, 2, 32)  # micro-steps of two sequences


def plain_loss(self, x, delta, targets=None, gradient_scale=None):
    logits = self.lm_head(self.normed(x, delta))
    return logits if targets is None else F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def gradients(dataset, tokens, micro_steps, **keys):
    """The loss and every gradient of one step, before clipping, without the loss scale."""
    parts = build(dataset, gradient_accumulation_steps=micro_steps, packing="truncate", **keys)
    found = {}

    def reduce(loss, reduce=parts.state.strategy.reduce_gradients):
        reduce(loss)
        scale = parts.state.loss_scale.scale
        found.update({s.name: s.local.grad.float() / scale for s in parts.state.strategy.shards})

    parts.step.strategy.reduce_gradients = reduce
    x, y = (part.reshape(micro_steps, -1, part.shape[-1]) for part in tokens)
    return parts.step(x, y, 1e-3).loss, found


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return make_dataset(tmp_path_factory.mktemp("data"), eot_id=0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("micro_steps", [1, 4])
@pytest.mark.parametrize("padded", [False, True])
def test_a_loss_that_somebody_replaces_gives_the_gradients_of_ours(
    dataset, monkeypatch, dtype, micro_steps, padded
):
    """Whatever scales them: micro-steps, the loss scale of float16, the share of a micro-batch's targets."""
    x = torch.randint(0, 64, SHAPE, generator=torch.Generator().manual_seed(0))
    y = x.roll(-1, -1)
    if padded:  # other numbers of targets in each micro-step, in the third one none
        y = torch.where(torch.arange(32) < torch.tensor([32, 7, 0, 20])[:, None, None], y, -100)
    ours = gradients(dataset, (x, y), micro_steps, dtype=dtype)
    monkeypatch.setattr(Head, "forward", plain_loss)
    theirs = gradients(dataset, (x, y), micro_steps, dtype=dtype)
    tolerance = 1e-4 if dtype == "float32" else 0.03
    assert theirs[0] == pytest.approx(ours[0].item(), rel=1e-3)
    for name, gradient in ours[1].items():
        assert (theirs[1][name] - gradient).norm() <= tolerance * gradient.norm(), name


def model_of(text: str, **keys):
    module = ModuleType("changed_model")
    exec(compile(text, "model.py", "exec"), module.__dict__)
    config = TrainConfig(**{**TINY, **keys})
    return module.Transformer(config.model_config()).init_weights("cpu", config.seed)


@pytest.fixture(scope="module")
def runs(dataset, tmp_path_factory):
    settings = {**TINY, "dataset": dataset, "max_iters": 8, "grad_clip": 0.5, "weight_decay": 0.1}
    return train_changed(tmp_path_factory.mktemp("changed"), [*EXAMPLES, *OTHERS], settings)


@pytest.mark.parametrize("name", [*EXAMPLES, *OTHERS])
def test_a_changed_model_trains_alike_under_every_strategy_and_division(runs, name):
    found = {}
    for (model, *division), out in runs.items():
        if model == name:
            rows = last_run(out)["training_iterations"]
            found[tuple(division)] = [(row["loss"], row["gradients"]["global_norm"]) for row in rows]
    expected = found["alone", 8]
    assert len(found) >= 4 and expected[-1][0] < expected[0][0] - 0.05
    for division, figures in found.items():
        for pair, wanted in zip(figures, expected, strict=True):
            assert pair == pytest.approx(wanted, rel=0.02 if name == TORCHS else 2e-4), division


@pytest.mark.parametrize(
    ("name", "weight", "trains"),
    [
        (FROZEN, "embed.weight", False),
        (TABLE, "table.weight", True),
        (TORCHS, "blocks.1.extra.weight", True),
        (TORCHS, "blocks.1.extra.bias", True),
        (NUMBER, "blocks.1.gate", True),
    ],
)
def test_a_parameter_trains_whatever_it_belongs_to_unless_it_is_frozen(runs, name, weight, trains):
    text = edited(OTHERS[name]) if name in OTHERS else changed(name)
    first = model_of(text).get_parameter(weight).detach()
    for key, out in runs.items():
        if key[0] == name:
            now = checkpoint_tensors(out / "checkpoints" / "step-00000008")[f"model.{weight}"]
            assert torch.equal(now, first) != trains, key


@pytest.mark.parametrize(
    ("edits", "named"),
    [
        (OTHERS[NUMBER], "blocks.0.gate has the shape"),
        ([(HEAD, SHARED)], "blocks.1.ffn.up.weight and blocks.0.ffn.up.weight are one parameter"),
    ],
)
def test_fsdp_refuses_by_name_what_it_cannot_shard(edits, named):
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        config = TrainConfig(**{**TINY, "use_fsdp": True})
        with pytest.raises(UserError, match=named):
            parallelize(model_of(edited(edits)), config, World(0, 0, 2, torch.device("cpu"), local_size=2))
    finally:
        dist.destroy_process_group()


REFUSED = {  # what no strategy can train -> the change
    "buffers average would have no value": lambda model: model.register_buffer("average", torch.zeros(4)),
    "every parameter of the model is frozen": lambda model: model.requires_grad_(False),
}


@pytest.mark.parametrize("named", REFUSED)
def test_a_model_that_no_strategy_can_train_is_refused(named):
    model = model_of(edited([]))
    REFUSED[named](model)
    with pytest.raises(UserError, match=named):
        parallelize(model, TrainConfig(**TINY), ALONE)


def test_a_model_with_layers_of_torch_makes_text_in_bfloat16():
    model = model_of(edited(OTHERS[TORCHS]))
    compute_in(model, "bfloat16")
    assert model(torch.arange(8)[None]).dtype == torch.bfloat16


def test_muon_refuses_blocks_that_are_frozen():
    model = model_of(edited([]))
    model.blocks.requires_grad_(False)
    config = TrainConfig(**{**TINY, "optimizer": "muon"})
    with pytest.raises(UserError, match="is frozen; use --optimizer=adamw"):
        build_optimizer(parallelize(model, config, ALONE).shards, config)


def test_each_change_in_contributing_changes_the_loss(dataset, tmp_path):
    """Or the tests above would pass without it."""
    x = torch.randint(0, 64, (2, 32), generator=torch.Generator().manual_seed(0))
    for example, keys in EXAMPLES.items():
        losses = []
        for text in ((ROOT / "model.py").read_text(), changed(example)):
            model = model_of(text, **keys)
            with torch.no_grad():
                model.head.lm_head.weight.mul_(40)  # logits that a cap of 30 changes
            losses.append([model.train(mode)(x, x.roll(-1, -1)).item() for mode in (True, False)])
        (plain, plain_eval), (other, other_eval) = losses
        assert plain == plain_eval and (other != plain) == (example != FROZEN), example
        same = other_eval == pytest.approx(plain_eval, rel=1e-6)
        assert same == (example in (*IN_TRAINING, FROZEN)), example
