"""Climbs from a careful setting to the fastest one, and compares each step with the best so far.

The rungs are the phases of the published guide: a careful setting; larger micro-batches, each with the least
recomputation that fits; other strategies; then CUDA Graphs, and QuACK where it is installed. A step counts if
it gains more than equal runs differ by. At the end the best and the config as it is run REPEATS times each,
and without a real difference (plots/verdict.py) the config stays. Nothing here knows how a trial is run.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from common.errors import UserError
from plots.verdict import compare, deviation
from tools.tune.settings import QUACK, Setting, Settings

GAIN = 0.005  # of a step, by one run: two equal runs differ by 0.2 to 0.4 % (plots/verdict.py)
EXTRA_GAIN = 0.02  # of a package that has to be installed wherever the run goes on
REPEATS = 3  # runs of the best and of the config, at the end
FRUGAL_TRIES = 2  # more, with less memory, of what fails in spite of the estimate

AS_IT_IS, CAREFUL, LAST = "as it is", "careful", "repeated"
BATCH, STRATEGY, GRAPHS, QUACK_RUNG = "micro-batch", "strategy", "CUDA Graphs", "QuACK"
NO_ROOM = "does not fit by the estimate, or not together with the rest"


class OutOfTime(Exception):
    """The budget is used up: no further trial is started."""


Run = dict[str, Any]  # of bench/runner.py: "reason" why it failed, or None and the "measurement"


def rows(run: Run) -> np.ndarray:
    return np.array(run["measurement"]["tokens_per_sec"])


def speed(run: Run) -> float:
    return float(np.median(rows(run)))


@dataclass(frozen=True)
class Step:
    """One line of the climb."""

    rung: str
    setting: Setting
    run: Run | None = None  # the first one; None if it was not run
    gain: float | None = None  # over the best so far, as a share
    kept: bool = False
    note: str = ""


class Ladder:
    """The climb. measure(setting) runs a trial, and raises OutOfTime."""

    def __init__(
        self,
        settings: Settings,
        measure: Callable[[Setting], Run],
        report: Callable[[Step], None] = lambda step: None,
    ):
        self.settings, self.measure, self.report = settings, measure, report
        self.runs: dict[str, list[Run]] = {}  # by the setting's text
        self.best: Setting = {}  # {} as long as nothing ran
        self.finished = self.interrupted = False  # by Ctrl-C or SIGTERM

    def climb(self) -> Setting:
        """The best setting. Raises UserError if none ran, KeyboardInterrupt if the user stopped the first."""
        try:
            self._begin()
            self._climb_batch()
            self._try_strategies()
            if "use_cuda_graphs" not in self.settings.fixed and self.settings.base.device == "cuda":
                self._try(GRAPHS, self.best["batch_size"], {"use_cuda_graphs": True})
            if "ffn_backend" not in self.settings.fixed and self.settings.has_quack:
                self._try(QUACK_RUNG, self.best["batch_size"], {"ffn_backend": QUACK}, EXTRA_GAIN)
            self._confirm()
            self.finished = True
        except OutOfTime:
            pass
        except KeyboardInterrupt:
            self.interrupted = True
        own = self.settings.as_it_is
        if not self.best and self.interrupted:
            raise KeyboardInterrupt
        if not self.best:
            raise UserError("the budget was over before a trial was finished; give a larger --budget")
        if not self.finished and self.results(own) and self._gain(self.best, own) <= 0:
            self.best = own
        return self.best

    # --- the rungs ---

    def _begin(self) -> None:
        """The config as it is comes first, so that there is a valid result from the first minute on."""
        own, careful = self.settings.as_it_is, self.settings.careful()
        if self.settings.runs_as_it_is:
            result = self._run(own)
            self.best = {} if result["reason"] else own
            self.report(Step(AS_IT_IS, own, result))
        else:
            self.report(Step(AS_IT_IS, own, note=NO_ROOM))
        result = self._run(careful)
        self.best = self.best if result["reason"] else careful
        self.report(Step(CAREFUL, careful, result, kept=not result["reason"]))
        if not self.best:
            raise UserError(f"no trial succeeded, not even the most careful one: {result['reason']}")

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

    def _confirm(self) -> None:
        """The best against the config as it is, both repeated. Without a real gain the config stays."""
        own, found = self.settings.as_it_is, self.best
        if found == own or not self.results(own):
            return
        for _, one in itertools.product(range(REPEATS - 1), (found, own)):
            self.runs[_text(one)].append(self.measure(one))
        failed = [run["reason"] for one in (found, own) for run in self.runs[_text(one)] if run["reason"]]
        gain, kept, note = self._gain(found, own), False, f"a repeat failed: {failed[0]}" if failed else ""
        sides = [[rows(run) for run in self.results(one)] for one in (found, own)]
        if min(map(len, sides)) > 1:
            verdict = compare(*sides)
            gain, kept = verdict.change, verdict.low > 0
        self.best = found if kept else own
        self.report(Step(LAST, found, self.results(found)[0], gain, kept, note))

    # --- one trial, and what it means ---

    def _try(self, rung: str, batch: int, keys: Setting | None = None, least: float = GAIN) -> bool:
        """Tries the best setting with another micro-batch and these keys, in the fastest way that fits, and
        takes it if it gains more than `least`. Says whether it did."""
        wanted = self.best | (keys or {})
        ways = list(itertools.islice(self.settings.fit(wanted, batch), 1 + FRUGAL_TRIES))
        if not ways:
            self.report(Step(rung, wanted | {"batch_size": batch}, note=NO_ROOM))
        for setting in ways:
            if setting == self.best:
                break
            result = self._run(setting)
            if result["reason"]:
                self.report(Step(rung, setting, result, note=result["reason"]))
                continue
            gain = self._gain(setting, self.best)
            noise = [deviation(rows(self.results(one)[0])) for one in (setting, self.best)]
            kept = gain > max(least, *noise)
            self.best = setting if kept else self.best
            self.report(Step(rung, setting, result, gain, kept))
            return kept
        return False

    def _run(self, setting: Setting) -> Run:
        """The first run of a setting; once in a climb."""
        runs = self.runs.setdefault(_text(setting), [])
        if not runs:
            runs.append(self.measure(setting))
        return runs[0]

    def results(self, setting: Setting) -> list[Run]:
        """Of the runs that succeeded."""
        return [result for result in self.runs.get(_text(setting), []) if not result["reason"]]

    def _gain(self, setting: Setting, other: Setting) -> float:
        speeds = [statistics.median(speed(run) for run in self.results(one)) for one in (setting, other)]
        return speeds[0] / speeds[1] - 1


def _text(setting: Setting) -> str:
    return repr(sorted(setting.items()))
