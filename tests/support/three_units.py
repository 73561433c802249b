"""A preparation of three units in this process, and what it leaves."""

from pathlib import Path

from support.helpers import TINY
from support.preparation import write_jsonl

from data.pipeline.preparation import Job, prepare
from data.pipeline.units import Settings
from data.tokenizers.file_tokenizer import FileTokenizer
from training.configuration.keys import TrainConfig


def corpus(folder: Path, files: int = 3) -> list[Path]:
    folder.mkdir(exist_ok=True)
    return [write_jsonl(folder / f"{i}.jsonl", [f"<{i}.{j}> text" for j in range(9)]) for i in range(files)]


def make(folder: Path, bpe: Path, shard_tokens: int = 10**6, **job) -> dict:
    """A dataset of three units, of which all tokens fit in one file unless shard_tokens is small."""
    files = corpus(bpe.parent / "in")
    settings = Settings(256, None, 0.3, shard_tokens)
    return prepare(files, folder, FileTokenizer(bpe), settings, "test", Job(**job), None, 1)


def contents(folder: Path) -> dict[str, bytes]:
    paths = (path for path in folder.rglob("*") if path.is_file())
    hidden = (".lock", ".verified.json")
    return {str(p.relative_to(folder)): p.read_bytes() for p in paths if not p.name.endswith(hidden)}


def config(folder: Path, **keys) -> TrainConfig:
    return TrainConfig(**{**TINY, "dataset": str(folder), "eval_interval": 1, **keys})
