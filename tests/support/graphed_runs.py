"""The parts of a run as train.py assembles them, with eager steps, a fake of CUDA Graphs, or real ones."""

import contextlib
from collections import namedtuple
from dataclasses import asdict

import torch
from support.helpers import TINY

import model_builder
from model import manual_attention
from training.batches.loader import Loader
from training.batches.sources import make_windows, open_sources
from training.checkpoints.train_state import TrainState
from training.configuration.dtypes import DTYPES
from training.configuration.files_and_flags import load_config
from training.configuration.keys import TrainConfig
from training.cuda_graphs.capture import CudaGraphs
from training.cuda_graphs.graphed_step import GraphedStep
from training.optimization.compile import compile_and_checkpoint
from training.optimization.low_precision import use_recipe as use_low_precision
from training.optimization.optimizer import build_optimizer
from training.optimization.precision import LossScale
from training.optimization.step import EagerStep
from training.optimization.update_guard import UpdateGuard
from training.process.world import World
from training.strategies.parallelize import parallelize

ITERATIONS = 24


SUMS = (0, 4, 16, 20)  # iterations whose gradients are summed


# every kernel adds in a fixed order here, so that runs can be compared bit for bit
ON_GPU = {
    "device": "cuda",
    "dtype": "bfloat16",
    "n_embd": 128,
    "d_ff": 256,
    "block_size": 64,
    "num_key_value_heads": 4,
}


Parts = namedtuple("Parts", "step state loader windows config")


def build(dataset, world: World | None = None, **keys) -> Parts:
    """The parts of a run as train.py assembles them, always from the same first state. Without a world, of
    one process."""
    config = TrainConfig(**{**TINY, "dataset": str(dataset), **keys})
    alone = World(0, 0, 1, torch.device("cuda", 0) if config.device == "cuda" else torch.device("cpu"))
    world = world or alone
    dtype = DTYPES[config.dtype]
    model = model_builder.build_model(config.model_config(), manual_attention, dtype)
    model.init_weights(world.device, seed=1)
    recipe = use_low_precision(model, config, world)
    model.head.loss_chunks = config.logit_parts
    compile_and_checkpoint(model, config)
    strategy = parallelize(model, config, world)
    optimizer = build_optimizer(strategy.shards, config, strategy.row_group)
    loss_scale = LossScale(config.dtype == "float16", world.device)
    guard = UpdateGuard(config, world.device)
    step = EagerStep(strategy, optimizer, loss_scale, config, guard, recipe)
    torch.manual_seed(7)
    state = TrainState(strategy, optimizer, loss_scale, world, guard, recipe)
    windows = make_windows(open_sources(config, scan=False), config)
    return Parts(step, state, Loader(windows["train"], config, world), windows, config)


def build_run(argv: list[str], world: World) -> Parts:
    """The same, of a config file and flags."""
    keys = asdict(load_config(argv, world.size))
    return build(keys.pop("dataset"), world, **keys)


def rate(iteration: int) -> float:
    """Far from constant: a rate that a capture had frozen would be seen at once."""
    return 1e-2 / (1 + iteration % 4)


def train(parts: Parts, step=None, iterations=range(ITERATIONS), sums=SUMS) -> list[tuple]:
    """The StepResult of every iteration, as numbers, without the time; its gradient sum may be None."""
    results = [(step or parts.step)(*parts.loader.next(), rate(i), i in sums) for i in iterations]
    assert all(result.optimizer_ms > 0 for result in results)
    numbers = [result._asdict().items() for result in results]
    return [
        tuple(None if value is None else value.item() for name, value in items if name != "optimizer_ms")
        for items in numbers
    ]


def weights(parts: Parts) -> list[torch.Tensor]:
    """The weights and moments that this rank updates."""
    return [tensor.clone() for tensor in parts.state.tensors().values()]


def same(these: list[torch.Tensor], those: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(these, those, strict=True))


class Fake:
    """In place of CUDA. A capture is the step itself, run at each replay; `spoil` makes a bad one of it."""

    def __init__(self, spoil=lambda run, fake: run, waits=()):
        self.spoil, self.waits = spoil, list(waits)
        self.captures, self.closed = 0, False

    def check(self):
        pass

    def eager(self, run):
        return run()

    def eager_with_waits(self, run):
        return run(), self.waits

    def capture(self, run):
        self.captures += 1
        return self.spoil(run, self)

    def close(self):
        self.closed = True


def graphed(parts: Parts, fake: Fake, step=None, paused=contextlib.nullcontext, start=0) -> GraphedStep:
    fake.step = GraphedStep(step or parts.step, parts.state, fake, paused, start)
    return fake.step


def captured(parts: Parts, step=None, start=0) -> GraphedStep:
    graphs = CudaGraphs()
    return GraphedStep(step or parts.step, parts.state, graphs, contextlib.nullcontext, start)
