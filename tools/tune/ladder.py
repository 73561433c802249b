"""Climbs from a careful setting to the fastest one, and compares each step with the best so far.

The rungs are the phases of the published guide: a careful setting; larger micro-batches, each with the least
recomputation that fits; other strategies; then CUDA Graphs. A gain counts if it is more than
noise: one of CLEAR and more from one run, if its rows differ by less; a smaller one after both sides ran
REPEATS times (plots/verdict.py). Within noise the setting stays. Nothing here knows how a trial is run.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from common.errors import UserError
from plots.verdict import RUN_NOISE, compare, deviation
from tools.tune.settings import Setting, Settings

CLEAR = 0.01  # three times what equal runs differ by (plots/verdict.py)
REPEATS = 3  # runs of each side of a close comparison, and of the best and the config at the end
FRUGAL_TRIES = 2  # more, with less memory, of what runs out of it in spite of the estimate
LAUNCH_HIDDEN_S = 0.1  # launching kernels takes milliseconds, which a longer micro-step hides

AS_IT_IS, CAREFUL, LAST = "as it is", "careful", "repeated"
BATCH, STRATEGY, GRAPHS = "micro-batch", "strategy", "CUDA Graphs"
NO_ROOM = "does not fit by the estimate"


class OutOfTime(Exception):
    """The budget is used up: no further trial is started."""


@dataclass(frozen=True)
class Result:
    """What one run of a setting measured, or why it failed."""

    tokens_per_sec: tuple[float, ...] = ()  # of each row
    memory_gib: float | None = None  # the most that was allocated on a GPU
    mfu_percent: float | None = None
    reason: str | None = None
    out_of_memory: bool = False

    @property
    def speed(self) -> float:
        return statistics.median(self.tokens_per_sec)


@dataclass(frozen=True)
class Step:
    """One line of the climb."""

    rung: str
    setting: Setting
    result: Result | None = None  # of the first run; None if it was not run
    gain: float | None = None  # over the best so far, as a share
    kept: bool = False
    note: str = ""


class Ladder:
    """The climb. measure(setting) runs a trial, and raises OutOfTime."""

    def __init__(
        self,
        settings: Settings,
        measure: Callable[[Setting], Result],
        report: Callable[[Step], None] = lambda step: None,
    ):
        self.settings, self.measure, self.report = settings, measure, report
        self.steps: list[Step] = []
        self.runs: dict[str, list[Result]] = {}  # by the setting's text
        self.best: Setting = {}  # {} as long as nothing ran
        self.finished = False

    def climb(self) -> Setting:
        """The best setting. Raises UserError if none ran."""
        try:
            self._begin()
            self._climb_batch()
            self._try_strategies()
            self._try_graphs()
            self.finished = True
        except OutOfTime:
            pass
        self._compare_with_config()
        if not self.best:
            raise UserError("the budget was over before a trial was finished; give a larger --budget")
        return self.best

    # --- the rungs ---

    def _begin(self) -> None:
        """The config as it is comes first, so that there is a valid result from the first minute on."""
        own, careful = self.settings.as_it_is, self.settings.careful()
        fits = self.settings.runs_as_it_is
        self._add(Step(AS_IT_IS, own, self._run(own) if fits else None, note="" if fits else NO_ROOM))
        result = self._run(careful)
        self.best = careful if not result.reason else own if self.results(own) else {}
        self._add(Step(CAREFUL, careful, result, kept=not result.reason))
        if not self.best:
            raise UserError(f"no trial succeeded, not even the most careful one: {result.reason}")

    def _climb_batch(self) -> None:
        """First the same micro-batch with the least recomputation that fits, then twice as many sequences as
        long as that gains. Where it does not, once the middle."""
        size = self.best["batch_size"]
        self._try(BATCH, size)
        while larger := [batch for batch in self.settings.batches if batch > size]:
            doubled = min(larger, key=lambda batch: abs(batch - 2 * size))
            if not self._try(BATCH, doubled):
                between = [batch for batch in larger if batch < doubled]
                if between:
                    self._try(BATCH, min(between, key=lambda batch: abs(batch - (size * doubled) ** 0.5)))
                return
            size = doubled

    def _try_strategies(self) -> None:
        """Each with the micro-batch of the best, and with the next larger one, for which it may have room."""
        if len(self.settings.strategies) == 1:
            return
        for keys in self.settings.strategies.values():
            size = self.best["batch_size"]
            for batch in [size, *(larger for larger in self.settings.batches if larger > size)][:2]:
                self._try(STRATEGY, batch, keys)

    def _try_graphs(self) -> None:
        settings, setting = self.settings, self.best | {"use_cuda_graphs": True}
        if "use_cuda_graphs" in settings.fixed:
            return
        tokens = setting["batch_size"] * settings.base.block_size * settings.processes
        took = tokens / self.results(self.best)[0].speed
        obstacle = settings.obstacle(setting)
        if took > LAUNCH_HIDDEN_S:
            obstacle = f"a micro-step takes {took:.2f} s: nothing to gain"
        if obstacle:
            self._add(Step(GRAPHS, setting, note=obstacle))
        else:
            self._try(GRAPHS, setting["batch_size"], setting)

    def _compare_with_config(self) -> None:
        """The best against the config as it is, both repeated. Without a real gain the config stays."""
        own, found = self.settings.as_it_is, self.best
        if not found and self.results(own):
            self.best = own
        elif found and found != own and self.results(own):
            try:
                gain, kept = self._gain(found, own, always_repeat=self.finished)
            except OutOfTime:
                gain, kept, self.finished = self._ratio(found, own), False, False
            self.best = found if kept else own
            note = self._failed(found) or self._failed(own)
            self._add(Step(LAST, found, self.results(found)[0], gain, kept, note))

    # --- one trial, and what it means ---

    def _try(self, rung: str, batch: int, keys: Setting | None = None) -> bool:
        """Tries the best setting with another micro-batch and these keys, in the fastest way that fits, and
        takes it if it gains. Says whether it did."""
        wanted = self.best | (keys or {})
        ways = list(itertools.islice(self.settings.fit(wanted, batch), 1 + FRUGAL_TRIES))
        if not ways:
            self._add(Step(rung, wanted | {"batch_size": batch}, note=NO_ROOM))
        for setting in ways:
            if setting == self.best:
                break
            result = self._run(setting)
            if not result.reason:
                return self._judge(rung, setting, result)
            self._add(Step(rung, setting, result, note=result.reason))
            if not result.out_of_memory:
                break
        return False

    def _judge(self, rung: str, setting: Setting, result: Result) -> bool:
        gain, kept = self._gain(setting, self.best)
        self.best = setting if kept else self.best
        self._add(Step(rung, setting, result, gain, kept, self._failed(setting)))
        return kept

    def _gain(self, setting: Setting, other: Setting, always_repeat: bool = False) -> tuple[float, bool]:
        """(the gain, whether it is real). A gain whose repeats all failed is not."""
        gain, results = self._ratio(setting, other), [*self.results(setting), *self.results(other)]
        rows_differ_by = max(deviation(np.array(result.tokens_per_sec)) for result in results)
        if not always_repeat and (gain <= RUN_NOISE or gain >= max(CLEAR, rows_differ_by)):
            return gain, gain > RUN_NOISE
        for number, one in itertools.product(range(2, REPEATS + 1), (setting, other)):
            if len(self.runs[_text(one)]) < number:
                self.runs[_text(one)].append(self.measure(one))
        sides = [[np.array(r.tokens_per_sec) for r in self.results(one)] for one in (setting, other)]
        if min(map(len, sides)) < 2:
            return gain, False
        verdict = compare(sides[0], sides[1])
        return verdict.change, verdict.low > 0

    def _run(self, setting: Setting) -> Result:
        """The first run of a setting; once in a climb."""
        runs = self.runs.setdefault(_text(setting), [])
        if not runs:
            runs.append(self.measure(setting))
        return runs[0]

    def results(self, setting: Setting) -> list[Result]:
        """Of the runs that succeeded."""
        return [result for result in self.runs.get(_text(setting), []) if not result.reason]

    def _failed(self, setting: Setting) -> str:
        """Which run of this setting failed, and why."""
        runs = enumerate(self.runs.get(_text(setting), []), start=1)
        return next((f"run {number} failed: {run.reason}" for number, run in runs if run.reason), "")

    def _ratio(self, setting: Setting, other: Setting) -> float:
        speeds = [statistics.median(r.speed for r in self.results(one)) for one in (setting, other)]
        return speeds[0] / speeds[1] - 1

    def _add(self, step: Step) -> None:
        self.steps.append(step)
        self.report(step)


def _text(setting: Setting) -> str:
    return repr(sorted(setting.items()))
