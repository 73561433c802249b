"""One PNG per run record: loss, MFU, tokens/s, step time, memory, GPU clock and power, learning rate and
gradient norm.

    python plots/plot_single_run.py out-qwen3-1.8b-b200/run_*.json

Reads only the JSON, so it works on a laptop, during a run and after a crash.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.command import run_command  # noqa: E402
from common.errors import UserError  # noqa: E402
from plots import figure, run_record  # noqa: E402
from plots.panels import AXES, COLUMNS, panels_of  # noqa: E402
from plots.run_record import Run  # noqa: E402

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plot(run: Run, x: str | None = None) -> Figure:
    """The figure of one run. What was not logged has no panel, but a line under the others that says why. x:
    of the losses, one of AXES."""
    fig = figure.panels_figure(panels_of([run], [], COLUMNS, x), [run])
    title = f"{run.label}\n{run.model} · {run.machine} · {run.precision} · {run.status}"
    fig.suptitle(figure.literal(title), fontsize=13)
    return fig


def parse_and_plot(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Draw each run record as one PNG beside it.")
    parser.add_argument("runs", nargs="+", metavar="RUN.json", help="run records, or globs of them")
    parser.add_argument("--output", metavar="PATH.png", help="where the PNG goes when there is one run")
    parser.add_argument("--x", choices=AXES, help="axis of the losses; default: iter")
    options = parser.parse_args(argv)
    paths = run_record.expand_globs(options.runs)
    if options.output and len(paths) > 1:
        raise UserError(f"--output is one file, but {len(paths)} runs were given; plot them one by one")
    target = figure.output_path(options.output) if options.output else None
    # all are read before the first PNG is written, so that a bad file stops the command here
    for run in [run_record.load_run(path) for path in paths]:
        figure.save(plot(run, options.x), target or run.path.with_suffix(".png"))


def main(argv: list[str] | None = None) -> int:
    return run_command(parse_and_plot, argv)


if __name__ == "__main__":
    sys.exit(main())
