"""The rows of the precision matrix: the settings of each, and what the study published of it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, NamedTuple

from mfu_versions import model_builder_v3 as v3
from training.configuration.files_and_flags import load_config
from training.configuration.keys import ROOT

CONFIG, STUDIED = "config/qwen3_1.7b.py", "config/cpt_qwen3_1.7b_4096.py"  # the study's model, its training
LAYERS, HEAD = "layers", "layers_and_head"
B200_FLOPS = 2.25e15  # in bf16, dense
REPEATS = "rows 15 to 20 of the study repeat 9 to 14 with another kernel of RMSNorm, in bf16"
BF16_TAIL = 0.15  # of the blocks


class Published(NamedTuple):
    mfu_percent: float
    tokens_per_sec: float
    loss: float  # of training, not held out
    memory_percent: float  # of the B200's, as W&B saw it: with what the allocator keeps, not a peak


@dataclass(frozen=True)
class Row:
    """One variant: the values of the keys in which rows differ."""

    name: str  # its number in the study; 's': the same with stochastic rounding of the weights
    own: dict[str, Any]
    note: str = ""
    bf16_tail: float = 0.0  # share of the blocks, the last ones, that stay in bf16
    published: Published | None = None

    def keys(self, n_layer: int) -> dict[str, object]:
        """{key of train.py: value}, for a model of so many blocks."""
        tail = {"low_precision_skip_last": max(1, round(self.bf16_tail * n_layer))} if self.bf16_tail else {}
        return {**self.own, **tail}


def keys_of(param_dtype: str, recipe: str, scope: str = LAYERS, **more: object) -> dict[str, object]:
    keys = {"param_dtype": param_dtype, "low_precision": recipe, "low_precision_scope": scope}
    return {**keys, "weight_tying": scope == LAYERS, **more}


def studied(number: int, param_dtype: str, recipe: str, scope: str, *published: float) -> Row:
    # the study's choice of gradients in fp8 is e4m3, where e5m2 is usual; of the head it is not as here
    more = {"fp8_gradients": "e4m3"} if recipe == "fp8_delayed" else {}
    in_head = {"fp8_delayed": "the logits' gradient in e5m2", "nvfp4": "the logits' gradient in bf16"}
    note = in_head.get(recipe, "") if scope == HEAD else ""
    keys = keys_of(param_dtype, recipe, scope, **more)
    return Row(str(number), keys, note, published=Published(*published))


STUDY = (
    studied(1, "float32", "none", LAYERS, 36.01, 71851.17, 1.3667, 67.91),
    studied(2, "bfloat16", "none", LAYERS, 38.28, 76380.13, 1.8192, 53.66),
    studied(3, "float32", "fp8_delayed", LAYERS, 39.68, 79174.49, 1.3801, 69.02),
    studied(4, "bfloat16", "fp8_delayed", LAYERS, 47.80, 95387.86, 1.7431, 56.14),
    studied(5, "float32", "mxfp8", LAYERS, 38.12, 76064.93, 1.3782, 67.66),
    studied(6, "bfloat16", "mxfp8", LAYERS, 45.70, 91203.36, 1.7405, 58.79),
    studied(7, "float32", "nvfp4", LAYERS, 38.46, 76740.59, 1.4768, 62.53),
    studied(8, "bfloat16", "nvfp4", LAYERS, 46.04, 91883.08, 1.8853, 52.44),
    studied(9, "float32", "fp8_delayed", HEAD, 45.26, 77487.93, 1.4105, 70.88),
    studied(10, "bfloat16", "fp8_delayed", HEAD, 52.65, 90138.03, 1.7542, 60.28),
    studied(11, "float32", "mxfp8", HEAD, 41.53, 71109.20, 1.4017, 67.66),
    studied(12, "bfloat16", "mxfp8", HEAD, 49.12, 84073.86, 1.7525, 58.79),
    studied(13, "float32", "nvfp4", HEAD, 43.99, 75308.72, 1.8067, 66.1),
    studied(14, "bfloat16", "nvfp4", HEAD, 51.46, 88110.51, 2.0097, 55.55),
)
FURTHER = (
    Row("21", keys_of("float32", "fp8_tensorwise")),
    Row("23", keys_of("float32", "fp8_delayed"), "gradients in e5m2"),
    Row("24", keys_of("float32", "nvfp4"), "last 15 % of the blocks in bf16", BF16_TAIL),
    Row("25", keys_of("float32", "none", weight_tying=False), "what untying alone changes"),
)
ROWS: dict[str, Row] = {}
for _row in (*STUDY, *FURTHER):
    ROWS[_row.name] = _row
    if _row.own["param_dtype"] == "bfloat16":  # rounded to nearest, most of the weights stay where they are
        _keys = {**_row.own, "weight_rounding": "stochastic"}
        ROWS[f"{_row.name}s"] = dataclasses.replace(_row, name=f"{_row.name}s", own=_keys, published=None)
BASELINE = ROWS["1"]


def corrected(row: Row) -> tuple[float, float] | None:
    """MFU of the published tokens/s in percent of the bf16 peak by formula v3, so with the logits in every
    row: with the full matrix of scores, and with its causal half. None for a row that is not the study's."""
    if row.published is None:
        return None
    config = load_config([str(ROOT / CONFIG)])
    flops = v3.count_flops(config.model_config(), config.block_size)
    share = 100 * row.published.tokens_per_sec / B200_FLOPS
    return share * flops["flops_per_token"], share * flops["flops_per_token_causal"]
