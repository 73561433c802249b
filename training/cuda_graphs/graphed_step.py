"""CUDA Graphs: a whole iteration captured once and replayed, one launch where the eager step makes thousands.

The first iterations run eagerly. The last two of them are then made again, from the same state, by replays of
a capture: same batches, same learning rates. Only if losses, gradient norms and the state after them agree is
the capture trusted; otherwise, or if anything could not be captured, the eager step runs on, and the log says
why. Either way the run goes on from the eager step's state, as if nothing had happened.

Traps that two replays show and one does not: a capture holds addresses, and every number that Python knew. A
tensor that the step replaces instead of writing into, a gradient that is not cleared, a rate that is a Python
float are all right the first time. tests/test_graphs.py has each known way to break a capture.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable

import torch

from training.checkpoints.train_state import TrainState
from training.cuda_graphs.capture import GIB, CudaGraphs, Obstacle
from training.cuda_graphs.parity import Snapshot, compare, host_bytes
from training.optimization.step import StepResult
from training.process.host_memory import free_host_bytes
from training.process.world import gather_objects

log = logging.getLogger("nanomfu")

WARMUP_ITERS = 10  # eager iterations of this process before the first replay
REFERENCES = 2  # the last of them, made again by the capture


class GraphedStep:
    """The eager step and, once that is proven, replays of it; with the eager step's signature.

    An iteration that also sums the gradients is a capture of its own, made when first asked for: a pass over
    the gradients in every iteration would cost 1 % of a large model's and more of a small one's, and an eager
    iteration between replays would need its activations beside the captured ones. It shares their memory.

    `graphs` does what needs CUDA; `paused` is the logger's: no row's time contains a capture.
    """

    def __init__(self, step: Callable, state: TrainState, graphs: CudaGraphs, paused: Callable, start: int):
        self.step, self.state, self.graphs, self.paused = step, state, graphs, paused
        self.first_replay = start + WARMUP_ITERS
        self.calls = 0
        self.eager_only = False
        self.inputs: tuple[torch.Tensor, ...] | None = None  # x, y, learning rate: what the captures read
        self.replays: dict[bool, Callable[[], StepResult]] = {}  # with_gradient_sum -> a replay
        self.snapshot: Snapshot | None = None
        self.references: list[tuple] = []  # (batch, result, where it waited) of iterations to be made again
        reason = f"the run ended within its first {WARMUP_ITERS} iterations"
        self.choice = {"asked": "CUDA Graph", "used": "eager step", "reason": reason}  # for the record

    def __call__(self, x, y, learning_rate: float, with_gradient_sum: bool = False) -> StepResult:
        self.calls += 1
        if self.calls == 1:
            log.info(f"CUDA Graph: capture after {WARMUP_ITERS} iterations")
        if self.eager_only:
            return self.step(x, y, learning_rate, with_gradient_sum)
        batch = (x, y, learning_rate)
        other_shape = self.inputs is not None and x.shape != self.inputs[0].shape
        if other_shape or self.calls <= WARMUP_ITERS - REFERENCES:
            return self.graphs.eager(functools.partial(self.step, *batch, with_gradient_sum))
        if with_gradient_sum in self.replays:
            return self._replay(batch, with_gradient_sum)
        return self._make_reference(batch, with_gradient_sum)

    def close(self) -> None:
        """Lets go of the captures, before the process group ends: NCCL waits for graphs with its kernels."""
        self.replays.clear()
        self.eager_only, self.snapshot, self.references = True, None, []
        self.graphs.close()

    def _replay(self, batch: tuple, with_gradient_sum: bool) -> StepResult:
        self._fill(batch)
        return self.replays[with_gradient_sum]()

    def _fill(self, batch: tuple) -> None:
        """The batch goes where the captures read it. Nothing waits: a number is a kernel's argument."""
        x, y, learning_rate = batch
        if self.inputs is None:
            self.inputs = (torch.empty_like(x), torch.empty_like(y), torch.zeros((), device=x.device))
        for target, value in zip(self.inputs, (x, y), strict=False):
            target.copy_(value)
        self.inputs[2].fill_(learning_rate)

    # --- from the eager step to a trusted capture ---

    def _make_reference(self, batch: tuple, with_gradient_sum: bool) -> StepResult:
        """An iteration made and timed as before that a capture will make again; after the last, captures."""
        if not self.references:
            with self.paused():
                self.snapshot = self._together(self._set_aside)
        if self.eager_only:
            return self.step(*batch, with_gradient_sum)
        first = not self.replays
        if first:
            self._fill(batch)
            run = functools.partial(self.step, *self.inputs, with_gradient_sum)
            result, waits = self.graphs.watched(run)
        else:  # the other capture is trusted, and leaves no memory for an eager iteration
            result, waits = self._replay(batch, not with_gradient_sum), []
        self.references.append(((batch[0].clone(), batch[1].clone(), batch[2]), result, waits))
        if len(self.references) < (REFERENCES if first else 1):
            return result
        with self.paused():
            last = self._introduce(False if first else with_gradient_sum)
        # where the reference could not sum the gradients, the capture that agrees with it has
        return last if last and not first else result

    def _set_aside(self) -> Snapshot:
        self.graphs.check()
        need, free = host_bytes(self.state), free_host_bytes()
        if need > free:
            raise Obstacle(
                f"its check needs {need / GIB:.1f} GiB of host memory, of which {free / GIB:.1f} are free"
            )
        return Snapshot(self.state)

    def _introduce(self, with_gradient_sum: bool) -> StepResult | None:
        """Captures, makes the references again, compares; the last result if the capture is trusted."""
        began = time.perf_counter()
        snapshot, references = self.snapshot, self.references
        self.snapshot, self.references = None, []
        snapshot.swap()
        replay = self._together(self._capture, references, with_gradient_sum)
        checked = replay and self._together(self._check, replay, references, snapshot)
        snapshot.put_back()
        if not checked:
            return None
        last, verdict = checked
        self.replays[with_gradient_sum] = replay
        self.choice.update(used="CUDA Graph", reason=None)
        from_iteration = f"from iteration {self.first_replay}"
        what = "also with the gradient's sum" if len(self.replays) > 1 else from_iteration
        seconds = time.perf_counter() - began
        log.info(f"CUDA Graph: replaying {what} ({verdict}; capture and check took {seconds:.1f} s)")
        return last

    def _capture(self, references: list[tuple], with_gradient_sum: bool) -> Callable[[], StepResult]:
        for _, _, waits in references:
            if waits:
                raise Obstacle(f"the step waits for the GPU at {waits[0]}")
        run = functools.partial(self.step, *self.inputs, with_gradient_sum)
        replay = self.graphs.capture(lambda: _pack(run()))
        return lambda: _unpack(replay())

    def _check(self, replay: Callable, references: list[tuple], snapshot: Snapshot) -> tuple[StepResult, str]:
        results = []
        for batch, _, _ in references:
            self._fill(batch)
            results.append(replay())
        trusted, verdict = compare([result for _, result, _ in references], results, snapshot)
        if not trusted:
            raise Obstacle(f"its replay differs from the eager step: {verdict}")
        return results[-1], verdict

    def _together(self, action: Callable, *arguments):
        """What action returned; None on all ranks if it failed on any, and from then on the eager step is all
        there is: a rank that replays and one that does not would wait for each other. All ranks."""
        result = failure = None
        try:
            result = action(*arguments)
        except Obstacle as error:
            failure = str(error)
        except Exception as error:  # whatever a capture may raise; the eager step has its own errors
            failure = f"{type(error).__name__}: {error}".splitlines()[0]
        failures = gather_objects(failure, self.state.world)
        if not any(failures):
            return result
        rank = next(rank for rank, reason in enumerate(failures) if reason)
        reason = failures[rank] if len(failures) == 1 else f"rank {rank}: {failures[rank]}"
        self.close()
        self.choice.update(used="eager step", reason=reason)
        log.info(f"CUDA Graph: not used, the eager step runs on: {reason}")
        return None


def _pack(result: StepResult) -> torch.Tensor:
    """One tensor, so that a replay's results are one copy; what is in a capture's memory does not last."""
    return torch.stack([value.float() for value in result if value is not None])


def _unpack(values: torch.Tensor) -> StepResult:
    loss, grad_norm, *grad_sum, overflow, verdict, attended = values.unbind()
    return StepResult(loss, grad_norm, grad_sum[0] if grad_sum else None, overflow, verdict, attended)
