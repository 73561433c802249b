"""The anomaly policy: decides what the update guard's verdicts mean for a run: an event, its end, or nothing.

Verdicts are read where the run waits for the device anyway: at a log row, and before an evaluation or a
checkpoint, so that nothing is saved after a fault that ends the run. By then the guard has long skipped the
updates in question. All ranks have the same verdicts and act in the same way.
"""

from __future__ import annotations

import logging
import math
import platform
from collections.abc import Callable

import torch

from common.errors import RunError
from training.configuration.keys import TrainConfig
from training.optimization.second_look import SecondLook
from training.optimization.step import StepResult
from training.optimization.update_guard import LOSS, LOSS_SPIKE, NORM, NORM_SPIKE, SECOND_LOOK, SPIKE_WINDOW
from training.process.world import World, gather_objects
from training.records.run_record import RunRecord

log = logging.getLogger("nanomfu")

MAX_PENDING = 100  # iterations whose verdicts wait for the next log row; at this number they are read at once
NAMED = 5  # tensors named in a message, at most
STUCK_ITERATIONS = 30  # consecutive overflows; float16's loss scale needs up to 16 to fall from 2^16 to 1


UNREPEATABLE = (
    ". It was the first iteration of this start: if every start ends so, these settings do not repeat their "
    "bits, because a kernel adds in a varying order, and nothing is broken; set replay_check_interval=0"
)


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

    def __init__(
        self,
        config: TrainConfig,
        world: World,
        record: RunRecord | None,
        start: int,
        second_look: SecondLook | None = None,
    ):
        """second_look: the step's."""
        self.second_look = second_look
        self.config, self.world, self.record, self.start = config, world, record, start
        self.pending: list[StepResult] = []  # of iterations whose verdicts have not been read
        self.first = start  # the first of these iterations
        self.saved_at = start or None  # iteration of the newest checkpoint
        self.skipped = 0  # updates skipped since the last log row
        self.in_a_row = 0  # consecutive updates skipped, up to the last verdict that was read
        self.end: str | None = None  # why the run must end
        self.differed_at: int | None = None  # iteration of a second look

    def wants_second_look(self, iteration: int) -> bool:
        """Also in the first iteration of this process, which shows whether the settings repeat at all."""
        interval = self.config.replay_check_interval
        return bool(interval) and (iteration == self.start or iteration % interval == 0)

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
        faults = [n for n, kind in enumerate(kinds) if kind not in (None, "overflow", "second_look")]
        losses = {}  # faulty iteration -> the loss of each rank
        if faults:
            mine = [pending[n].loss.item() for n in faults]
            losses = dict(zip(faults, zip(*gather_objects(mine, self.world), strict=True), strict=True))
        for n, kind in enumerate(kinds):
            self.in_a_row = self.in_a_row + 1 if kind else 0
            self.skipped += kind is not None
            if kind == "second_look":
                self._differed(first + n)
            elif kind and n in losses:
                self._fault(first + n, kind, int(values[n]), losses[n], pending[n].grad_norm.item())
            elif self.in_a_row >= STUCK_ITERATIONS:
                self.end = self.end or f"no gradient was finite in the last {self.in_a_row} iterations"

    def _kind(self, verdict: int) -> str | None:
        if verdict & SECOND_LOOK:  # a wrong bit may also make a loss that is no number
            return "second_look"
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

    def _differed(self, iteration: int) -> None:
        """All ranks."""
        mine = self.second_look.differences() if self.second_look else {}
        everyone = gather_objects((_place(self.world), mine), self.world)
        ranks = {rank: found for rank, (_, found) in enumerate(everyone) if found}
        wrong = [f"rank {rank} ({everyone[rank][0]}): {_list(found)}" for rank, found in ranks.items()]
        what = f"iteration {iteration} computed a micro-step twice, with different bits: {'; '.join(wrong)}"
        log.warning(f"{what}; its update was made on no rank")
        if self.record is not None:
            tensors = list(dict.fromkeys(name for found in ranks.values() for name in found))
            self.record.add_event(iteration, "second_look", ranks=list(ranks), tensors=tensors, message=what)
        self.end = self.end or f"{what}; its update was made on no rank"
        self.differed_at = iteration

    def _advice(self) -> str:
        where = f"Resume from iteration {self.saved_at:,}" if self.saved_at else "Start again"
        if self.differed_at is not None:
            advice = f". A GPU or its memory is the likely cause: test that machine. {where} without it"
            return advice if self.differed_at != self.start else advice + UNREPEATABLE
        advice = f". {where} with a lower learning_rate, a longer warmup_iters or dtype='bfloat16'"
        stops = self.config.on_nonfinite == "stop"
        return f"{advice}; --on_nonfinite=skip leaves such updates out" if stops else advice

    def take_skipped(self) -> int:
        skipped, self.skipped = self.skipped, 0
        return skipped


def _place(world: World) -> str:
    """Which hardware this process uses."""
    if world.device.type != "cuda":
        return platform.node()
    properties = torch.cuda.get_device_properties(world.device)
    return f"{platform.node()}, {properties.name}, GPU-{properties.uuid}"


def _list(found: dict[str, str]) -> str:
    named = ", ".join(f"{name} ({how})" for name, how in list(found.items())[:NAMED])
    return f"{named} and {len(found) - NAMED} more" if len(found) > NAMED else named
