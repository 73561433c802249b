"""The JSON and the tables of an evaluation, which are saved beside the run record."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

from common.durable_file import write_bytes, write_json
from common.text import aligned

FORMAT = 1  # of the JSON


def lines(content: dict[str, Any]) -> list[str]:
    """The heading and the tables."""
    model, precision, trained = content["model"], content["precision"], content["trained_in"]
    if "checkpoint" in model:
        named = f"checkpoint {model['checkpoint']}, iteration {model['iteration']:,}"
    else:
        named = f"weights {model['weights']}"
    low = trained.get("low_precision", "none")
    trained_in = "" if low == "none" else f"; trained with low_precision={low}, evaluated without"
    text = [named, f"computed in {precision['compute_dtype']} ({precision['attention']}){trained_in}"]
    if content["truncated_contexts"]:
        count, block_size = content["truncated_contexts"], model["block_size"]
        text.append(
            f"{count:,} contexts did not fit into block_size={block_size:,}: their first tokens were left out"
        )
    for rows in (_text_table(content["texts"]), _task_table(content["tasks"])):
        text += ["", *rows] if rows else []
    return text


def _text_table(texts: list[dict[str, Any]]) -> list[str]:
    head = ["text", "stride", "documents", "tokens", "bytes", "perplexity", "bits/byte"]
    rows = [
        [
            text["name"],
            f"{text['stride']:,}",
            *(f"{text[name]:,}" for name in ("documents", "tokens", "bytes")),
            f"{text['perplexity']:.4f}",
            f"{text['bits_per_byte']:.4f}",
        ]
        for text in texts
    ]
    return aligned(head, rows, ["text"]) if rows else []


def _task_table(tasks: dict[str, Any]) -> list[str]:
    head = ["task", "version", "n-shot", "examples", "metric", "filter", "value", "stderr"]
    rows = []
    for task, found in tasks.items():
        for name, value in found["metrics"].items():
            metric, _, filtered = name.partition(",")
            if metric.endswith("_stderr"):
                continue
            examples = (found["examples"] or {}).get("effective")
            stderr = found["metrics"].get(f"{metric}_stderr,{filtered}")
            given = (found["version"], found["n_shot"], examples)
            shown = ["" if value is None else str(value) for value in given]
            rows.append([task, *shown, metric, filtered, _number(value), _number(stderr)])
    return aligned(head, rows, ["task", "metric", "filter"]) if rows else []


def _number(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, (int, float)) else ""


def save(folder: Path, content: dict[str, Any], text: list[str]) -> Path:
    """Writes both files under a name that is new, and returns that of the JSON."""
    folder.mkdir(parents=True, exist_ok=True)
    time = f"{datetime.datetime.now():%Y%m%d_%H%M%S}"
    path, number = folder / f"evaluate_{time}.json", 1
    while path.exists():
        number += 1
        path = folder / f"evaluate_{time}_{number}.json"
    write_bytes(path.with_suffix(".txt"), ("\n".join(text) + "\n").encode())
    write_json(path, content)
    return path
