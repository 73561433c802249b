"""Compares run records: which is faster and whether that is certain, what differs, and the curves in one PNG.

    python plots/compare_runs.py out-llama-1.36b/run_*.json out-qwen3-1.8b-b200/run_*.json --method v3
    python plots/compare_runs.py out-b/run_*.json --baseline out-a/run_*.json

Without --baseline each run is compared with the first. With it, the records after it are repeats of the
baseline, and the others are repeats of what is compared with it. Runs with held-out losses are also compared
by the time and the tokens to the baseline's final one.
MFUs by different FLOPs formulas never share an axis: that is refused unless --method recounts them by one.
Losses of different tokenizers are not drawn: a token of one is not a token of the other.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.command import run_command  # noqa: E402
from common.errors import UserError  # noqa: E402
from common.text import one_line  # noqa: E402
from plots import comparison_text, facts, figure, loss_ratio, run_record  # noqa: E402
from plots.panels import AXES, TOKENIZERS_DIFFER, line_styles, panels_of  # noqa: E402
from plots.run_record import METHODS, Run  # noqa: E402

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def warnings_about(runs: list[Run]) -> list[str]:
    """Where equal MFUs do not mean equal speed, where an MFU cannot be true, and why no loss is drawn."""
    named, found = [run for run in runs if run.mfu_methods], []
    if len(peaks := {run.peak for run in named if run.peak}) > 1:
        listing = " and ".join(sorted(peaks))
        found.append(f"WARNING: these MFUs are of different peaks ({listing}): for speed compare tokens/s")
    for run in named:
        if (spread := run_record.spread(run, "mfu_percent")) and spread[0] > 100:
            found.append(f"WARNING: {run.label}: an MFU above 100 % is an error of measurement")
    if run_record.tokenizers_differ(runs):
        found.append(f"warning: {TOKENIZERS_DIFFER}")
    return found


# --- the figure ---


def plot(runs: list[Run], labels: list[str], x: str | None = None) -> Figure:
    """What no run has logged has no panel, but a line under the others, which a legend there would cover. x:
    of the losses, one of AXES."""
    from matplotlib.lines import Line2D

    fig = figure.panels_figure(panels_of(runs, labels, ["mfu_percent", "tokens_per_sec"], x), runs)
    lines = [Line2D([], [], linewidth=2.5, **style) for style in line_styles(len(runs))]
    about = [f"{label}: {facts.describe(run)}" for run, label in zip(runs, labels, strict=True)]
    fig.legend(lines, map(figure.literal, about), loc="outside upper left", frameon=False, fontsize=9)
    return fig


# --- the command ---


def add_sides(parser: argparse.ArgumentParser) -> None:
    """The options that read_sides takes."""
    parser.add_argument("runs", nargs="+", metavar="RUN.json", help="run records, or globs of them")
    repeats = "repeats of the baseline; the records before it are then repeats of the other side"
    parser.add_argument("--baseline", nargs="+", metavar="RUN.json", default=[], help=repeats)
    names = [*METHODS, *METHODS.values()]
    parser.add_argument("--method", choices=names, help="recount every MFU by this FLOPs formula")


def read_sides(options: argparse.Namespace) -> list[list[Run]]:
    """The baseline first; without one each run is a side of its own. Raises UserError if MFUs were counted by
    different formulas."""
    paths = run_record.expand_globs(options.runs)
    sides = [[path] for path in paths]
    if options.baseline:
        sides = [run_record.expand_globs(options.baseline), paths]
        if both := {path.resolve() for path in sides[0]} & {path.resolve() for path in paths}:
            raise UserError(f"{min(both)} is on both sides; name each record once")
    runs = [[run_record.load_run(path) for path in side] for side in sides]
    if options.method:
        method = METHODS.get(options.method, options.method)
        runs = [[run_record.recounted(run, method) for run in side] for side in runs]
    users: dict[str, list[str]] = {}
    for run in (run for side in runs for run in side):
        for method in run.mfu_methods:
            users.setdefault(method, []).append(one_line(run.path.name))
    if len(users) > 1:
        listing = "; ".join(f"{method} ({', '.join(names)})" for method, names in sorted(users.items()))
        raise UserError(
            f"these runs count MFU by different formulas, which cannot share an axis: {listing}. "
            f"Add --method {'|'.join(METHODS)} to recount them all by one"
        )
    return runs


def parse_and_compare(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Say which run is faster and what differs; draw the curves.")
    add_sides(parser)
    where = "default: compare_runs.png beside the first record"
    parser.add_argument("--output", metavar="PATH.png", help=where)
    parser.add_argument("--x", choices=AXES, help="axis of the losses; default: tokens, if all runs say them")
    options = parser.parse_args(argv)
    target = figure.output_path(options.output) if options.output else None
    sides = read_sides(options)
    runs = [run for side in sides for run in side]
    names = comparison_text.run_names(sides)
    for warning in warnings_about(runs):
        print(warning, file=sys.stderr)
    verdicts = [*comparison_text.verdict_lines(sides), *loss_ratio.lines(sides, names)]
    parts = [
        comparison_text.legend(runs, names),
        comparison_text.table(runs, names),
        [part for line in verdicts for part in comparison_text.wrapped(line)],
        comparison_text.differences(runs, names),
    ]
    print("\n\n".join("\n".join(lines) for lines in parts if lines))
    titles = [f"{name}  {run.label}" for name, run in zip(names, runs, strict=True)]
    figure.save(plot(runs, titles, options.x), target or runs[0].path.with_name("compare_runs.png"))


def main(argv: list[str] | None = None) -> int:
    return run_command(parse_and_compare, argv)


if __name__ == "__main__":
    sys.exit(main())
