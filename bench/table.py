"""The table of results, in Markdown: for the console and to be pasted into LOG.md; and its folder."""

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

# {column: format of its numbers, '' for text}
COLUMNS = {"variant": "", "GPUs": "", "MFU %": ".2f", "causal %": ".2f", "of ceiling %": ".1f"}
COLUMNS |= {"tokens/s (p10 to p90)": "", "per GPU": ",.0f", "x peer": ".2f", "peak GiB": ".1f"}
COLUMNS |= {"first step s": ".1f", "SM MHz": ".0f", "W": ".0f", "attention": "", "note": ""}
FIGURES = {"MFU %": "mfu_percent", "causal %": "mfu_causal_percent", "of ceiling %": "ceiling_percent"}
FIGURES |= {"per GPU": "tokens_per_sec_per_gpu", "x peer": "times_peer", "peak GiB": "max_allocated_gb"}
FIGURES |= {"first step s": "first_step_s", "SM MHz": "sm_clock_mhz", "W": "power_w"}
TEXT_COLUMNS = ("variant", "tokens/s (p10 to p90)", "attention", "note")  # the others are aligned right
LEGEND = (
    "MFU by v3 (component_summation_v2025), with the full score matrix and its causal half; of ceiling: of\n"
    "what this machine's matmuls and attention would reach alone; tokens/s: of all GPUs, median over\n"
    "repeats and percentiles over all rows; x peer: tokens/s as a multiple of the fastest peer's; peak GiB:\n"
    "allocated, of one GPU; first step: with compilation; clock and power: medians of the timed rows."
)


def table_lines(entries: list[Entry]) -> list[str]:
    """Rows for the variants, the peers and the ceilings that failed, then one line for each other ceiling."""
    rows = [row_of(entry) for entry in entries if entry.kind != "roofline" or _failures(entry)]
    measured = [(e.name, e.result) for e in entries if e.kind == "roofline" and e.result]
    ceilings = [_ceiling_line(name, result) for name, result in measured]
    return table_of(COLUMNS, rows, TEXT_COLUMNS) + [""] * bool(ceilings) + ceilings


def row_of(entry: Entry) -> dict[str, Any]:
    """{column: value} of one row; a figure that does not exist is None."""
    result: dict = (entry.result if entry.kind != "roofline" else None) or {}
    figures = {column: result.get(name) for column, name in FIGURES.items()}
    rate, attention = result.get("tokens_per_sec"), entry.facts.get("attention", "")
    if isinstance(attention, dict):
        attention = f"{attention['used']} [{attention['kernel']}]"
    return {
        "variant": entry.name,
        "GPUs": f"{entry.processes}{' (CPU)' * (entry.device == 'cpu')}",
        "tokens/s (p10 to p90)": rate and "{median:,.0f} ({p10:,.0f} to {p90:,.0f})".format(**rate),
        "attention": attention,
        "note": note(entry),
        **{name: value["median"] if isinstance(value, dict) else value for name, value in figures.items()},
    }


def note(entry: Entry) -> str:
    """Why a row has no figures, or in what it differs from what was asked for."""
    failures, notes = _failures(entry), []
    if not entry.runs:
        return "not run yet"
    if failures and not entry.result:
        return f"failed: {failures[-1]}"
    if failures:
        notes.append(f"{len(failures)} of {len(entry.runs)} runs failed: {failures[-1]}")
    notes += entry.facts.get("fallbacks", [])
    result = entry.result or {}
    reasons = [result.get("mfu_reason"), entry.device == "cuda" and result.get("gpu_reason")]
    return "; ".join([*notes, *filter(None, reasons)])


def _failures(entry: Entry) -> list[str]:
    return [run["reason"] for run in entry.runs if run["reason"]]


def _ceiling_line(name: str, result: dict) -> str:
    found = result["ceiling"]
    mfu = f"{found['mfu_percent']:.2f} % MFU, " if found["mfu_percent"] else ""
    attention = result["attention"]
    return (
        f"{name}, measured {result['measured']}: {mfu}{found['tokens_per_sec']:,.0f} tokens/s per GPU; "
        f"per micro-batch of {result['tokens']:,} tokens {1000 * found['matmul_seconds']:.1f} ms in matmuls, "
        f"{1000 * found['attention_seconds']:.1f} ms in attention ({attention['used']} "
        f"[{attention['kernel']}])"
    )


