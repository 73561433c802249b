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
    model.weight.grad = torch.tensor(3.0)
    losses = evaluate(model, {"train": Tokens(), "val": Tokens()}, CONFIG, ALONE)
    assert losses == {"train": 2.0, "val": 2.0}
    assert model.calls == [(False, False)] * 6
    assert model.training and torch.is_grad_enabled() and model.weight.grad == 3


@pytest.mark.parametrize("where", ["check", "forward", "read"])
def test_an_evaluation_that_is_broken_off_leaves_the_model_in_training_mode(monkeypatch, where):
    """By a stop, here at the second batch, by an error of the model, or by a token file that has changed."""
    model, tokens, checks = Recorder(), Tokens(), []

    def stop(*_):
        raise KeyboardInterrupt

    def check():
        checks.append(where)
        if checks == ["check", "check"]:
            stop()

    if where != "check":
        monkeypatch.setattr(model if where == "forward" else tokens, where, stop)
    with pytest.raises(KeyboardInterrupt):
        evaluate(model, {"val": tokens}, CONFIG, ALONE, check)
    assert len(model.calls) == (where == "check") and model.training and torch.is_grad_enabled()


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
