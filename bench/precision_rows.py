"""The rows of the precision matrix: the 20 of the published study, what it printed for them, and more rows.

The study continued the training of Qwen3-1.7B-Base on one B200 in 20 variants
(https://github.com/Scicom-AI-Enterprise-Organization/small-malaysian-lm, README of commit a0af01f). Six of
them repeat others: "norm layers converted" swaps one kernel of RMSNorm for another, in bf16. Its MFU leaves
the logits out where the embeddings are tied; docs/low_precision.md says what else its table does not show.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import NamedTuple

from mfu_versions import model_builder_v3 as v3
from training.configuration.files_and_flags import load_config
from training.configuration.keys import ROOT

CONFIG = "config/qwen3_1.7b.py"  # the study's model and batch
NORMS = "TE's norms are not quantized"


@dataclass(frozen=True)
class Row:
    """One variant: the values of the keys in which rows differ."""

    name: str  # its number in the study; 's': the same with stochastic rounding of the weights
    param_dtype: str
    low_precision: str
    scope: str = "layers"
    weight_tying: bool = True
    note: str = ""
    options: dict[str, object] = field(default_factory=dict)  # further keys of train.py
    bf16_tail: float = 0.0  # share of the blocks, the last ones, that stay in bf16
    same_as: str | None = None  # the row that this one repeats; it is not run

    def keys(self, n_layer: int) -> dict[str, object]:
        """{key of train.py: value}, for a model of so many blocks."""
        tail = {"low_precision_skip_last": max(1, round(self.bf16_tail * n_layer))} if self.bf16_tail else {}
        return {
            "param_dtype": self.param_dtype,
            "low_precision": self.low_precision,
            "low_precision_scope": self.scope,
            "weight_tying": self.weight_tying,
            **self.options,
            **tail,
        }


HEAD = "layers_and_head"
E4M3: dict[str, object] = {"fp8_gradients": "e4m3"}  # the study's choice; e5m2 is usual
IN_E5M2, IN_BF16 = "the logits' gradient in e5m2", "the logits' gradient in bf16"  # not so in the study
STUDY = (
    Row("1", "float32", "none"),
    Row("2", "bfloat16", "none"),
    Row("3", "float32", "fp8_delayed", options=E4M3),
    Row("4", "bfloat16", "fp8_delayed", options=E4M3),
    Row("5", "float32", "mxfp8"),
    Row("6", "bfloat16", "mxfp8"),
    Row("7", "float32", "nvfp4"),
    Row("8", "bfloat16", "nvfp4"),
    Row("9", "float32", "fp8_delayed", HEAD, weight_tying=False, note=IN_E5M2, options=E4M3),
    Row("10", "bfloat16", "fp8_delayed", HEAD, weight_tying=False, note=IN_E5M2, options=E4M3),
    Row("11", "float32", "mxfp8", HEAD, weight_tying=False),
    Row("12", "bfloat16", "mxfp8", HEAD, weight_tying=False),
    Row("13", "float32", "nvfp4", HEAD, weight_tying=False, note=IN_BF16),
    Row("14", "bfloat16", "nvfp4", HEAD, weight_tying=False, note=IN_BF16),
    Row("15", "float32", "fp8_delayed", HEAD, weight_tying=False, note=NORMS, options=E4M3, same_as="9"),
    Row("16", "bfloat16", "fp8_delayed", HEAD, weight_tying=False, note=NORMS, options=E4M3, same_as="10"),
    Row("17", "float32", "mxfp8", HEAD, weight_tying=False, note=NORMS, same_as="11"),
    Row("18", "bfloat16", "mxfp8", HEAD, weight_tying=False, note=NORMS, same_as="12"),
    Row("19", "float32", "nvfp4", HEAD, weight_tying=False, note=NORMS, same_as="13"),
    Row("20", "bfloat16", "nvfp4", HEAD, weight_tying=False, note=NORMS, same_as="14"),
)


def stochastic(row: Row) -> Row:
    """The same with stochastic rounding: to nearest, most of the weights stay where they are."""
    options = {**row.options, "weight_rounding": "stochastic"}
    return dataclasses.replace(row, name=f"{row.name}s", options=options)


FURTHER = (
    Row("21", "float32", "fp8_tensorwise"),
    Row("23", "float32", "fp8_delayed", note="gradients in e5m2"),
    Row("24", "float32", "nvfp4", note="last 15 % of the blocks in bf16", bf16_tail=0.15),
    Row("25", "float32", "none", weight_tying=False, note="what untying alone changes"),
)
_BOTH = (
    (row, stochastic(row)) if row.param_dtype == "bfloat16" and not row.same_as else (row,) for row in STUDY
)
ROWS = {row.name: row for rows in (*_BOTH, FURTHER) for row in rows}
BASELINE, UNTIED = "1", "25"
ROW_KEYS = {key for row in ROWS.values() for key in row.keys(n_layer=1)}


# --- what the study printed ---


class Published(NamedTuple):
    """A line of the study's table."""

    mfu_percent: float
    tokens_per_sec: float
    loss: float  # of training, not held out


