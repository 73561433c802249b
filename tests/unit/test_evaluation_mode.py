"""An evaluation computes no gradients and drops nothing; training drops wherever the architecture says."""

from fractions import Fraction

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.helpers import TINY

import model_builder
from training.configuration.keys import TrainConfig
from training.evaluation import evaluate
from training.hardware import attention_kernels
from training.process.world import World

CPU = torch.device("cpu")
ALONE = World(0, 0, 1, CPU)
CONFIG = TrainConfig(**{**TINY, "block_size": 8, "batch_size": 2, "eval_iters": 3})


class Tokens:
    """A split of 20 windows, all of them zeros."""

    count = 20

    @property
    def by_source(self):
        return {"": (Fraction(1), self)}

    def read(self, indices, epochs=0):
        return np.zeros((len(indices), 9), dtype=np.int64)


class Recorder(torch.nn.Module):
    """A model that notes in which mode it is called."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))
        self.calls = []

    def forward(self, x, y):
        self.calls.append((self.training, torch.is_grad_enabled()))
        return self.weight * 2.0


def test_every_batch_of_every_split_is_evaluated_in_eval_mode_without_gradients():
    model = Recorder()
    losses = evaluate(model, {"train": Tokens(), "val": Tokens()}, CONFIG, ALONE)
    assert losses == {"train": 2.0, "val": 2.0}
    assert model.calls == [(False, False)] * 6
    assert model.training and torch.is_grad_enabled() and model.weight.grad is None


def test_training_goes_on_in_training_mode_after_an_evaluation_that_was_broken_off():
    model, asked = Recorder(), []

    def stop_at_the_second():
        asked.append(1)
        if len(asked) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        evaluate(model, {"val": Tokens()}, CONFIG, ALONE, stop_at_the_second)
    assert len(model.calls) == 1 and model.training and torch.is_grad_enabled()


def dropped(monkeypatch, style: dict, training: bool) -> list[float]:
    """The probability of each dropout that acts in one forward, in order; attention's kernel is sdpa."""
    found = []

    def dropout(x, p=0.5, training=True, inplace=False):
        found.extend([p] if training and p else [])
        return x

    def attention(q, k, v, dropout_p=0.0, **_):
        found.extend([dropout_p] if dropout_p else [])
        return q

    config = TrainConfig(**{**TINY, "dropout": 0.25, **style}).model_config()
    monkeypatch.setattr(F, "dropout", dropout)
    monkeypatch.setattr(F, "scaled_dot_product_attention", attention)
    model = model_builder.build_model(config, attention_kernels._sdpa_default, torch.float32)
    model.init_weights(CPU, seed=1).train(training)
    model(torch.zeros(1, 8, dtype=torch.long), torch.zeros(1, 8, dtype=torch.long))
    return found


@pytest.mark.parametrize("style", [{}, {"arch_preset": "gpt2", "bias": True}], ids=["qwen3", "gpt2"])
def test_each_dropout_acts_in_training_and_none_in_an_evaluation(monkeypatch, style):
    """One after the embedding; in each of 2 blocks one in attention and one after each layer."""
    assert dropped(monkeypatch, style, training=True) == [0.25] * (1 + 2 * 3)
    assert dropped(monkeypatch, style, training=False) == []


def test_batches_with_several_processes_are_each_counted_once():
    """3 batches and 2 processes: rank 1 repeats a batch in the second pass, and its loss is not counted."""
    config = TrainConfig(**{**TINY, "block_size": 8, "batch_size": 2, "eval_iters": 3})
    totals = []  # of each rank: losses and targets
    for rank in range(2):
        model = Recorder()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                "training.evaluation.sum_over_ranks", lambda total, world: totals.append(total) or total
            )
            evaluate(model, {"val": Tokens()}, config, World(rank, rank, 2, CPU))
        assert len(model.calls) == 2
    assert [total.tolist() for total in totals] == [[2 * 2.0, 2.0], [1 * 2.0, 1.0]]
