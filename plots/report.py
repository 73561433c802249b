"""Writes one HTML page about one or several runs: what ran, its figures, curves to hover over.

    python plots/report.py out-qwen3-1.8b-b200/run_*.json
    python plots/report.py out-b/run_*.json --baseline out-a/run_*.json
    python plots/report.py out-qwen3-1.8b-b200/run_*.json --profile=out-profile/qwen3/profile.json

The page is one file that needs no network and no other file, so it can be sent to anybody. A record may come
from anybody, too: its texts are escaped, and the page's own policy (Content-Security-Policy) lets a browser
run no script but plots/page.js and load nothing. The charts are matplotlib's, as images within the page.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.command import run_command  # noqa: E402
from common.durable_file import write_bytes  # noqa: E402
from common.errors import UserError  # noqa: E402
from common.json_file import read_regular  # noqa: E402
from common.text import one_line, plain  # noqa: E402
from plots import compare_runs, comparison_text, facts, figure, loss_ratio  # noqa: E402
from plots.panels import COLUMNS, line_styles, panels_of  # noqa: E402
from plots.run_record import Run  # noqa: E402

FILES = Path(__file__).resolve().parent  # of page.html, page.css and page.js


def page(sides: list[list[Run]], profile: str) -> str:
    """The page of these runs, and of the text of a profile, as HTML."""
    runs = [run for side in sides for run in side]
    names, is_one = comparison_text.run_names(sides), len(runs) == 1
    panels = panels_of(runs, [] if is_one else names, COLUMNS)
    charts = [figure.svg(panel, runs) for panel in panels if not panel.absent]
    shown = [
        {"name": name, "label": run.label, "about": facts.describe(run), "style": style}
        for run, name, style in zip(runs, names, line_styles(len(runs)), strict=True)
    ]
    verdicts = [*comparison_text.verdict_lines(sides), *loss_ratio.lines(sides, names)]
    return render(
        title=runs[0].label if is_one else f"{len(runs)} runs",
        runs=shown,
        verdicts=[line.strip() for line in verdicts],
        warnings=compare_runs.warnings_about(runs),
        tables=[(title, facts.cells(runs, rows).items()) for title, rows in facts.TABLES.items()],
        losses=facts.losses(runs, names),
        charts=[(base64.b64encode(image.encode()).decode(), chart) for image, chart in charts],
        missing=[panel.absent for panel in panels if panel.absent],
        settings=[(one_line(k), one_line(str(v), 200)) for k, v in sorted(runs[0].config.items()) if is_one],
        differences=comparison_text.differences(runs, names),
        profile=profile,
        figures=[chart | {"tokens_per_iter": is_one and runs[0].tokens_per_iter} for _, chart in charts],
    )


def profile_text(path: str) -> str:
    path = str(Path(path).expanduser().with_suffix(".txt"))
    try:
        return plain(read_regular(Path(path), 1 << 20).decode(errors="replace"))
    except (OSError, ValueError) as error:
        raise UserError(f"--profile: {path} cannot be read: {getattr(error, 'strerror', error)}") from None


def render(**content: Any) -> str:
    """page.html with this content. Jinja2 escapes each text of it."""
    try:
        from jinja2 import Environment, FileSystemLoader, StrictUndefined
        from markupsafe import Markup
    except ImportError:
        raise UserError("the page needs Jinja2: pip install -r requirements.txt") from None
    script, style = ((FILES / name).read_text(encoding="utf-8") for name in ("page.js", "page.css"))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    loader = FileSystemLoader(FILES)
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    template = environment.get_template("page.html")
    # Markup: the two files are ours and are not escaped
    return template.render(script=Markup(script), style=Markup(style), script_digest=digest, **content)


def parse_and_write(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Write one HTML page about one or several runs.")
    compare_runs.add_sides(parser)
    where = "default: RUN.html beside a single record, report.html beside the first of several"
    parser.add_argument("--output", metavar="PATH.html", help=where)
    parser.add_argument("--profile", metavar="profile.json", help="show the profile.txt of tools.profile")
    options = parser.parse_args(argv)
    target = figure.output_path(options.output, ".html") if options.output else None
    sides = compare_runs.read_sides(options)
    runs = [run for side in sides for run in side]
    default = runs[0].path.with_suffix(".html") if len(runs) == 1 else runs[0].path.with_name("report.html")
    path, content = target or default, page(sides, profile_text(options.profile) if options.profile else "")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(path, content.encode())
    print(f"wrote {plain(str(path))}")


def main(argv: list[str] | None = None) -> int:
    return run_command(parse_and_write, argv)


if __name__ == "__main__":
    sys.exit(main())
