"""low_precision='mxfp8': E4M3 numbers in blocks of 32. formats/mxfp8.py has the numbers and their source."""

from __future__ import annotations

from recipes.block_recipe import BlockRecipe
from recipes.block_scaled import NativeMxfp8Linear
from recipes.mxfp8_linear import Mxfp8Linear, mxfp8_operand


class Mxfp8(BlockRecipe):
    multiple = 32
    peak = "fp8"
    emulated, scaled, scales_head = Mxfp8Linear, NativeMxfp8Linear, True
    bytes_scaled, weight_bytes = 1 + 1 / 32, 4.0

    @staticmethod
    def casts(x, key):
        return {"cast": mxfp8_operand(x)}


RECIPE = Mxfp8
