"""Captures an iteration as a CUDA graph and replays it: one launch instead of the eager step's thousands.

The first iterations run eagerly. The last two of them, the references, are then computed again by replays of
a capture, from the same state, with the same batches and learning rates. Only if losses, gradient norms and
the state after them agree is the capture trusted. Otherwise, or if anything could not be captured, the run
keeps the eager step, and the log says why. In both cases the run continues from the eager step's state, as if
nothing had happened.

Traps that a second replay shows and the first does not: a capture holds addresses, and every number that
Python knew. If the step replaces a tensor instead of writing into it, does not clear a gradient, or has the
rate as a Python float, the first replay is still right. tests/unit/test_graphs.py has each known way to break
a capture.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import NamedTuple, TypeVar

import torch

from common.errors import RunError
from training.checkpoints.train_state import TrainState
from training.cuda_graphs.capture import CudaGraphs, Obstacle
from training.cuda_graphs.parity import Snapshot, compare, host_bytes
from training.optimization.step import Step, StepResult
from training.process.memory import GIB, free_host_bytes
from training.process.world import gather_objects

log = logging.getLogger("nanomfu")

EAGER_ITERS = 10  # eager iterations of this process before the first replay
REFERENCES = 2  # the last of them, which the capture computes again

Result = TypeVar("Result")


class Batch(NamedTuple):
    """The inputs of an iteration."""

    x: torch.Tensor
    y: torch.Tensor
    learning_rate: float | torch.Tensor


class Extras(NamedTuple):
    """What an iteration does besides: a capture of its own."""

    with_gradient_sum: bool = False
    second_look: bool = False


class Reference(NamedTuple):
    """An eager iteration that a capture will compute again."""

    batch: Batch
    result: StepResult
    waits: list[str]  # places in the code where it waited for the GPU


class GraphedStep:
    """The eager step and, once a capture is trusted, replays of it; with the eager step's signature.

    An iteration that also sums the gradients, or looks twice, is another capture, made when it is first asked
    for. A pass over the gradients in every iteration would cost 1 % of a large model's time and more of a
    small one's, and an eager iteration between replays would need memory for its own activations. The
    captures share it.
    `paused` stops the clock of the log rows, so that no row's time has a capture in it; `start` is the
    first iteration. `choice` says what runs: the record has it, and so gets the outcome during the run.
    """

    def __init__(
        self,
        step: Step,
        state: TrainState,
        graphs: CudaGraphs,
        paused: Callable[[], AbstractContextManager],
        start: int,
    ):
        self.step, self.state, self.graphs, self.paused = step, state, graphs, paused
        self.first_replay = start + EAGER_ITERS
        self.calls = 0
        self.eager_only = False
        # the memory from which captures read a Batch
        self.inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
        self.replays: dict[Extras, Callable[[], StepResult]] = {}
        self.snapshot: Snapshot | None = None
        self.references: list[Reference] = []
        reason = f"the run ended within its first {EAGER_ITERS} iterations"
        self.choice: dict[str, str | None] = {"asked": "CUDA Graph", "used": "eager step", "reason": reason}

    def __call__(
        self,
        x: torch.Tensor,
        y: torch.Tensor,
        learning_rate: float | torch.Tensor,
        with_gradient_sum: bool = False,
        second_look: bool = False,
    ) -> StepResult:
        self.calls += 1
        if self.calls == 1:
            log.info(f"CUDA Graph: capture after {EAGER_ITERS} iterations")
        batch, extras = Batch(x, y, learning_rate), Extras(with_gradient_sum, second_look)
        if self.eager_only:
            return self.step(*batch, *extras)
        other_shape = self.inputs is not None and x.shape != self.inputs[0].shape
        if other_shape or self.calls <= EAGER_ITERS - REFERENCES:
            return self.graphs.eager(functools.partial(self.step, *batch, *extras))
        if extras in self.replays:
            return self._replay(batch, extras)
        return self._make_reference(batch, extras)

    def close(self) -> None:
        """Frees the captures. The process group must end later: NCCL waits for graphs with its kernels."""
        self.replays.clear()
        self.eager_only, self.snapshot, self.references = True, None, []
        self.graphs.close()

    def _replay(self, batch: Batch, extras: Extras) -> StepResult:
        self.state.strategy.settle()
        self._fill(batch)
        return self.replays[extras]()

    def _fill(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Copies the batch to where the captures read it. Nothing waits: the rate is a kernel's argument."""
        if self.inputs is None:
            rate = torch.zeros((), device=batch.x.device)
            self.inputs = torch.empty_like(batch.x), torch.empty_like(batch.y), rate
        x, y, rate = self.inputs
        x.copy_(batch.x)
        y.copy_(batch.y)
        rate.fill_(batch.learning_rate)
        return self.inputs

    # --- from the eager step to a trusted capture ---

    def _make_reference(self, batch: Batch, extras: Extras) -> StepResult:
        """Runs and times, as before, an iteration that a capture will compute again; then captures if it was
        the last."""
        if not self.references:
            with self.paused():
                # ranks share the host's memory: none takes any before all have looked
                if self._on_all_ranks(self._has_memory):
                    self.snapshot = self._on_all_ranks(lambda: Snapshot(self.state))
        if self.snapshot is None:
            return self.step(*batch, *extras)
        first = not self.replays
        if first:
            run = functools.partial(self.step, *self._fill(batch), *extras)
            result, waits = self.graphs.eager_with_waits(run)
        else:  # the first capture is trusted, and leaves no memory for an eager iteration
            result, waits = self._replay(batch, Extras()), []
        kept = Batch(batch.x.clone(), batch.y.clone(), batch.learning_rate)
        self.references.append(Reference(kept, result, waits))
        if len(self.references) < (REFERENCES if first else 1):
            return result
        with self.paused():
            last = self._capture_and_check(self.snapshot, Extras() if first else extras)
        # a reference made by the first capture has no gradient sum; the new capture's result may have one
        return last if last and not first else result

    def _has_memory(self) -> bool:
        """True. Raises Obstacle if there is no room for the snapshots."""
        self.graphs.check()
        need, free = host_bytes(self.state), free_host_bytes()
        if need > free:
            raise Obstacle(
                f"its check needs {need / GIB:.1f} GiB of host memory, of which {free / GIB:.1f} are free"
            )
        return True

    def _capture_and_check(self, snapshot: Snapshot, extras: Extras) -> StepResult | None:
        """Captures, computes the references again, compares. Returns the last result if they agree."""
        began = time.perf_counter()
        references = self.references
        self.snapshot, self.references = None, []
        snapshot.swap()
        replay = self._on_all_ranks(lambda: self._capture(references, extras))
        checked = None
        if replay:
            checked = self._on_all_ranks(lambda: self._check(replay, references, snapshot))
        snapshot.put_back()
        if not replay or not checked:
            return None
        last, agreement = checked
        self.replays[extras] = replay
        self.choice.update({"used": "CUDA Graph", "reason": None})
        added = "the gradient's sum" if extras.with_gradient_sum else ""
        added += " and a second look" if extras.second_look else ""
        what = f"also with {added.removeprefix(' and ')}" if added else f"from iteration {self.first_replay}"
        seconds = time.perf_counter() - began
        log.info(f"CUDA Graph: replaying {what} ({agreement}; capture and check took {seconds:.1f} s)")
        return last

    def _capture(self, references: list[Reference], extras: Extras) -> Callable[[], StepResult]:
        for reference in references:
            if reference.waits:
                raise Obstacle(f"the step waits for the GPU at {reference.waits[0]}")
        self.state.strategy.settle()
        replay = self.graphs.capture(lambda: self._recorded(extras))
        return lambda: _unpack(replay(), extras.with_gradient_sum)

    def _recorded(self, extras: Extras) -> torch.Tensor:
        """What a capture records. It ends as it began, because a replay runs no Python: weights that the step
        leaves on their way arrive in it."""
        assert self.inputs, "a reference has filled them"
        result = self.step(*self.inputs, *extras)
        self.state.strategy.settle()
        return _pack(result, extras.with_gradient_sum)

    def _check(
        self, replay: Callable[[], StepResult], references: list[Reference], snapshot: Snapshot
    ) -> tuple[StepResult, str]:
        results = []
        for reference in references:
            self._fill(reference.batch)
            results.append(replay())
        trusted, agreement = compare([reference.result for reference in references], results, snapshot)
        if not trusted:
            raise Obstacle(f"its replay differs from the eager step: {agreement}")
        return results[-1], agreement

    def _on_all_ranks(self, action: Callable[[], Result]) -> Result | None:
        """What `action` returned. If it failed on any rank, None on all ranks, and all keep the eager step: a
        rank that replays and a rank that does not would wait for each other. Raises RunError if the eager
        step cannot go on. All ranks."""
        result = failure = None
        try:
            result = action()
        except Obstacle as error:
            failure = str(error)
        except Exception as error:  # a capture may raise anything; the eager step raises its own errors
            failure = f"{type(error).__name__}: {error}".splitlines()[0]
        failures = gather_objects(failure, self.state.world)
        if not any(failures):
            return result
        rank = next(rank for rank, reason in enumerate(failures) if reason)
        reason = failures[rank] if len(failures) == 1 else f"rank {rank}: {failures[rank]}"
        self.close()
        self.choice.update({"used": "eager step", "reason": reason})
        if not all(gather_objects(self.state.strategy.can_go_on(), self.state.world)):
            raise RunError(
                f"CUDA Graph: the capture broke off ({reason}), and FSDP cannot go on after that; "
                "start again with --use_cuda_graphs=False"
            )
        log.info(f"CUDA Graph: not used, the eager step runs on: {reason}")
        return None


def _pack(result: StepResult, with_gradient_sum: bool) -> torch.Tensor:
    """One tensor, so that one copy saves the results: the next replay overwrites the capture's memory."""
    return torch.stack([getattr(result, name).float() for name in _packed(with_gradient_sum)])


def _unpack(values: torch.Tensor, with_gradient_sum: bool) -> StepResult:
    """The StepResult that _pack() has packed."""
    found = dict(zip(_packed(with_gradient_sum), values.unbind(), strict=True))
    return StepResult(grad_sum=found.pop("grad_sum", None), **found)


def _packed(with_gradient_sum: bool) -> list[str]:
    return [name for name in StepResult._fields if with_gradient_sum or name != "grad_sum"]
