"""Training drops wherever the architecture says, and an evaluation nowhere."""

import pytest
import torch
import torch.nn.functional as F
from support.helpers import TINY

import model_builder
from training.configuration.keys import TrainConfig
from training.hardware import attention_kernels

CPU = torch.device("cpu")


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
