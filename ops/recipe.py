"""What the code asks of a recipe of low precision. Recipe itself is low_precision='none': a subclass
overrides what differs, and its module names it as RECIPE (training/configuration/choices.py finds it).
CONTRIBUTING.md shows how to add one.

The class answers what is asked before a run: how a device runs it, how many bytes it takes. An object is the
recipe at work: making one puts its layers in place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch

from ops.linear import Linear

# What the dry run, the start-up report, the record and docs/low_precision.md say of a recipe on a GPU: tensor
# cores of its kind; the same if their results agree with the emulation's; the same numbers, computed
# otherwise
NATIVE, CHECKED = "native", "native after the check at the start"
EMULATED, REFUSED = "emulated: slower than bf16", "refused"


class Forms(NamedTuple):
    """What the estimate of memory asks, of the layers that compute in low precision."""

    operand: float = 2.0  # bytes of a number that a matmul gets, and that its backward keeps
    weight: float = 0.0  # bytes that are kept of each weight besides
    adds: bool = True  # matmuls add weight gradients to fp32 sums; else a product as large comes first
    is_float8: bool = False  # Float8Linear: SwiGLU's gradient is written in fp8


class Place(NamedTuple):
    """Where a recipe is to run."""

    device: torch.device
    here: Any  # the Capability of the device (training/hardware/capability.py)
    seed: int  # of random numbers, another one on each rank
    tokens: int  # of a micro-batch
    head_tokens: int  # of which the head has so many at a time
    first_reason: Callable[[Iterable[str | None]], str | None]  # of any rank, with its name. All ranks


class Recipe:
    multiple = 1  # of tokens and of both widths of a matrix
    settings: tuple[str, ...] = ()  # keys that only some recipes read, and this one does
    peak: str | None = None  # 'fp8' or 'fp4', if its tensor cores have a peak of their own
    needs = ""  # what a device must have, for an error
    native_needs = ""  # what a device must have to gain by it, for a warning

    @classmethod
    def support(cls, here: Any) -> str | None:
        """How a device of this Capability runs it: NATIVE, CHECKED, EMULATED, or None, if it cannot."""
        return NATIVE

    @classmethod
    def forms(cls, native: bool) -> tuple[Forms, Forms]:
        """Of layers in blocks, and of the head. native: a check at the start has passed; before it nobody
        knows."""
        return Forms(), Forms()

    def __init__(self, config: Any, layers: Mapping[str, Linear], head: Mapping[str, Linear], place: Place):
        """layers, head: {path in the model: what is to compute in low precision}. Raises RunError if a kernel
        stores wrong numbers."""
        self.config, self.place = config, place
        self.native = self.support(place.here) == NATIVE
        self.linears = {
            path: self.convert(layer, number, path in head)  # {path: what takes its place}
            for number, (path, layer) in enumerate({**layers, **head}.items())
        }

    def convert(self, layer: Linear, number: int, in_head: bool) -> Linear:
        """What takes the place of a layer, with the same parameters (ops.linear.InPlaceOf)."""
        return layer

    # --- in the loop; nothing here waits for the device ---

    def before_iteration(self) -> None:
        pass

    def before_micro_step(self) -> None:
        pass

    def after_micro_step(self, loss: torch.Tensor, last: bool) -> torch.Tensor:
        """The loss, or nan if the backward overflowed where its gradients do not show it. last: of the
        iteration."""
        return loss

    def state(self) -> dict[str, torch.Tensor]:
        """What it keeps from one micro-step to the next, by name: in every checkpoint, and at addresses that
        stay, as captured graphs read it."""
        return {}

    # --- what a run says of it ---

    @property
    def executed(self) -> str:
        """What really computes the matmuls: 'native fp8', 'bf16, emulates NAME'."""
        return self.config.dtype

    def describe(self) -> dict[str, Any]:
        """More for the record's startup_info. May wait for the device once."""
        return {}


RECIPE = Recipe
