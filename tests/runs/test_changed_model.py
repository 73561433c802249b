"""A model that somebody changes trains right, as CONTRIBUTING.md's examples do, or is refused by name."""

import re
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.graphed_runs import build
from support.helpers import (
    ROOT,
    TINY,
    checkpoint_tensors,
    last_run,
    make_dataset,
    run_in_one_launch,
    write_config,
)
from torch.testing._internal.distributed.fake_pg import FakeStore

from common.errors import UserError
from model import Head
from training.configuration.keys import TrainConfig
from training.process.world import World
from training.strategies.parallelize import parallelize

STRATEGIES = {"ddp": [], "zero1": ["--use_zero1=True"], "fsdp": ["--use_fsdp=True"]}
DIVISIONS = [(2, 2), (4, 1)]  # of 8 sequences between two processes: batch_size, gradient_accumulation_steps
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
IN_TRAINING = ("auxiliary loss", "beside the fused loss")  # what an evaluation does not see
FROZEN, TABLE = "frozen embedding", "matrix of any class"
EXAMPLES = {
    "cap on the logits": {},
    "activation, squared": MLP,
    **dict.fromkeys((*IN_TRAINING, FROZEN, TABLE, "each block twice"), {}),
}
# other changes: edits of model.py
MADE = "        self.ffn_norm, self.ffn = make_norm(config), FeedForward(config)\n"
END = "        return x, drop(self.ffn(normed), self.dropout)\n"
SUM = "        out, amax = drop(self.ffn(normed), self.dropout)\n        return x, (out + {}, amax)\n"
LOWER = "        delta = no_delta(x)\n"
SHARED = "        self.head, self.blocks[1].ffn = Head(config), self.blocks[0].ffn\n"
TORCHS = "a matrix and a bias of torch's, in bfloat16"
NUMBER, LAYER = "a number in each block", "an upper block's layer in a lower one, too"
OTHERS = {
    TORCHS: [
        (MADE, MADE + "        self.extra = nn.Linear(config.n_embd, config.n_embd)\n"),
        (END, SUM.format("self.extra(x)")),
    ],
    NUMBER: [
        (MADE, MADE + "        self.gate = nn.Parameter(torch.empty(()))\n"),
        (END, SUM.format("x * self.gate")),
    ],
    LAYER: [(LOWER, "        delta = self.blocks[1].ffn(self.blocks[1].ffn_norm.add(x, no_delta(x))[1])\n")],
    "a norm that is not used": [
        ("        x, normed = self.ffn_norm.add(x, delta)\n", "        x = x + delta[0]\n")
    ],
}


def edited(edits) -> str:
    text = (ROOT / "model.py").read_text()
    for old, new in edits:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


def model_of(text: str, **keys):
    module = ModuleType("changed_model")
    exec(compile(text, "model.py", "exec"), module.__dict__)
    config = TrainConfig(**{**TINY, **keys})
    return module.Transformer(config.model_config()).init_weights("cpu", config.seed)


@pytest.fixture(scope="module")
def runs(dataset, tmp_path_factory):
    """{(model, strategy, batch_size): out_dir}, of runs with the same 8 sequences in each iteration."""
    models = {example: (changed(example), keys) for example, keys in EXAMPLES.items()}
    models |= {name: (edited(edits), {}) for name, edits in OTHERS.items()}
    models[TORCHS] = edited(OTHERS[TORCHS]), {"dtype": "bfloat16"}
    commands = {}
    for name, (text, keys) in models.items():
        folder = tmp_path_factory.mktemp("changed")
        (folder / "model.py").write_text(text)
        settings = {**TINY, **keys, "dataset": dataset, "max_iters": 8, "grad_clip": 0.5, "weight_decay": 0.1}
        write_config(folder / "run.py", **settings)
        for strategy, flags in {"alone": [], **STRATEGIES}.items():
            for batch, steps in [(8, 1), (2, 4)] if strategy == "alone" else DIVISIONS:
                sizes = f"--batch_size={batch}", f"--gradient_accumulation_steps={steps}"
                out = folder / f"{strategy}-{batch}"
                command = [folder / "model.py", folder / "run.py", *flags, *sizes, f"--out_dir={out}"]
                if strategy != "fsdp" or name not in (NUMBER, LAYER):
                    commands[name, strategy, batch] = command
                if name in (FROZEN, NUMBER) and (strategy, batch) == ("zero1", 2):
                    commands[name, "half", batch] = [*command, f"--out_dir={out}-halves", "--max_iters=4"]
                    commands[name, "both halves", batch] = [*commands[name, "half", batch][:-1], RESUME]
    worker = "tests/support/changed_model_worker.py"
    for processes in (1, 2):
        group = [command for key, command in commands.items() if (key[1] == "alone") == (processes == 1)]
        run_in_one_launch(tmp_path_factory.mktemp("launch"), group, processes, worker=worker)
    return {key: out_dir(command) for key, command in commands.items() if key[1] != "half"}


RESUME = "--init_from=resume"


def out_dir(command) -> Path:
    return [Path(flag.removeprefix("--out_dir=")) for flag in command[2:] if flag.startswith("--out_dir")][-1]


@pytest.mark.parametrize("name", [*EXAMPLES, *OTHERS])
def test_a_changed_model_trains_alike_under_every_strategy_and_division(runs, name):
    found = {}
    for (model, *division), out in runs.items():
        if model == name:
            rows = last_run(out)["training_iterations"]
            found[tuple(division)] = [(row["loss"], row["gradients"]["global_norm"]) for row in rows]
    expected = found["alone", 8]
    assert len(found) >= 6 and expected[-1][0] < expected[0][0] - 0.05
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
        (
            [("        self.head = Head(config)\n", SHARED)],
            "blocks.1.ffn.up.weight and blocks.0.ffn.up.weight are one parameter",
        ),
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


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (
            lambda model: model.register_buffer("average", torch.zeros(4)),
            "buffers average would have no value",
        ),
        (lambda model: model.requires_grad_(False), "every parameter of the model is frozen"),
    ],
)
def test_a_model_that_no_strategy_can_train_is_refused(change, named):
    model = model_of(edited([]))
    change(model)
    with pytest.raises(UserError, match=named):
        parallelize(model, TrainConfig(**TINY), World(0, 0, 1, torch.device("cpu")))


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
