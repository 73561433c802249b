"""The rows of the precision matrix: the settings of each, and what the study published of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mfu_versions import model_builder_v3 as v3
from training.configuration.files_and_flags import load_config
from training.configuration.keys import ROOT

CONFIG, STUDIED = "config/qwen3_1.7b.py", "config/cpt_qwen3_1.7b_4096.py"  # the study's model, its training
LAYERS, HEAD = "layers", "layers_and_head"
B200_FLOPS = 2.25e15  # in bf16, dense
REPEATS = "rows 15 to 20 of the study repeat 9 to 14 with another kernel of RMSNorm, in bf16"
BF16_TAIL = 0.15  # of the blocks
# Of one B200. The loss is that of training, not held out; the memory is W&B's, with what the allocator keeps
PUBLISHED = ("study's MFU %", "study's tokens/s", "study's loss", "study's memory %")
# what the study does with the gradient of the logits, if that is not as here
IN_HEAD = {"fp8_delayed": "the logits' gradient in e5m2", "nvfp4": "the logits' gradient in bf16"}


@dataclass(frozen=True)
class Row:
    """One variant: the values of the keys in which rows differ."""

    name: str  # its number in the study; 's': the same with stochastic rounding of the weights
    own: dict[str, Any]
    note: str = ""
    bf16_tail: float = 0.0  # share of the blocks, the last ones, that stay in bf16
    published: tuple[float, ...] = ()

    def keys(self, n_layer: int) -> dict[str, object]:
        """{key of train.py: value}, for a model of so many blocks."""
        tail = {"low_precision_skip_last": max(1, round(self.bf16_tail * n_layer))} if self.bf16_tail else {}
        return {**self.own, **tail}


def keys_of(param_dtype: str, recipe: str, scope: str = LAYERS, **more: object) -> dict[str, object]:
    keys = {"param_dtype": param_dtype, "low_precision": recipe, "low_precision_scope": scope}
    return {**keys, "weight_tying": scope == LAYERS, **more}


STUDY = {  # number in the study: weights, matmuls, scope; what PUBLISHED names
    1: ("float32", "none", LAYERS, 36.01, 71851.17, 1.3667, 67.91),
    2: ("bfloat16", "none", LAYERS, 38.28, 76380.13, 1.8192, 53.66),
    3: ("float32", "fp8_delayed", LAYERS, 39.68, 79174.49, 1.3801, 69.02),
    4: ("bfloat16", "fp8_delayed", LAYERS, 47.80, 95387.86, 1.7431, 56.14),
    5: ("float32", "mxfp8", LAYERS, 38.12, 76064.93, 1.3782, 67.66),
    6: ("bfloat16", "mxfp8", LAYERS, 45.70, 91203.36, 1.7405, 58.79),
    7: ("float32", "nvfp4", LAYERS, 38.46, 76740.59, 1.4768, 62.53),
    8: ("bfloat16", "nvfp4", LAYERS, 46.04, 91883.08, 1.8853, 52.44),
    9: ("float32", "fp8_delayed", HEAD, 45.26, 77487.93, 1.4105, 70.88),
    10: ("bfloat16", "fp8_delayed", HEAD, 52.65, 90138.03, 1.7542, 60.28),
    11: ("float32", "mxfp8", HEAD, 41.53, 71109.20, 1.4017, 67.66),
    12: ("bfloat16", "mxfp8", HEAD, 49.12, 84073.86, 1.7525, 58.79),
    13: ("float32", "nvfp4", HEAD, 43.99, 75308.72, 1.8067, 66.1),
    14: ("bfloat16", "nvfp4", HEAD, 51.46, 88110.51, 2.0097, 55.55),
}
FURTHER = (
    Row("21", keys_of("float32", "fp8_tensorwise")),
    Row("23", keys_of("float32", "fp8_delayed"), "gradients in e5m2"),
    Row("24", keys_of("float32", "nvfp4"), "last 15 % of the blocks in bf16", BF16_TAIL),
    Row("25", keys_of("float32", "none", weight_tying=False), "what untying alone changes"),
)
ROWS: dict[str, Row] = {}
for _number, (_weights, _recipe, _scope, *_published) in STUDY.items():
    # the study's choice of gradients in fp8 is e4m3, where e5m2 is usual
    _more = {"fp8_gradients": "e4m3"} if _recipe == "fp8_delayed" else {}
    _keys, _note = keys_of(_weights, _recipe, _scope, **_more), IN_HEAD.get(_recipe, "") * (_scope == HEAD)
    ROWS[f"{_number}"] = Row(f"{_number}", _keys, _note, published=tuple(_published))
    if _weights == "bfloat16":  # rounded to nearest, most of the weights stay where they are
        ROWS[f"{_number}s"] = Row(f"{_number}s", {**_keys, "weight_rounding": "stochastic"}, _note)
ROWS |= {row.name: row for row in FURTHER}
BASELINE = "1"


def published(row: Row) -> dict[str, float]:
    """{column: value} of a row of the study, and MFU of its tokens/s in percent of the bf16 peak by formula
    v3, so with the logits in every row: with the full matrix of scores, and with its causal half."""
    if not row.published:
        return {}
    found = dict(zip(PUBLISHED, row.published, strict=True))
    config = load_config([str(ROOT / CONFIG)])
    flops = v3.count_flops(config.model_config(), config.block_size)
    share = 100 * found["study's tokens/s"] / B200_FLOPS
    causal = share * flops["flops_per_token_causal"]
    return {**found, "corrected %": share * flops["flops_per_token"], "its causal %": causal}