def result_line(entry: Entry) -> str:
    """How the last run of an entry ended, in one line for the console."""
    run, result = entry.runs[-1], entry.result
    if run["reason"]:
        return f"failed after {run['seconds']:.0f} s: {run['reason']}"
    assert result, entry.name  # a run that did not fail has one
    if entry.kind == "roofline":
        return f"{result['ceiling']['tokens_per_sec']:,.0f} tokens/s per GPU, {run['seconds']:.0f} s"
    mfu = f", MFU {result['mfu_percent']['median']:.2f} %" if result["mfu_percent"] else ""
    return f"{result['tokens_per_sec']['median']:,.0f} tokens/s{mfu}, {run['seconds']:.0f} s"


def document_lines(content: dict, entries: list[Entry]) -> list[str]:
    """The saved document: date, machine, command, versions, the table, and what its columns mean."""
    facts = next((e.facts for e in entries if e.kind == "variant" and e.facts), {})
    peers = sorted({e.facts["peer"] for e in entries if e.kind == "peer" and e.facts})
    lines = heading(content, f"bench suite {content['suite']}", facts, peers)
    lines += [f"Peak per GPU: {peak}." for peak in peaks(entries)]
    return [*lines, "", *table_lines(entries), "", LEGEND]


def heading(
    content: dict, title: str, facts: dict | None = None, others: list[str] | None = None
) -> list[str]:
    """Date, machine, command and versions of a document: those of the runs, where `facts` has them."""
    facts, here, git = facts or {}, content["software"], content["git"]
    machine = facts.get("hardware", {}).get("gpu_name") or here["cpu_name"]
    software = facts.get("software", here).items()
    versions = ", ".join(f"{name} {v}" for name, v in software if v and name not in ("cpu_name", "gpu_name"))
    about = "; ".join([versions, *(others or []), code_text(git)]) + "."
    return [f"## {content['date'][:10]}, {machine}, {title}", "", f"    {content['command']}", "", about]


def about_this(program: str, argv: list[str]) -> dict:
    """What a document says of the process that makes it, which opens no GPU."""
    facts = describe_hardware("cpu")
    named = {"cpu_name": facts.pop("gpu_name"), **facts}
    return {
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": shlex.join(["python", "-m", program, *argv]),
        "software": {name: value for name, value in named.items() if value is not None},
        "git": git_state(),
    }


def peaks(entries: list[Entry]) -> list[str]:
    """The peak that MFU is a share of, for each dtype in the table. A run that was given the peak of an
    earlier one says that it was stated; the first one says where it is from."""
    found: dict[str, str] = {}
    for entry in entries:
        peak = entry.facts.get("peak") if entry.kind == "variant" else None
        if peak and peak.get("tflops_per_gpu"):
            rate = f"{peak['tflops_per_gpu']:.4g} TFLOPS in {entry.dtype}"
            found.setdefault(entry.dtype, f"{rate}, {peak['source']}")
    return list(found.values())


def table_of(columns: dict[str, str], rows: list[dict[str, Any]], text_columns: Sequence[str]) -> list[str]:
    """The lines of a table with columns of {name: format of its numbers, '' for text}. A value may be
    (mean, deviation or None)."""
    texts = [[cell(row.get(name), form) for name, form in columns.items()] for row in rows]
    return aligned(list(columns), texts, text_columns, "github")


def cell(value: Any, form: str) -> str:
    mean, spread = value if isinstance(value, tuple) else (value, None)
    text = "" if mean is None else format(mean, form).replace("|", "/").replace("\n", " ")
    return text if spread is None else f"{text} ± {spread:{form.lstrip('+')}}"


# --- the folder, of every benchmark that makes a table ---


def new_folder(
    asked: str | Path | None, name: str, parent: str = "out-bench", option: str = "--output"
) -> Path:
    """The folder that the user asked for, or parent/NAME_TIME. UserError if it has results."""
    started = f"{datetime.datetime.now():%Y%m%d_%H%M%S}"
    folder = open_folder(Path(asked or Path(parent) / f"{name}_{started}").resolve())
    if (folder / "table.json").exists() or any((folder / "runs").iterdir()):
        raise UserError(
            f"{folder} has the table or the runs of a benchmark, which may still be running; choose another "
            f"{option}"
        )
    return folder


def open_folder(folder: Path) -> Path:
    """The folder, which may have results; it is made if it is not there."""
    try:
        (folder / "runs").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"the output folder {folder} cannot be written: {error}") from None
    return folder


def save_table(folder: Path, content: dict, lines: list[str], name: str = "table.json") -> None:
    """Writes this file with everything and table.md to read; each is complete at any moment."""
    texts = {name: json.dumps(content, indent=1), "table.md": "\n".join(lines) + "\n"}
    for name, text in texts.items():
        write_bytes(folder / name, text.encode("utf-8"))
