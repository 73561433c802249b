"""A preparation of three parts in this process, and what it leaves."""

from pathlib import Path

from support.helpers import TINY
from support.preparation import write_jsonl

from data.pipeline.parts import Settings
from data.pipeline.preparation import prepare
from data.pipeline.workers import Job
from data.tokenizers.file_tokenizer import FileTokenizer
from training.configuration.keys import TrainConfig


def corpus(folder: Path, files: int = 3) -> list[Path]:
    folder.mkdir(exist_ok=True)
    return [write_jsonl(folder / f"{i}.jsonl", [f"<{i}.{j}> text" for j in range(9)]) for i in range(files)]


def make(folder: Path, bpe: Path, part_bytes: int | None = 1, shard_tokens=10**6, **job) -> dict:
    """A dataset of three parts; of one if part_bytes is None."""
    files, settings = corpus(bpe.parent / "in"), Settings(256, None, 0.3, shard_tokens)
    return prepare(files, folder, FileTokenizer(bpe), settings, "test", Job(**job, part_bytes=part_bytes))


def contents(folder: Path) -> dict[str, bytes]:
    paths = (path for path in folder.rglob("*") if path.is_file())
    hidden = (".lock", ".verified.json")
    return {str(p.relative_to(folder)): p.read_bytes() for p in paths if not p.name.endswith(hidden)}


def config(folder: Path, **keys) -> TrainConfig:
    return TrainConfig(**{**TINY, "dataset": str(folder), "eval_interval": 1, **keys})
