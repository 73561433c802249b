"""A batch is a function of (seed, epoch, position). GPUs and workers change who reads it, not what it is."""

import dataclasses
import json
import multiprocessing

import numpy as np
import pytest
import torch
from support.helpers import TINY, make_dataset

from common.errors import RunError
from training.batches.dataset import open_dataset
from training.batches.loader import IterationBatches, Loader
from training.batches.windows import StreamWindows, epoch_offset, permute
from training.configuration.keys import TrainConfig
from training.evaluation import eval_batches, evaluate
from training.process.world import World

T = TINY["block_size"]
CONFIG = TrainConfig(**{**TINY, "batch_size": 2, "eval_batch_size": 2, "gradient_accumulation_steps": 4})
GLOBAL_BATCH = CONFIG.samples_per_iter(1)  # 8 samples an iteration, at every world size below


@pytest.fixture(scope="module")
def windows(tmp_path_factory):
    """100 windows of T tokens and the token after them, 4 tokens left over."""
    folder = make_dataset(tmp_path_factory.mktemp("tokens"), train_tokens=100 * T + 5)
    config = dataclasses.replace(CONFIG, dataset=str(folder), eval_interval=0)
    return StreamWindows(open_dataset(config, scan=False)[0]["train"], T)


def world(rank: int = 0, size: int = 1) -> World:
    return World(rank, rank, size, torch.device("cpu"))