PUBLISHED = {
    "1": Published(36.01, 71851.17, 1.3667),
    "2": Published(38.28, 76380.13, 1.8192),
    "3": Published(39.68, 79174.49, 1.3801),
    "4": Published(47.80, 95387.86, 1.7431),
    "5": Published(38.12, 76064.93, 1.3782),
    "6": Published(45.70, 91203.36, 1.7405),
    "7": Published(38.46, 76740.59, 1.4768),
    "8": Published(46.04, 91883.08, 1.8853),
    "9": Published(45.26, 77487.93, 1.4105),
    "10": Published(52.65, 90138.03, 1.7542),
    "11": Published(41.53, 71109.20, 1.4017),
    "12": Published(49.12, 84073.86, 1.7525),
    "13": Published(43.99, 75308.72, 1.8067),
    "14": Published(51.46, 88110.51, 2.0097),
    "15": Published(54.21, 92814.44, 1.4126),
    "16": Published(62.38, 106804.84, 1.7554),
    "17": Published(50.42, 86315.34, 1.4042),
    "18": Published(57.82, 98994.34, 1.7535),
    "19": Published(49.27, 84352.77, 1.8338),
    "20": Published(61.02, 104467.33, 2.0115),
}
PEAKS = {"bf16": 2.25e15, "fp8": 4.5e15, "fp4": 9.0e15}  # of a B200, dense
FORMATS = {"none": "bf16", "fp8_delayed": "fp8", "mxfp8": "fp8", "nvfp4": "fp4"}


def study_flops() -> dict[str, int]:
    """FLOPs of one token in training, of the study's model: the matmuls of the blocks, the logits, and the
    attention with the full matrix of scores."""
    config = load_config([str(ROOT / CONFIG)])
    components = dict(v3.count_flops(config.model_config(), config.block_size)["components"])
    logits = components.pop("logits")
    attention = sum(components.pop(name) for name in ("attention_scores", "attention_context"))
    parts = {"blocks": sum(components.values()), "logits": logits, "attention": attention}
    return {name: v3.BACKWARD_FACTOR * count // config.block_size for name, count in parts.items()}


def mfu_by_the_studys_formula(row: Row) -> float:
    """In percent, of the published tokens/s: 6 (N - N_embedding) + 12 L H D T FLOPs for a token. N counts a
    tied matrix once, so the logits are in it only where they have weights of their own."""
    config = load_config([str(ROOT / CONFIG), f"--weight_tying={row.weight_tying}"]).model_config()
    counted = v3.build_model(config).count_parameters()["total"] - config.vocab_size * config.n_embd
    scores = 12 * config.n_layer * config.attention_width * config.block_size
    return 100 * PUBLISHED[row.name].tokens_per_sec * (6 * counted + scores) / PEAKS["bf16"]


def corrected(row: Row) -> dict[str, float] | None:
    """MFU of the published tokens/s in percent of the bf16 peak, with the logits in every row, and attention
    counted in full, as its causal half, or not at all: documents of 207 tokens in sequences of 4,096 need
    hardly more. of_formats: percent of the time that the peaks of the formats allow, without attention and
    with its causal half. None for a row that the study does not have."""
    if row.name not in PUBLISHED:
        return None
    flops, rate = study_flops(), PUBLISHED[row.name].tokens_per_sec
    blocks, logits, attention = (flops[name] for name in ("blocks", "logits", "attention"))
    percent, bf16 = 100 * rate, PEAKS["bf16"]
    low = PEAKS[FORMATS[row.low_precision]]
    of_formats = percent * (blocks / low + logits / (low if row.scope == HEAD else bf16))
    return {
        "full": percent * (blocks + logits + attention) / bf16,
        "causal": percent * (blocks + logits + attention / 2) / bf16,
        "no_attention": percent * (blocks + logits) / bf16,
        "of_formats": of_formats,
        "of_formats_causal": of_formats + percent * attention / 2 / bf16,
    }
