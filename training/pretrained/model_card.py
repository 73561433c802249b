"""Writes README.md, the model card: from which run, data and weights an exported model comes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from common.durable_file import write_bytes
from common.text import one_line
from training.checkpoints.saved_state import SavedState
from training.configuration.dataset_name import parse_dataset
from training.pretrained.folder import PREFIX, REPOSITORY

COLUMNS = "| | |\n|---|---|\n"


def write_card(folder: Path, checkpoint: str, saved: SavedState, dtype: str) -> None:
    rows = {**_model(saved, dtype), **_training(saved), "checkpoint": f"{checkpoint} of {saved.run}"}
    lines = [f"| {name} | {_cell(value)} |\n" for name, value in rows.items() if value is not None]
    table = COLUMNS + "".join(lines)
    use = (
        "```python\nfrom transformers import AutoModelForCausalLM\n\n"
        'model = AutoModelForCausalLM.from_pretrained("this folder")\n```\n'
    )
    title = f"# A {saved.model_config.arch} model trained with nanoMFU"
    write_bytes(folder / "README.md", f"{_header(saved)}{title}\n\n{table}\n{use}".encode())


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


def _training(saved: SavedState) -> dict[str, Any]:
    tokens = saved.samples_seen * saved.model_config.block_size
    return {
        "data": ", ".join(Path(name).name for name in parse_dataset(saved.config["dataset"])),
        "tokens": f"{tokens:,}{', with padding' * (saved.config.get('packing') == 'truncate')}",
        "iterations": f"{saved.iteration:,}",
        "processes": saved.world_size,
        "validation loss": None if saved.val_loss is None else f"{saved.val_loss:.4f}",
    }


def _cell(value: object) -> str:
    return one_line(str(value), 300).replace("|", "\\|")
