"""Climbs from a careful setting to the fastest one: a dimension at a time, each option compared with the best
so far.

A gain counts if it is more than noise. A gain of CLEAR and more is taken from one run, if its rows differ
by less; a smaller one after both sides have run REPEATS times, or TOP_REPEATS if that leaves it open
(plots/verdict.py); one below RUN_NOISE is dropped after one run. Within noise the setting stays as it was,
which is the one with less memory or fewer features. Where memory is short, an option that needs less of it
is taken although it gains nothing: the rungs above spend what it frees. At the end, what it replaced is
tried again. Nothing here knows how a trial is run.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import numpy as np

from common.errors import UserError
from plots.verdict import RUN_NOISE, Verdict, compare, deviation
from tools.tune.dimensions import BATCH, Dimension, Keys, Option, option_of
from tools.tune.space import Space
from tools.tune.steps import (
    AS_IT_IS,
    FIRST,
    FOR_ROOM,
    LAST,
    NO_GAIN,
    NO_MEMORY,
    NOISE,
    NOT_NEEDED,
    TOO_LARGE,
    OutOfTime,
    Result,
    Step,
)
from training.configuration.batch import is_auto

CLEAR = 0.01  # three times what equal runs differ by (plots/verdict.py)
ROOM_COSTS = 0.02  # that an option may lose which is taken for the memory that it frees
REPEATS, TOP_REPEATS = 2, 3  # runs of each side of a close comparison; of the best and the config at the end
SMALLER_TRIES = 2  # how often an option that runs out of memory is tried with half of the micro-batch
KEEPS_SPEED = 0.95  # goal 'memory': of the best speed
GOALS = ("tokens_per_sec", "memory")

Measure = Callable[[Keys, int], Result]  # of a setting and the number of its run, from 1; raises OutOfTime


class Ladder:
    """The climb. `steps` is what was tried, in order; report() is called with each."""

    def __init__(
        self,
        space: Space,
        measure: Measure,
        report: Callable[[Step], None] = lambda step: None,
        goal: str = GOALS[0],
    ):
        self.space, self.measure, self.report, self.goal = space, measure, report, goal
        self.steps: list[Step] = []
        self.runs: dict[str, list[Result]] = {}  # by the setting's text
        self.best: Keys | None = None
        # Options are not tried with a larger micro-batch than this. None: only memory limits it
        self.ceiling: int | None = None
        self.replaced: dict[str, Keys] = {}  # what an option of this dimension replaced for its room alone
        self.finished = False
        self.verdict: Verdict | None = None  # of the best against the config as it is

    def climb(self) -> Keys:
        """The best setting. Raises UserError if none ran."""
        try:
            self._as_it_is()
            self._first()
            for one in self.space.dimensions():
                if one.name == BATCH:
                    self._climb_batch()
                else:
                    self._try_options(one)
            self._try_replaced()
            self.finished = True
        except OutOfTime:
            pass
        self._finish()
        if self.best is None:
            reasons = [step.result.reason for step in self.steps if step.result and step.result.reason]
            raise UserError(
                f"no trial succeeded: {reasons[-1]}"
                if reasons
                else "the budget was over before a trial was finished; give a larger --budget"
            )
        return self.best

    # --- the rungs ---

    def _as_it_is(self) -> None:
        """First, so that there is a valid result from the first minute on."""
        setting = self.space.as_it_is
        if is_auto(self.space.base) and not self.space.fits(setting):  # train.py would refuse it, too
            return self._skip(AS_IT_IS, "", setting, TOO_LARGE)
        result = self._run(setting)
        self._add(AS_IT_IS, "", setting, result, None, False)

    def _first(self) -> None:
        setting = self.space.first()
        result = self._run(setting)
        while result.out_of_memory and self.space.batch_size(setting) > self.space.batches[0]:
            self._add(FIRST, self.batch_text(setting), setting, result, None, False)
            setting = self.space.smaller(setting)
            result = self._run(setting)
        self._add(FIRST, self.batch_text(setting), setting, result, None, not result.reason)
        if not result.reason:
            self.best, self.ceiling = setting, self.space.batch_size(setting)
        elif self.results(self.space.as_it_is):
            self.best = self.space.as_it_is
            self.ceiling = self.space.batch_size(self.best)
        else:
            raise UserError(f"no trial succeeded, not even the most careful one: {result.reason}")

    def _try_options(self, dimension: Dimension) -> None:
        # the climb began with the first option; only one for which there was no memory then may fit now
        is_new = dimension.makes_room or dimension.changes_numbers
        options, start = dimension.options if is_new else dimension.options[1:], self.best
        for option in reversed(options) if dimension.spends_room else options:
            assert self.best
            if option_of(Dimension("", (option,)), self.best):
                continue
            wanted, before = self.space.with_option(self.best, option), self.best
            took = self.space.micro_step_s(before, self.results(before)[0].speed)
            if dimension.steps_below_s and took > dimension.steps_below_s:
                self._skip(dimension.name, option.name, wanted, f"a micro-step takes {took:.2f} s: {NO_GAIN}")
                continue
            if obstacle := self.space.obstacle(wanted):
                self._skip(dimension.name, option.name, wanted, obstacle)
                continue
            most = self.ceiling or max(self.space.usual_most, self.space.batch_size(self.best))
            setting = self.space.largest(wanted, most)
            if setting is None:
                smallest = self.space.divided({**wanted, "batch_size": self.space.batches[0]})
                self._skip(dimension.name, option.name, smallest, TOO_LARGE)
                continue
            if setting != self.best:  # so few tokens are not divided into more parts
                self._try_with_less(dimension, option, setting)
            size = self.space.batch_size(setting)
            enough = self.space.batch_size(before) if self.best is setting else most
            whole = self.best is not start and size >= enough and bool(self.results(setting))
            if dimension.spends_room and whole and self.goal == GOALS[0]:
                break  # the others do more work, and a larger micro-batch is all that they could give

    def _try_with_less(self, dimension: Dimension, option: Option, setting: Keys) -> None:
        """Tries the option; if memory runs out in spite of the estimate, with smaller micro-batches."""
        before = self.best
        assert before
        for _ in range(1 + SMALLER_TRIES):
            frees = self.space.needed(setting) < self.space.needed(before)
            for_room = dimension.makes_room and frees and self.space.is_short(before)
            why = (ROOM_COSTS, FOR_ROOM) if for_room else None
            result = self._try(dimension.name, option.name, setting, why)
            if not result.out_of_memory or self.space.batch_size(setting) == self.space.batches[0]:
                break
            setting = self.space.smaller(setting)
        if self.best is not before and dimension.makes_room:
            if self.steps[-1].note == FOR_ROOM:
                self.replaced.setdefault(dimension.name, {key: before[key] for key in option.keys})
            else:
                self.replaced.pop(dimension.name, None)

    def _try_replaced(self) -> None:
        """What was replaced for room alone: the rungs after it may not have used that room."""
        for one in reversed(self.space.dimensions()):  # the last first: it came on top of the others
            if one.name not in self.replaced:
                continue
            assert self.best
            others = [option_of(d, self.best) for d in self.space.dimensions() if d.name != one.name]
            needed = {key for option in others if option for key in option.keys}
            keys = {key: value for key, value in self.replaced[one.name].items() if key not in needed}
            setting = self.space.divided({**self.best, **keys})
            option = option_of(one, setting)
            name = option.name if option else "as in the config"
            if obstacle := self.space.obstacle(setting):
                self._skip(one.name, name, setting, obstacle)
            elif self.space.fits(setting):
                self._try(one.name, name, setting, (RUN_NOISE, NOT_NEEDED))
            else:
                self._skip(one.name, name, setting, TOO_LARGE)

    def _climb_batch(self) -> None:
        """Doubles the micro-batch while that is a gain. Between one that runs and one that does not fit, it
        takes the middle."""
        failed = float("inf")  # the smallest that ran out of memory
        while True:
            assert self.best
            size = self.space.batch_size(self.best)
            larger = [
                self.space.divided({**self.best, "batch_size": b}) for b in self.space.batches if b > size
            ]
            fitting = [one for one in larger if self.space.batch_size(one) < failed and self.space.fits(one)]
            if not fitting:
                self.ceiling = None
                if larger and failed == float("inf"):
                    text = self.batch_text(larger[0])
                    self._skip(BATCH, text, larger[0], TOO_LARGE)
                return
            wanted = 2 * size if failed == float("inf") else (size * failed) ** 0.5
            setting = min(fitting, key=lambda one: abs(self.space.batch_size(one) - wanted))
            result = self._try(BATCH, self.batch_text(setting), setting)
            if result.out_of_memory:
                failed = self.space.batch_size(setting)
            elif setting is not self.best:
                self.ceiling = size
                return

    def _finish(self) -> None:
        """The best against the config as it is, both repeated. Without a real gain the config stays."""
        own = self.space.as_it_is
        if not self.results(own):
            return
        if self.best is None:
            self.best = own
        if self._text(self.best) == self._text(own):
            return
        found = self.best
        gain = self._gain(found, own)
        try:
            if self.finished:
                for setting in (found, own):
                    self._repeat(setting, TOP_REPEATS)
        except OutOfTime:
            self.finished = False
        kept, note = gain >= self._clear(found, own), "not repeated: the time is over"
        if min(len(self.results(found)), len(self.results(own))) >= REPEATS:
            self.verdict = self._compare(found, own)
            gain, note = self.verdict.change, self.verdict.text("it", "the config as it is")
            kept = self.verdict.low > 0
        if not kept:
            self.best = own
            note += "; the config stays as it is"
        self._add(LAST, "best against the config", found, self.results(found)[0], gain, kept, note)

    # --- one trial, and what it means ---

    def _try(self, rung: str, option: str, setting: Keys, unless: tuple[float, str] | None = None) -> Result:
        """Runs the setting, and makes it the best if it is a real gain. With `unless`, it also is if it loses
        less than this share, for this reason."""
        assert self.best
        result = self._run(setting)
        if result.reason:
            self._add(rung, option, setting, result, None, False)
            return result
        gain, clear, note = self._gain(setting, self.best), self._clear(setting, self.best), ""
        kept = gain >= clear
        if unless and -unless[0] < gain < clear:
            kept, note = True, unless[1]
        elif 0 < gain <= RUN_NOISE:
            note = NOISE
        elif 0 < gain < clear:
            try:
                gain, kept, note = self._confirm(setting, self.best)
            except OutOfTime:
                self._add(rung, option, setting, result, gain, False, "not repeated: the time is over")
                raise
        if kept:
            self.best = setting
        self._add(rung, option, setting, result, gain, kept, note)
        return result

    def _confirm(self, setting: Keys, other: Keys) -> tuple[float, bool, str]:
        """(gain, whether it is real, a note), by repeats of both. A third one only if two leave it open."""
        for times in (REPEATS, TOP_REPEATS):
            for one in (setting, other):
                self._repeat(one, times)
            if min(len(self.results(one)) for one in (setting, other)) < times:
                return self._gain(setting, other), False, "a repeat failed"
            verdict = self._compare(setting, other)
            if verdict.low > 0:
                return verdict.change, True, ""
            if verdict.change <= RUN_NOISE:
                break
        return verdict.change, False, NOISE

    def _run(self, setting: Keys) -> Result:
        """The first run of a setting; once in a climb."""
        runs = self.runs.setdefault(self._text(setting), [])
        if not runs:
            runs.append(self.measure(setting, 1))
        return runs[0]

    def _repeat(self, setting: Keys, times: int) -> None:
        runs = self.runs[self._text(setting)]
        while len(runs) < times:
            runs.append(self.measure(setting, len(runs) + 1))

    def results(self, setting: Keys) -> list[Result]:
        """Of the runs that succeeded."""
        return [result for result in self.runs.get(self._text(setting), []) if not result.reason]

    def _clear(self, setting: Keys, other: Keys) -> float:
        """The gain that one run shows: more than runs differ by, and than the rows of these runs do."""
        results = [*self.results(setting), *self.results(other)]
        return max(CLEAR, *(deviation(np.array(result.tokens_per_sec)) for result in results))

    def _gain(self, setting: Keys, other: Keys) -> float:
        speeds = [statistics.median(r.speed for r in self.results(one)) for one in (setting, other)]
        return speeds[0] / speeds[1] - 1

    def _compare(self, setting: Keys, other: Keys) -> Verdict:
        sides = [[np.array(r.tokens_per_sec) for r in self.results(one)] for one in (setting, other)]
        return compare(sides[0], sides[1])

    def _skip(self, rung: str, option: str, setting: Keys, note: str) -> None:
        self._add(rung, option, setting, None, None, False, note)

    def _add(
        self,
        rung: str,
        option: str,
        setting: Keys,
        result: Result | None,
        gain: float | None,
        kept: bool,
        note: str = "",
    ) -> None:
        if result and result.reason:
            note = NO_MEMORY if result.out_of_memory else result.reason
        step = Step(rung, option, setting, self.space.needed(setting), result, gain, kept, note)
        self.steps.append(step)
        self.report(step)

    # --- what came out ---

    def batch_text(self, setting: Keys) -> str:
        return f"{setting['batch_size']} x {self.space.base.block_size}"

    def chosen(self) -> Keys:
        """The best by the goal. 'memory': the least memory that keeps KEEPS_SPEED of the best speed."""
        assert self.best
        if self.goal != "memory":
            return self.best
        least = KEEPS_SPEED * statistics.median(r.speed for r in self.results(self.best))
        tried = [step.setting for step in self.steps if step.result and self.results(step.setting)]
        fast = [one for one in tried if statistics.median(r.speed for r in self.results(one)) >= least]
        return min([self.best, *fast], key=self.memory)

    def memory(self, setting: Keys) -> float:
        """GiB, measured; by the estimate on a CPU, where none is measured."""
        measured = [result.memory_gib for result in self.results(setting) if result.memory_gib is not None]
        return max(measured) if measured else self.space.needed(setting)

    @staticmethod
    def _text(setting: Keys) -> str:
        return repr(sorted(setting.items()))