def with_world_size(size: int, **keys) -> TrainConfig:
    """The same global batch on `size` GPUs."""
    return dataclasses.replace(CONFIG, gradient_accumulation_steps=4 // size, **keys)


def indices_at(batches: IterationBatches, position: int) -> np.ndarray:
    """(A, B) window indices of the iteration that starts at `position`."""
    numbers = batches.numbers_at(position)
    return batches.windows.places(numbers, batches.seed)[0]


def global_order(windows, size: int, position: int = 0, iterations: int = 1) -> list[int]:
    """Window indices in the order of their global sample numbers: micro-step by micro-step, rank by rank."""
    order = []
    for at in range(position, position + iterations * GLOBAL_BATCH, GLOBAL_BATCH):
        batches = [
            IterationBatches(windows, with_world_size(size), world(rank, size)) for rank in range(size)
        ]
        order += np.stack([indices_at(each, at) for each in batches], axis=1).ravel().tolist()  # (A, W, B)
    return order


# --- the permutation ---


@pytest.mark.parametrize("n", [*range(1, 70), 127, 128, 129, 1000, 4095, 4096, 4097, 65_537, 100_003])
def test_permutation_sends_every_index_to_its_own_place(n):
    permuted = permute(np.arange(n), n, seed=n)
    assert permuted.dtype == np.int64
    assert np.array_equal(np.sort(permuted), np.arange(n))
    huge = 10**12 + n  # needs no memory
    assert 0 <= permute(np.array([huge - 1]), huge, seed=0)[0] < huge


# --- windows ---


def test_windows_do_not_overlap_but_for_the_last_target(windows):
    assert windows.count == 100
    rows = windows.read(np.arange(windows.count))
    assert rows.shape == (100, T + 1) and rows.dtype == np.int64
    tokens = windows.tokens.read(0, 100 * T + 1)
    assert np.array_equal(rows[:, :-1].ravel(), tokens[:-1])
    assert np.array_equal(rows[:, -1], tokens[T::T])


# --- who gets which ---


def test_order_is_that_of_checkpoints_that_exist(windows):
    assert windows.places(np.arange(8), 1337)[0].tolist() == [77, 36, 14, 72, 53, 87, 4, 59]
    assert windows.places(np.arange(100, 108), 1337)[0].tolist() == [90, 26, 1, 18, 62, 80, 21, 60]
    assert epoch_offset(np.arange(4), T).tolist() == [0, 19, 6, 25]


def test_batch_larger_than_the_dataset_takes_every_window_equally_often(windows):
    config = dataclasses.replace(CONFIG, batch_size=300, gradient_accumulation_steps=1)
    indices = indices_at(IterationBatches(windows, config, world()), 0)
    assert np.bincount(indices.ravel(), minlength=100).tolist() == [3] * 100


# --- the loader ---


@pytest.mark.parametrize("error", [ConnectionResetError(104, "reset"), EOFError()])
def test_a_worker_that_is_killed_while_it_hands_over_a_batch_is_one_message(windows, monkeypatch, error):
    monkeypatch.setattr("training.batches.loader.SIGNAL_SECONDS", 0)

    def broken():
        raise error
        yield

    loader = Loader(windows, CONFIG, world())
    loader.source = broken()
    with pytest.raises(RunError, match="DataLoader worker has ended .*--dataloader_num_workers"):
        loader.next()


def test_y_is_x_one_token_later(windows):
    loader = Loader(windows, CONFIG, world())
    x, y = loader.next()
    assert x.shape == y.shape == (4, 2, T) and x.dtype == y.dtype == torch.int64
    assert torch.equal(x[..., 1:], y[..., :-1])
    indices = indices_at(loader.batches, 0)
    rows = windows.read(indices.ravel()).reshape(4, 2, T + 1)
    assert np.array_equal(x, rows[..., :-1]) and np.array_equal(y, rows[..., 1:])


def batches(windows, config, count, world=world(), position=0):  # noqa: B008 - World is frozen
    loader = Loader(windows, config, world, position)
    taken = [loader.next() for _ in range(count)]
    loader.close()
    return taken


def assert_same(one, other):
    assert len(one) == len(other)
    for (x, y), (other_x, other_y) in zip(one, other, strict=True):
        assert torch.equal(x, other_x) and torch.equal(y, other_y)


def test_resume_continues_exactly_where_the_run_stopped(windows):
    whole = batches(windows, CONFIG, 16)
    for stopped in (1, 5, 12, 13):  # the epoch ends inside iteration 12
        rest = batches(windows, CONFIG, 16 - stopped, position=stopped * GLOBAL_BATCH)
        assert_same(rest, whole[stopped:])
    # with another global batch no sample is left out
    config = dataclasses.replace(CONFIG, batch_size=3, gradient_accumulation_steps=1)
    dataset = IterationBatches(windows, config, world())
    after = [i for step in range(20) for i in indices_at(dataset, 40 + 3 * step).ravel().tolist()]
    assert sorted(global_order(windows, 1, iterations=5) + after) == list(range(100))


@pytest.mark.parametrize("rank, size, position", [(0, 1, 0), (1, 2, 96)])
@pytest.mark.parametrize("workers", [0, 1, 3, 4])
@pytest.mark.data_order
def test_workers_hand_out_the_same_batches(windows, rank, size, position, workers):
    inline = with_world_size(size)
    with_workers = with_world_size(size, use_dataloader=True, dataloader_num_workers=workers)
    taken = (batches(windows, config, 14, world(rank, size), position) for config in (with_workers, inline))
    assert_same(*taken)


def test_workers_end_with_the_loader_and_leave_the_random_numbers_of_the_model_alone(windows):
    before, state = set(multiprocessing.active_children()), torch.get_rng_state()
    loader = Loader(windows, dataclasses.replace(CONFIG, use_dataloader=True), world())
    loader.next()
    assert len(set(multiprocessing.active_children()) - before) == 2
    loader.close()
    assert set(multiprocessing.active_children()) <= before
    assert torch.equal(torch.get_rng_state(), state)


# --- evaluation ---


def test_evaluation_repeats_no_window_is_the_same_every_time_and_takes_what_a_small_split_has(windows):
    config = dataclasses.replace(CONFIG, batch_size=8, eval_batch_size=8, eval_iters=12)
    order = eval_batches(windows, config)
    assert order.shape == (12, 8) and len(np.unique(order)) == 96
    assert np.array_equal(order, eval_batches(windows, config))
    several = dataclasses.replace(config, eval_iters=1000)
    assert eval_batches(windows, several).shape == (12, 8)
    filled = eval_batches(windows, dataclasses.replace(several, batch_size=150, eval_batch_size=150))
    assert filled.shape == (1, 150) and np.bincount(filled.ravel(), minlength=100).tolist().count(1) == 50


@pytest.mark.parametrize("stated", [None, 6])
def test_evaluation_windows_are_those_of_any_micro_batch(windows, stated):
    config = dataclasses.replace(CONFIG, eval_batch_size=stated, eval_iters=3)
    orders = [eval_batches(windows, dataclasses.replace(config, batch_size=B)) for B in (1, 2, 6, 12, 64)]
    assert all(np.array_equal(order.ravel(), orders[0].ravel()) for order in orders)
    assert [order.shape[1] for order in orders] == ([1, 2, 6, 6, 6] if stated else [1, 2, 4, 8, 16])
    assert orders[0].size == 3 * (stated or 16)


class Recorder(torch.nn.Module):
    """Its loss is a number that belongs to the batch; notes in which mode it is called."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones((), dtype=torch.float64))
        self.weight.grad = torch.tensor(3.0, dtype=torch.float64)
        self.modes = []

    def forward(self, x, y):
        self.modes.append((self.training, torch.is_grad_enabled()))
        return self.weight * ((x.double() * torch.arange(1, T + 1)).mean() + y.double().std())


def test_every_batch_of_every_split_is_evaluated_in_eval_mode_without_gradients(windows):
    model = Recorder()
    losses = evaluate(model, {"train": windows, "val": windows}, CONFIG, world())
    assert losses["train"] == losses["val"] > 0
    assert model.modes == [(False, False)] * 2 * CONFIG.eval_iters
    assert model.training and torch.is_grad_enabled() and model.weight.grad == 3


@pytest.mark.parametrize("where", ["check", "forward", "read"])
def test_an_evaluation_that_is_broken_off_leaves_the_model_in_training_mode(windows, monkeypatch, where):
    """By a stop, here at the second batch, by an error of the model, or by a token file that has changed."""
    model, checks = Recorder(), []

    def stop(*_):
        raise KeyboardInterrupt

    def check():
        checks.append(where)
        if checks == ["check", "check"]:
            stop()

    if where != "check":
        monkeypatch.setattr(model if where == "forward" else StreamWindows, where, stop)
    with pytest.raises(KeyboardInterrupt):
        evaluate(model, {"val": windows}, CONFIG, world(), check)
    assert len(model.modes) == (where == "check") and model.training and torch.is_grad_enabled()


# --- every token, by its id ---


@pytest.fixture(scope="module")
def numbered(tmp_path_factory):
    """As `windows`, in 7 shards, and every token is its own id."""
    folder = tmp_path_factory.mktemp("numbered")
    ids = np.arange(100 * T + 5, dtype="<u4")
    for i, shard in enumerate(np.split(ids, [900, 901, 1000, 1800, 2500, 3111])):
        shard.tofile(folder / f"train_{i}.bin")
    (folder / "meta.json").write_text(json.dumps({"dtype": "uint32", "vocab_size": len(ids)}))
    config = dataclasses.replace(CONFIG, dataset=str(folder), eval_interval=0, vocab_size=len(ids))
    return StreamWindows(open_dataset(config, scan=False)[0]["train"], T)


@pytest.mark.parametrize(
    "plan", [[(1, 25)], [(2, 25)], [(4, 25)], [(4, 9), (1, 4), (2, 12)], [(1, 12), (4, 1), (2, 1), (4, 11)]]
)
@pytest.mark.data_order
def test_two_epochs_have_every_token_once_each_however_the_run_is_interrupted(numbered, plan):
    """plan: [(ranks, iterations)], resumed after each."""
    samples, position = [], 0
    for size, iterations in plan:
        config = with_world_size(size)
        for _ in range(iterations):
            ranks = [IterationBatches(numbered, config, world(rank, size))[position] for rank in range(size)]
            samples.append(torch.stack(ranks, dim=1).reshape(GLOBAL_BATCH, T + 1))  # (A, W, B, T + 1)
            position += GLOBAL_BATCH
    rows = torch.cat(samples)
    total, count = numbered.tokens.total, numbered.count
    following = (rows[:, :-1] + 1) % total  # also where an epoch wraps around
    assert torch.equal(rows[:, 1:], following)
    for epoch, inputs in enumerate(np.split(rows[:, :-1].numpy(), [count])):
        left_out = (int(epoch_offset(np.int64(epoch), T)) + count * T + np.arange(5)) % total
        expected = np.ones(total, dtype=int)
        expected[left_out] = 0  # no window has room for these
        assert np.array_equal(np.bincount(inputs.ravel(), minlength=total), expected)
