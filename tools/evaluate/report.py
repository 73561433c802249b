"""The JSON and the tables of an evaluation, which are saved beside the run record."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

from common.durable_file import write_bytes, write_json
from common.text import aligned

FORMAT = 1  # of the JSON


def lines(about: str, content: dict[str, Any]) -> list[str]:
    """The heading and the tables."""
    low = content["trained_in"].get("low_precision", "none")
    trained = "" if low == "none" else f"; trained with low_precision={low}, evaluated without"
    text = [about, f"computed in {content['precision']['compute_dtype']}{trained}"]
    if count := content["truncated_contexts"]:
        fits = f"block_size={content['model']['block_size']:,}"
        text.append(f"{count:,} contexts did not fit into {fits}: their first tokens were left out")
    if texts := content["texts"]:
        head = ["text", "stride", "documents", "tokens", "bytes", "perplexity", "bits/byte"]
        text += ["", *aligned(head, [_text_row(found) for found in texts], ["text"])]
    if tasks := content["tasks"]:
        head = ["task", "version", "n-shot", "examples", "metric", "filter", "value", "stderr"]
        rows = [row for name, found in tasks.items() for row in _task_rows(name, found)]
        text += ["", *aligned(head, rows, ["task", "metric", "filter"])]
    return text


def _text_row(found: dict[str, Any]) -> list[str]:
    counts = (f"{found[name]:,}" for name in ("stride", "documents", "tokens", "bytes"))
    return [found["name"], *counts, f"{found['perplexity']:.4f}", f"{found['bits_per_byte']:.4f}"]


def _task_rows(task: str, found: dict[str, Any]) -> list[list[str]]:
    rows, given = [], (found["version"], found["n_shot"], (found["examples"] or {}).get("effective"))
    for name, value in found["metrics"].items():
        metric, _, filtered = name.partition(",")
        if not metric.endswith("_stderr"):
            numbers = value, found["metrics"].get(f"{metric}_stderr,{filtered}")
            shown = ["" if one is None else f"{one:.4f}" for one in numbers]
            rows.append([task, *("" if one is None else str(one) for one in given), metric, filtered, *shown])
    return rows


def save(folder: Path, content: dict[str, Any], text: list[str]) -> Path:
    """Writes both files, and returns the path of the JSON."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"evaluate_{datetime.datetime.now():%Y%m%d_%H%M%S_%f}.json"
    write_bytes(path.with_suffix(".txt"), ("\n".join(text) + "\n").encode())
    write_json(path, content)
    return path
