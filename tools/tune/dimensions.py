"""What tools.tune may change, as plain data: the rungs of its ladder in their order, and what each one tries.

A new value is a new line here. Keys are those of train.py. The first option of a dimension is the most
careful one, with which the climb begins, unless `changes_numbers`: then the config's own value is that.
docs/tuning.md says why the order is this one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

Keys = dict[str, object]  # of train.py, with their values


class Option(NamedTuple):
    """One value of a dimension."""

    name: str
    keys: Keys
    warmup: int = 0  # iterations before the timed ones, if it needs more than --warmup


@dataclass(frozen=True)
class Dimension:
    """One rung: what may be changed there."""

    name: str
    options: tuple[Option, ...]
    changes_numbers: bool = False  # losses change by more than rounding: only what --allow names is tried
    makes_room: bool = False  # where nothing fits, the climb begins with its first option that does
    spends_room: bool = False  # its last option needs the most memory, and is the fastest
    several: bool = False  # for several processes only
    gpu: bool = False  # for GPUs only
    usually_gains: bool = True  # what --dry assumes
    steps_below_s: float | None = None  # longer micro-steps have nothing to gain, so nothing is tried


BATCH = "micro-batch"  # no options: the numbers of sequences that divide those of an iteration, by bisection
GRAPHED_FROM = 12  # iterations 8 and 9 check the capture, and the first replays follow
# Reading a micro-batch and launching its kernels take some milliseconds: who computes for longer never waits
HOST_HIDDEN_S = 0.1

RECOMPUTATION = ("full", "selective", "attention", "memory_bound", "none")  # from the least memory
PRECISIONS = ("fp8_tensorwise", "fp8_delayed", "mxfp8", "nvfp4")


def _matmuls(recipe: str, scope: str = "layers") -> Keys:
    return {"dtype": "bfloat16", "low_precision": recipe, "low_precision_scope": scope}


DIMENSIONS = (
    Dimension("compile", (Option("eager", {"compile": False}), Option("compiled", {"compile": True}))),
    Dimension(BATCH, ()),
    Dimension(
        "precision",
        (
            Option("fp32", {"dtype": "float32", "low_precision": "none"}),
            Option("bf16", {"dtype": "bfloat16", "low_precision": "none"}),
            *(Option(recipe, _matmuls(recipe)) for recipe in PRECISIONS),
            *(Option(f"{recipe}+head", _matmuls(recipe, "layers_and_head")) for recipe in PRECISIONS),
        ),
        changes_numbers=True,
    ),
    Dimension(
        "stored weights",
        (Option("weights_bf16", {"param_dtype": "bfloat16", "weight_rounding": "stochastic"}),),
        changes_numbers=True,
        makes_room=True,
    ),
    Dimension(
        "Adam moments",
        (
            Option("adam_bf16", {"adam_dtype": "bfloat16", "weight_rounding": "stochastic"}),
            Option("adam_8bit", {"adam_dtype": "8bit"}),
        ),
        changes_numbers=True,
        makes_room=True,
    ),
    Dimension(
        "strategy",
        (
            Option("DDP", {"use_zero1": False, "use_fsdp": False, "reshard_after_forward": False}),
            Option("ZeRO-1", {"use_zero1": True, "use_fsdp": False, "reshard_after_forward": False}),
            Option("FSDP", {"use_zero1": False, "use_fsdp": True, "reshard_after_forward": False}),
            Option("FSDP, reshard", {"use_zero1": False, "use_fsdp": True, "reshard_after_forward": True}),
        ),
        makes_room=True,
        several=True,
        usually_gains=False,
    ),
    Dimension(
        "reduction",
        (Option("reduce_bf16", {"reduce_dtype": "bfloat16"}),),
        changes_numbers=True,
        several=True,
    ),
    Dimension(
        "recomputation",
        tuple(Option(level, {"activation_checkpointing": level}) for level in RECOMPUTATION),
        spends_room=True,
    ),
    Dimension(
        "loss_chunks",
        tuple(Option(f"{n} part{'s' * (n > 1)}", {"loss_chunks": n}) for n in (8, 4, 1)),
        spends_room=True,
    ),
    Dimension(BATCH, ()),
    Dimension(
        "CUDA Graphs",
        (
            Option("off", {"use_cuda_graphs": False}),
            Option("on", {"use_cuda_graphs": True}, warmup=GRAPHED_FROM),
        ),
        gpu=True,
        usually_gains=False,
        steps_below_s=HOST_HIDDEN_S,
    ),
    Dimension(
        "feed-forward",
        tuple(Option(name, {"ffn_backend": name}) for name in ("torch", "quack")),
        gpu=True,
        usually_gains=False,
    ),
    Dimension(
        "loader",
        (
            Option("in the process", {"use_dataloader": False}),
            Option("worker processes", {"use_dataloader": True}),
        ),
        usually_gains=False,
        steps_below_s=HOST_HIDDEN_S,
    ),
)
ALLOWABLE = tuple(option.name for one in DIMENSIONS if one.changes_numbers for option in one.options)
# Every key that the search sets. batch_size comes with the micro-batch.
TUNED = ("batch_size", *dict.fromkeys(key for one in DIMENSIONS for o in one.options for key in o.keys))


def option_of(dimension: Dimension, setting: Keys) -> Option | None:
    """The option that a setting has, if it has one of these."""
    return next((o for o in dimension.options if all(setting[key] == o.keys[key] for key in o.keys)), None)
