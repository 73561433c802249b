"""What every benchmark saves: a document with a table in Markdown, to be pasted into LOG.md, and JSON with
everything, in the folder of its results. A benchmark names its columns and its rows."""

from __future__ import annotations

import datetime
import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.plan import Entry
from common.durable_file import write_bytes
from common.errors import UserError
from common.text import aligned
from training.hardware.description import describe_hardware
from training.records.startup_info import code_text, git_state


def table_of(columns: dict[str, str], rows: Sequence[dict[str, Any]]) -> list[str]:
    """The lines of a table with columns of {name: format}. A value may be (mean, deviation). A format '' is
    for text, aligned on the left."""
    texts = [[cell(row.get(name), form) for name, form in columns.items()] for row in rows]
    return aligned(list(columns), texts, [name for name, form in columns.items() if not form], "github")


def cell(value: Any, form: str) -> str:
    if isinstance(value, tuple):
        return f"{value[0]:{form}} ± {value[1]:{form.lstrip('+')}}"
    return "" if value is None else format(value, form).replace("|", "/").replace("\n", " ")


def about_this(program: str, argv: list[str]) -> dict[str, Any]:
    """What a document says of the process that makes it, which opens no GPU."""
    facts = describe_hardware("cpu")
    named = {"cpu_name": facts.pop("gpu_name"), **facts}
    return {
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": shlex.join(["python", "-m", program, *argv]),
        "software": {name: value for name, value in named.items() if value is not None},
        "git": git_state(),
    }


def heading(content: dict, title: str, runs: Sequence[Entry] = ()) -> list[str]:
    """Date, machine, command and versions of a document: those of the first run that says them; and the peak
    that MFU is a share of, for each dtype."""
    ours = [run for run in runs if run.kind == "variant" and run.facts]
    facts, here = ours[0].facts if ours else {}, content["software"]
    machine = facts.get("hardware", {}).get("gpu_name") or here["cpu_name"]
    software = facts.get("software", here).items()
    versions = ", ".join(f"{name} {v}" for name, v in software if v and name not in ("cpu_name", "gpu_name"))
    peers = sorted({run.facts["peer"] for run in runs if run.kind == "peer" and run.facts})
    about = "; ".join([versions, *peers, code_text(content["git"])]) + "."
    peaks: dict[str, str] = {}  # a run that was given the peak of an earlier one says that it was stated
    for dtype, peak in ((run.dtype, run.facts["hardware"]["peak"]) for run in ours):
        if peak["tflops_per_gpu"]:
            peaks.setdefault(
                dtype, f"Peak: {peak['tflops_per_gpu']:.4g} TFLOPS in {dtype}, {peak['source']}."
            )
    about_lines = [f"    {content['command']}", "", about, *peaks.values()]
    return [f"## {content['date'][:10]}, {machine}, {title}", "", *about_lines]


def save_table(folder: Path, content: dict, lines: list[str], name: str = "table.json") -> list[str]:
    """Writes this file with everything and table.md to read, complete at any moment. Returns the lines."""
    texts = {name: json.dumps(content, indent=1), "table.md": "\n".join(lines) + "\n"}
    for file, text in texts.items():
        write_bytes(folder / file, text.encode("utf-8"))
    return lines


# --- the folder ---


def new_folder(
    asked: str | Path | None, name: str, parent: str = "out-bench", option: str = "--output"
) -> Path:
    """The folder that the user asked for, or parent/NAME_TIME. UserError if it has results."""
    folder = open_folder(asked or dated(name, parent))
    if (folder / "table.json").exists() or any((folder / "runs").iterdir()):
        has = f"{folder} has the table or the runs of a benchmark, which may still be running"
        raise UserError(f"{has}; choose another {option}")
    return folder


def dated(name: str, parent: str = "out-bench") -> Path:
    return Path(parent) / f"{name}_{datetime.datetime.now():%Y%m%d_%H%M%S}"


def open_folder(asked: str | Path) -> Path:
    """The folder, which may have results; it is made if it is not there."""
    folder = Path(asked).resolve()
    try:
        (folder / "runs").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"the output folder {folder} cannot be written: {error}") from None
    return folder
