"""Writes one HTML page about one or several runs: what ran, its figures, curves to hover over, the waterfall.

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
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.command import run_command  # noqa: E402
from common.durable_file import write_bytes  # noqa: E402
from common.errors import UserError  # noqa: E402
from common.text import one_line, plain  # noqa: E402
from plots import compare_runs, comparison_text, figure, page_facts, page_waterfall, plot_single_run  # noqa: E402
from plots.compare_runs import read_sides, require_one_method, run_labels, warnings_about  # noqa: E402
from plots.figure import output_path  # noqa: E402
from plots.run_record import Run  # noqa: E402

FILES = Path(__file__).resolve().parent  # of page.html, page.css and page.js
MOST_RUNS = 40


def page(sides: list[list[Run]], profiles: list[Path]) -> str:
    """The page of these runs as HTML."""
    runs = [run for side in sides for run in side]
    names, labels = comparison_text.run_names(sides), run_labels(runs)
    is_one = len(runs) == 1
    panels = plot_single_run.panels(runs[0]) if is_one else compare_runs.panels(runs, names, further=True)
    charts = [figure.svg(panel, runs) for panel in panels if not panel.absent]
    events, more_events = page_facts.event_rows(runs, names)
    styles = compare_runs.line_styles(len(runs))
    return render(
        title=labels[0] if is_one else f"{len(runs)} runs",
        runs=[
            {"name": name, "label": label, "about": comparison_text.describe(run), "color": index % 10}
            | {"is_dashed": style["linestyle"] != "-"}
            for index, (run, name, label, style) in enumerate(zip(runs, names, labels, styles, strict=True))
        ],
        verdicts=[line.strip() for line in comparison_text.verdict_lines(sides)],
        warnings=warnings_about(runs, labels),
        tables=page_facts.tables(runs),
        charts=[(base64.b64encode(image.encode()).decode(), facts) for image, facts in charts],
        missing=[panel.absent for panel in panels if panel.absent],
        waterfalls=waterfalls(runs, profiles),
        events=events,
        more_events=more_events,
        settings=page_facts.settings(runs[0]) if is_one else [],
        differences=comparison_text.differences(sides),
        figures=[facts | {"tokens_per_iter": is_one and runs[0].tokens_per_iter} for _, facts in charts],
    )


def waterfalls(runs: list[Run], profiles: list[Path]) -> list[dict[str, Any]]:
    """Of these profiles, else of those beside the records."""
    run = runs[0] if len(runs) == 1 else None
    found = profiles or dict.fromkeys(filter(None, map(page_waterfall.find_profile, runs)))
    return [page_waterfall.read_waterfall(path, run) for path in found]


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


def write_report(
    patterns: list[str],
    baseline: list[str],
    method: str | None,
    profiles: list[str],
    output: str | None,
) -> None:
    target = output_path(output, ".html") if output else None
    sides = read_sides(patterns, baseline, method)
    runs = [run for side in sides for run in side]
    if len(runs) > MOST_RUNS:
        raise UserError(f"{len(runs)} runs are too many for one page; give at most {MOST_RUNS}")
    for run in runs:
        if not len(run.columns["iter"]):
            raise UserError(f"{one_line(str(run.path))} has no rows yet: nothing was logged; leave it out")
    require_one_method(runs)
    content = page(sides, [Path(os.path.expanduser(path)) for path in profiles])
    default = runs[0].path.with_suffix(".html") if len(runs) == 1 else runs[0].path.with_name("report.html")
    path = target or default
    path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(path, content.encode())
    print(f"wrote {plain(str(path))}")


def main(argv: list[str] | None = None) -> int:
    return run_command(parse_and_write, argv)


def parse_and_write(argv: list[str] | None) -> None:
    parser = argparse.ArgumentParser(description="Write one HTML page about one or several runs.")
    compare_runs.add_sides(parser)
    beside = "draw the waterfall of tools.profile (default: of profile.json beside a record, if there is one)"
    parser.add_argument("--profile", action="append", metavar="PROFILE.json", default=[], help=beside)
    where = "default: RUN.html beside a single record, report.html beside the first of several"
    parser.add_argument("--output", metavar="PATH.html", help=where)
    options = parser.parse_args(argv)
    write_report(options.runs, options.baseline, options.method, options.profile, options.output)


if __name__ == "__main__":
    sys.exit(main())
