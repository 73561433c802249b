"""The anomaly policy: decides what the update guard's verdicts mean for a run: an event, its end, or nothing.

Verdicts are read where the run waits for the device anyway: at a log row, and before an evaluation or a
checkpoint, so that nothing is saved after a fault that ends the run. By then the guard has long skipped the
updates in question. All ranks have the same verdicts and act in the same way.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

import torch

from common.errors import RunError
from training.configuration.keys import TrainConfig
from training.optimization.step import StepResult
from training.optimization.update_guard import LOSS, LOSS_SPIKE, NORM, NORM_SPIKE, SPIKE_WINDOW
from training.process.world import World, gather_objects
from training.records.run_record import RunRecord

log = logging.getLogger("nanomfu")

MAX_PENDING = 100  # iterations whose verdicts wait for the next log row; at this number they are read at once
STUCK_ITERATIONS = 30  # consecutive overflows; float16's loss scale needs up to 16 to fall from 2^16 to 1


class Diverged(RunError):
    """The numbers of the run can no longer be trusted. The advice is made when the message is read, because
    the checkpoint that was being written may be complete by then."""

    def __init__(self, reason: str, advice: Callable[[], str] = str):
        super().__init__(reason)
        self.advice = advice

    def __str__(self) -> str:
        return super().__str__() + self.advice()


class AnomalyPolicy:
    """Collects verdicts as device tensors, and acts on them after they have been read."""

    def __init__(self, config: TrainConfig, world: World, record: RunRecord | None, start: int):
        self.config, self.world, self.record = config, world, record
        self.pending: list[StepResult] = []  # of iterations whose verdicts have not been read
        self.first = start  # the first of these iterations
        self.saved_at = start or None  # iteration of the newest checkpoint
        self.skipped = 0  # updates skipped since the last log row
        self.in_a_row = 0  # consecutive updates skipped, up to the last verdict that was read
        self.end: str | None = None  # why the run must end

    def add(self, result: StepResult) -> None:
        """After every iteration. All ranks."""
        self.pending.append(result)
        if len(self.pending) == MAX_PENDING:
            self.read_now()

    def pending_verdicts(self) -> list[torch.Tensor]:
        """For a caller that reads them together with other values."""
        return [result.verdict for result in self.pending]

    def read_now(self) -> None:
        """Reads the pending verdicts, and raises Diverged if the run must end. Called before an evaluation or
        a checkpoint, so that nothing is saved after a fault. All ranks. Sync point."""
        if self.pending:
            self.act_on(torch.stack(self.pending_verdicts()).tolist())
        self.end_if_due()

    def end_if_due(self) -> None:
        """Raises Diverged if the run must end."""
        if self.end:
            raise Diverged(self.end, self._advice)

    def act_on(self, values: list[float]) -> None:
        """Acts on the values of pending_verdicts(). All ranks: for bad iterations, they exchange their
        losses."""
        pending, first = self.pending, self.first
        self.pending, self.first = [], first + len(pending)
        kinds = [self._kind(int(value)) for value in values]
        faults = [n for n, kind in enumerate(kinds) if kind not in (None, "overflow")]
        losses = {}  # faulty iteration -> the loss of each rank
        if faults:
            mine = [pending[n].loss.item() for n in faults]
            losses = dict(zip(faults, zip(*gather_objects(mine, self.world), strict=True), strict=True))
        for n, kind in enumerate(kinds):
            self.in_a_row = self.in_a_row + 1 if kind else 0
            self.skipped += kind is not None
            if kind and n in losses:
                self._fault(first + n, kind, int(values[n]), losses[n], pending[n].grad_norm.item())
            elif self.in_a_row >= STUCK_ITERATIONS:
                self.end = self.end or f"no gradient was finite in the last {self.in_a_row} iterations"

    def _kind(self, verdict: int) -> str | None:
        if verdict & LOSS:
            return "nonfinite_loss"
        if verdict & NORM:  # float16's loss scale is meant to overflow now and then
            return "overflow" if self.config.dtype == "float16" else "nonfinite_gradient"
        return "spike" if verdict else None

    def _fault(self, iteration: int, kind: str, verdict: int, losses: tuple, norm: float) -> None:
        loss = sum(losses) / len(losses)
        ranks = [rank for rank, value in enumerate(losses) if not math.isfinite(value)]
        if kind == "nonfinite_loss":
            where = f" on rank {', '.join(map(str, ranks))}" if self.world.size > 1 else ""
            what = f"the loss of iteration {iteration} is {losses[ranks[0]] if ranks else loss}{where}"
        elif kind == "nonfinite_gradient":
            what = f"the gradient norm of iteration {iteration} is {norm}"
        else:
            beyond = {LOSS_SPIKE: f"the loss {loss:.4f}", NORM_SPIKE: f"the gradient norm {norm:.4g}"}
            found = " and ".join(text for bit, text in beyond.items() if verdict & bit)
            sigmas = f"{self.config.skip_spikes:g} sigmas of the last {SPIKE_WINDOW}"
            what = f"iteration {iteration} is a spike: {found} beyond {sigmas}"
        log.warning(f"{what}; its update was made on no rank")
        if self.record is not None:
            self.record.add_event(iteration, kind, loss=loss, grad_norm=norm, ranks=ranks, message=what)
        if kind != "spike" and self.config.on_nonfinite == "stop":
            self.end = self.end or f"{what}; its update was made on no rank"
        elif self.in_a_row >= self.config.max_skips:
            count = f"it is the last of {self.in_a_row} updates skipped in a row (max_skips)"
            self.end = self.end or f"{what}; {count}"

    def _advice(self) -> str:
        where = f"Resume from iteration {self.saved_at:,}" if self.saved_at else "Start again"
        advice = f". {where} with a lower learning_rate, a longer warmup_iters or dtype='bfloat16'"
        stops = self.config.on_nonfinite == "stop"
        return f"{advice}; --on_nonfinite=skip leaves such updates out" if stops else advice

    def take_skipped(self) -> int:
        skipped, self.skipped = self.skipped, 0
        return skipped
