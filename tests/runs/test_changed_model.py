"""A model that somebody changes trains right: a loss, an activation, an auxiliary loss."""

import re
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from support.graphed_runs import build
from support.helpers import ROOT, TINY, last_run, make_dataset, run_in_one_launch, write_config

from model import Head
from training.configuration.keys import TrainConfig

STRATEGIES = {"ddp": [], "zero1": ["--use_zero1=True"], "fsdp": ["--use_fsdp=True"]}
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


def changed(example: str) -> str:
    """model.py with the part of CONTRIBUTING.md's diff whose heading has `example`."""
    (block,) = re.findall(r"```diff\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL)
    parts = re.split(r"^\+\+\+ model.py: (.*)\n", block, flags=re.MULTILINE)[1:]
    (diff,) = (diff for title, diff in zip(parts[::2], parts[1::2], strict=True) if example in title)
    text = (ROOT / "model.py").read_text()
    for removed, added in re.findall(r"((?:^-.*\n)*)((?:^\+.*\n)*)", diff, re.MULTILINE):
        if removed:
            old, new = (re.sub(r"^.", "", lines, flags=re.MULTILINE) for lines in (removed, added))
            assert text.count(old) == 1, old
            text = text.replace(old, new)
    return text


MLP = {"ffn_type": "mlp", "activation": "gelu"}
EXAMPLES = [("cap on the logits", {}), ("activation", MLP), ("auxiliary loss", {})]


@pytest.mark.parametrize(("example", "keys"), EXAMPLES)
def test_each_change_in_contributing_trains_alike_under_every_strategy(
    dataset, tmp_path, monkeypatch, example, keys
):
    (tmp_path / "model.py").write_text(changed(example))
    monkeypatch.setenv("CHANGED_MODEL", str(tmp_path / "model.py"))
    settings = {**TINY, **keys, "dataset": dataset, "max_iters": 8, "grad_clip": 0.5}
    write_config(tmp_path / "run.py", **settings)
    commands = {name: [tmp_path / "run.py", "--batch_size=2", *flags] for name, flags in STRATEGIES.items()}
    alone = {"alone": [tmp_path / "run.py", "--gradient_accumulation_steps=2", "--batch_size=2"]}
    losses = {}
    for processes, group in ((2, commands), (1, alone)):
        group = {name: [*command, f"--out_dir={tmp_path / name}"] for name, command in group.items()}
        worker = "tests/support/changed_model_worker.py"
        run_in_one_launch(tmp_path, list(group.values()), processes, worker=worker)
        for name in group:
            rows = last_run(tmp_path / name)["training_iterations"]
            losses[name] = [(row["loss"], row["gradients"]["global_norm"]) for row in rows]
    for name, found in losses.items():
        assert found[-1][0] < found[0][0] - 0.1
        for pair, expected in zip(found, losses["alone"], strict=True):
            assert pair == pytest.approx(expected, rel=2e-4), name


def test_each_change_in_contributing_changes_the_loss(dataset, tmp_path):
    """Or the test above would pass without it."""
    x = torch.randint(0, 64, (2, 32), generator=torch.Generator().manual_seed(0))
    for example, keys in EXAMPLES:
        losses = []
        for text in ((ROOT / "model.py").read_text(), changed(example)):
            module = ModuleType("changed_model")
            exec(compile(text, "model.py", "exec"), module.__dict__)
            model = module.Transformer(TrainConfig(**TINY, **keys).model_config()).init_weights("cpu", 1)
            with torch.no_grad():
                model.head.lm_head.weight.mul_(40)  # logits that a cap of 30 changes
            losses.append([model.train(mode)(x, x.roll(-1, -1)).item() for mode in (True, False)])
        (plain, plain_eval), (other, other_eval) = losses
        assert plain == plain_eval and other != plain, example
        assert (other_eval == pytest.approx(plain_eval, rel=1e-6)) == (example == "auxiliary loss"), example
