"""Losses and gradients that are no numbers, or far too large, in place of a model's forward."""

import math


def changed(change):
    """A fault: the loss after `change`. A gradient that it multiplies becomes NaN (ops/cross_entropy.py)."""
    return lambda forward, *arguments: change(forward(*arguments))


def times(factor: float):
    """A fault: the loss and all of its gradients, `factor` times as large."""

    def grown(forward, ids, targets, gradient_scale):
        loss = forward(ids, targets, gradient_scale._replace(value=gradient_scale.value * factor))
        return factor * loss

    return grown


def no_gradient(forward, *arguments):
    """A fault: gradients that are NaN, with a loss that is finite."""
    loss = forward(*arguments) * 1
    loss.register_hook(lambda gradient: gradient * math.nan)
    return loss
