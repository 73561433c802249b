"""Writes README.md, the model card: from which run, data and weights an exported model comes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from common.durable_file import write_bytes
from common.json_file import read_json
from common.text import one_line
from training.checkpoints.saved_state import SavedState
from training.configuration.dataset_name import parse_dataset
from training.pretrained.folder import PREFIX, REPOSITORY

COLUMNS = "| | |\n|---|---|\n"


def write_card(folder: Path, out_dir: Path, checkpoint: str, saved: SavedState, dtype: str) -> None:
    record = _read_record(out_dir, saved.run)
    rows = {**_model(saved, dtype), **_training(saved, record), "checkpoint": f"{checkpoint} of {saved.run}"}
    table = COLUMNS + "".join(
        f"| {name} | {_cell(value)} |\n" for name, value in rows.items() if value is not None
    )
    use = (
        "```python\nfrom transformers import AutoModelForCausalLM\n\n"
        'model = AutoModelForCausalLM.from_pretrained("this folder")\n```\n'
    )
    write_bytes(folder / "README.md", f"{_header(saved)}# {_title(saved)}\n\n{table}\n{use}".encode())


def _title(saved: SavedState) -> str:
    return f"A {saved.model_config.arch} model trained with nanoMFU"


def _header(saved: SavedState) -> str:
    """What the hub reads of a card."""
    lines = ["library_name: transformers", "pipeline_tag: text-generation", "tags: [nanomfu]"]
    source = (saved.pretrained or {}).get("source", "").removeprefix(PREFIX)
    if (saved.pretrained or {}).get("commit") and (match := REPOSITORY.fullmatch(source)):
        lines.append(f"base_model: {match[1]}")
    return "---\n" + "\n".join(lines) + "\n---\n\n"


def _model(saved: SavedState, dtype: str) -> dict[str, Any]:
    model = saved.model_config
    return {
        "layers, heads, width": f"{model.n_layer}, {model.n_head}, {model.n_embd}",
        "vocabulary": f"{model.vocab_size:,}",
        "dtype": dtype,
        "began with": _origin(saved.pretrained),
    }


def _origin(pretrained: dict[str, Any] | None) -> str:
    if pretrained is None:
        return "random weights"
    source = pretrained["source"].removeprefix(PREFIX)
    if pretrained["commit"]:
        return f"{source}, commit {pretrained['commit']}"
    return f"the weights in a folder {Path(source).name}"  # a card is published, and a path is private


def _training(saved: SavedState, record: dict[str, Any]) -> dict[str, Any]:
    tokens = saved.samples_seen * saved.model_config.block_size
    loss, mfu = saved.val_loss, _field(record, "summary", "mfu_percent", "median")
    # a peak that was measured on a CPU may be half as much at the next start
    measured = _field(record, "startup_info", "hardware", "peak", "measured")
    mfu = None if measured and saved.config.get("device") == "cpu" else mfu
    return {
        "data": ", ".join(Path(name).name for name in parse_dataset(saved.config["dataset"])),
        "tokens": f"{tokens:,}{', with padding' * (saved.config.get('packing') == 'truncate')}",
        "iterations": f"{saved.iteration:,}",
        "processes": saved.world_size,
        "validation loss": None if loss is None else f"{loss:.4f}",
        "training loss": _loss(record, saved.iteration),
        "MFU": f"{mfu:.2f} %{' of a measured peak' * (measured is True)}" if isinstance(mfu, float) else None,
        "hardware": _field(record, "startup_info", "hardware", "gpu_name"),
        "code": _field(record, "startup_info", "git", "commit"),
    }


def _loss(record: dict[str, Any], iteration: int) -> str | None:
    """Of the last log row before the checkpoint."""
    rows = record.get("training_progress")
    rows = rows if isinstance(rows, list) else []
    losses = [row.get("loss") for row in rows if isinstance(row, dict) and _before(row, iteration)]
    return f"{losses[-1]:.4f}" if losses and isinstance(losses[-1], float) else None


def _before(row: dict[str, Any], iteration: int) -> bool:
    return type(row.get("iter")) is int and row["iter"] < iteration


def _read_record(out_dir: Path, run: str) -> dict[str, Any]:
    """The run record; {} if there is none that can be read: the card then says less."""
    try:
        return read_json(out_dir / f"{Path(run).name}.json")
    except (OSError, ValueError):
        return {}


def _field(content: Any, *names: str) -> Any:
    for name in names:
        content = content.get(name) if isinstance(content, dict) else None
    return content


def _cell(value: object) -> str:
    return one_line(str(value), 300).replace("|", "\\|")
