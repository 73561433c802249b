"""Shows the plan of a search without starting anything: the same climb, with guesses in place of trials."""

from __future__ import annotations

from tools.tune.dimensions import DIMENSIONS, Keys
from tools.tune.report import COLUMNS, cells, line
from tools.tune.search import Ladder
from tools.tune.space import Space
from tools.tune.steps import LAST, Result, Step

GUESSED_SPEED, GUESSED_GAIN = 1e9, 1.2  # so fast that no rung is left out
ROOMY = {key for one in DIMENSIONS if one.makes_room for option in one.options for key in option.keys}
SHOWN = ("rung", "tried", "batch", "GiB est.", "note")


def plan(space: Space) -> list[Step]:
    """The steps of a climb in which every option that usually gains does, up to the micro-batch above which
    none was faster."""
    usually = {key for one in DIMENSIONS if one.usually_gains for o in one.options for key in o.keys}
    ladder: Ladder
    speed = {"best": GUESSED_SPEED}

    def guess(setting: Keys, run: int) -> Result:
        if setting == space.as_it_is or ladder.best is None:
            return Result((speed["best"],))
        changed = {key for key in setting if setting[key] != ladder.best[key]}
        if ladder.space.is_short(ladder.best) and changed & ROOMY:
            return Result((speed["best"],))
        batch = changed <= {"batch_size", "loss_chunks"} and "batch_size" in changed
        gains = space.batch_size(setting) <= space.usual_most if batch else bool(changed & usually)
        if gains:
            speed["best"] *= GUESSED_GAIN
        return Result((speed["best"] if gains else speed["best"] / GUESSED_GAIN,))

    ladder = Ladder(space, guess)
    ladder.climb()
    return [step for step in ladder.steps if step.rung != LAST]


def show_plan(space: Space) -> None:
    steps = plan(space)
    print(line(COLUMNS, SHOWN))
    for step in steps:
        print(line(cells(step, space), SHOWN))
    started = sum(step.result is not None for step in steps)
    print(
        f"About {started} trials, and repeats where two are close. What is tried depends on what gains: here "
        "larger micro-batches, fewer recomputed blocks and the like are taken to."
    )
