"""Checks that two ways of computing the same iterations, from the same state, agree.

The state after the first way is kept in host memory, tensor by tensor, so that a full GPU needs no memory for
a second one. It contains what a checkpoint holds; publish() derives the working copies from it.
"""

from __future__ import annotations

import math
from collections import defaultdict

import torch

from training.checkpoints.train_state import TrainState
from training.optimization.step import StepResult

# How far two ways may differ where they are not bit-equal: attention kernels add gradients in varying order,
# and the next iteration rounds the result to bf16. The error of a wrong capture is of the order of 1.
LOSS_TOLERANCE = 1e-4  # relative
NORM_TOLERANCE = 1e-2  # relative
UPDATE_TOLERANCE = 0.1  # of what the iterations changed, by norm, for weights and for each moment

CHUNK = 2**24  # elements compared at a time


class Snapshot:
    """A copy of a run's state: tensors in host memory, generators. Waits for the device: sync points."""

    def __init__(self, state: TrainState):
        self.state = state
        self.kept = {name: t.to("cpu", copy=True) for name, t in _tensors(state).items()}
        self.generators = _generators(state)
        self.change: dict[str, float] = {}  # kind of tensor -> norm of what the first way changed

    @torch.no_grad()
    def swap(self) -> None:
        """Exchanges the kept state with the current one, and remembers by how much they differ."""
        self.change = self.distances()
        for name, tensor in _tensors(self.state).items():
            for now, kept in _chunks(tensor, self.kept[name]):
                before = kept.to(now.device, copy=True)
                kept.copy_(now)
                now.copy_(before)
        now = _generators(self.state)
        self._restore_derived()
        self.generators = now

    @torch.no_grad()
    def put_back(self) -> None:
        """Makes the kept state the current one."""
        # first: what a broken capture has sent never arrives, so nothing may wait for it
        self.state.strategy.abandon_iteration()
        for name, tensor in _tensors(self.state).items():
            tensor.copy_(self.kept[name])
        self._restore_derived()

    def _restore_derived(self) -> None:
        """Renews what is derived from the state, and drops what an iteration that was broken off has left."""
        self.state.strategy.abandon_iteration()
        self.state.after_load(self.generators)

    @torch.no_grad()
    def distances(self) -> dict[str, float]:
        """Norm of (state now - state kept), for each kind of tensor."""
        squares: dict[str, float] = defaultdict(float)
        for name, tensor in _tensors(self.state).items():
            kind = "weights" if name.startswith("model.") else name.rpartition(".")[2]
            for now, kept in _chunks(tensor, self.kept[name]):
                squares[kind] += (now.double() - kept.to(now.device).double()).square().sum().item()
        return {kind: math.sqrt(square) for kind, square in squares.items()}


def compare(expected: list[StepResult], actual: list[StepResult], snapshot: Snapshot) -> tuple[bool, str]:
    """Whether the second way agrees with the first, and a sentence about it. The snapshot holds the state
    after the first way."""
    found = {}  # what -> (relative difference, the largest one allowed)
    for name, allowed in (("loss", LOSS_TOLERANCE), ("grad_norm", NORM_TOLERANCE), ("verdict", 0.0)):
        wanted, got = ([getattr(result, name).item() for result in way] for way in (expected, actual))
        found[name] = (
            max(_relative(_distance(g, w), abs(w)) for g, w in zip(got, wanted, strict=True)),
            allowed,
        )
    for kind, distance in snapshot.distances().items():
        if kind == "window":  # the spike window: its losses and norms were compared above
            continue
        found[f"update of {kind}"] = _relative(distance, snapshot.change[kind]), UPDATE_TOLERANCE
    left = snapshot.state.strategy.has_gradients()
    found["gradients left over"] = math.inf if left else 0.0, 0.0
    wrong = [f"{what} by {off:.1e} (allowed {most:g})" for what, (off, most) in found.items() if off > most]
    if wrong:
        return False, ", ".join(wrong)
    what, (off, most) = max(found.items(), key=lambda item: item[1][0])
    if off == 0:
        return True, "bit-equal to the eager step"
    return True, f"within tolerance of the eager step: at most {off:.1e}, {what} (allowed {most:g})"


def _distance(a: float, b: float) -> float:
    return 0.0 if a == b or (math.isnan(a) and math.isnan(b)) else abs(a - b)


def _relative(distance: float, scale: float) -> float:
    if distance == 0:
        return 0.0
    return distance / scale if math.isfinite(distance) and scale > 0 else math.inf


# --- state ---


def _tensors(state: TrainState) -> dict[str, torch.Tensor]:
    """Everything that an iteration changes in place on this rank, by name."""
    guard = state.update_guard.state() if state.update_guard else {}
    kept = state.recipe.state() if state.recipe else {}
    return {**state.tensors(), **state.loss_scale.state(), **guard, **kept}


def _generators(state: TrainState) -> dict[str, torch.Tensor]:
    return {name: t for name, t in state.optional_tensors().items() if name.startswith("rng.")}


def _chunks(*tensors: torch.Tensor):
    """Matching chunks of the tensors, as views."""
    return zip(*(tensor.view(-1).split(CHUNK) for tensor in tensors), strict=True)


def host_bytes(state: TrainState) -> int:
    """The host memory that snapshots need on this machine, for all of its processes."""
    return state.world.local_size * sum(t.nbytes for t in _tensors(state).values())
