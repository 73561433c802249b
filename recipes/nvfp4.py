"""low_precision='nvfp4': E2M1 numbers in blocks of 16. formats/nvfp4.py has the numbers and their source."""

from __future__ import annotations

import torch

from ops.quantization.random_bits import random_key
from recipes.block_recipe import BlockRecipe
from recipes.block_scaled import NativeNvfp4Linear
from recipes.nvfp4_linear import Nvfp4Linear, nvfp4_amaxes, nvfp4_operand, nvfp4_weight


class Nvfp4(BlockRecipe):
    """Gradients are rounded stochastically. It counts iterations and micro-steps, so that a resumed run draws
    the same bits; ranks have other gradients, so they draw other bits."""

    multiple = 16
    peak = "fp4"
    emulated, scaled, scales_head = Nvfp4Linear, NativeNvfp4Linear, False
    bytes_scaled, weight_bytes = 1 / 2 + 1 / 16, 2.0

    def __init__(self, config, layers, head, place):
        keys = [random_key(place.seed, tensor=i) for i in range(len(layers) + len(head))]
        self.keys = torch.stack(keys).to(place.device)  # int64 (layers, 4): ops/quantization/random_bits.py
        self.counter = torch.zeros(2, dtype=torch.int64, device=place.device)  # iteration, micro-step
        super().__init__(config, layers, head, place)

    def key(self, number):
        return self.keys[number]

    def before_micro_step(self):
        self.keys[:, 1:3] = self.counter

    def after_micro_step(self, loss, last):
        self.counter[1] += 1
        if last:
            self.counter[0] += 1
            self.counter[1].zero_()  # = 0 would wait for the GPU
        return loss

    def state(self):
        return {"counter": self.counter}

    @staticmethod
    def casts(x, key):
        amaxes = nvfp4_amaxes(x)
        return {
            "amaxes": amaxes,
            "cast": nvfp4_operand(x, amaxes),
            "cast with stochastic rounding": nvfp4_operand(x, amaxes, key),
            "cast of a weight": nvfp4_weight(x, amaxes[0]),
        }


RECIPE = Nvfp4
