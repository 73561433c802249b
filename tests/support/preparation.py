"""Datasets for tests: shared texts and tokenizers, a tokenizer of 256 bytes, prepare scripts as processes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support import warm_python
from support.helpers import HANG_S, ROOT, WITHOUT_DATA

from data.pipeline.dataset_tokenizer import load_tokenizer
from data.pipeline.meta_file import read_meta
from data.pipeline.part_writer import write_part
from data.pipeline.preparation import write_dataset
from data.pipeline.token_files import stored_dtype
from data.tokenizers.char_tokenizer import CharTokenizer

# real tokenizers and texts, which are too large for the repository: docs/testing.md
SHARED_DATA = Path(os.environ.get("NANOMFU_TEST_DATA") or ROOT.parent / "shared" / "data")


CHAR = CharTokenizer("ab")


# without GPUs: a preparation uses none, and prints commands for the device that it finds
ENVIRONMENT = {
    **os.environ,
    "TIKTOKEN_CACHE_DIR": str(SHARED_DATA / "tiktoken_cache"),
    "CUDA_VISIBLE_DEVICES": "",
}


def shared(name: str) -> Path:
    path = SHARED_DATA / name
    if not path.exists():
        pytest.skip(f"{WITHOUT_DATA}: {path} is not there")
    return path


SMALL_PARTS = """
import runpy, sys
from data.pipeline import parts
parts.PART_BYTES = int(sys.argv[1])
sys.argv = sys.argv[2:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def prepare_command(name: str, *arguments, part_bytes: int | None = None, script=None) -> list[str]:
    """In the folder ROOT. part_bytes: makes several parts of a small input."""
    small = [] if part_bytes is None else ["-c", SMALL_PARTS, str(part_bytes)]
    return [sys.executable, *small, script or f"data/{name}/prepare.py", *map(str, arguments)]


def run_prepare(
    name: str, *arguments, env=ENVIRONMENT, cwd=ROOT, script=None, part_bytes=None
) -> subprocess.CompletedProcess:
    command = prepare_command(name, *arguments, part_bytes=part_bytes, script=script)
    return warm_python.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=HANG_S)


def prepare_text(*arguments, env=ENVIRONMENT) -> str:
    result = run_prepare("text", *arguments, env=env)
    assert result.returncode == 0, result.stderr
    return result.stdout


def write_small(folder: Path, **changes) -> dict:
    arguments = dict(splits={"train": [[0, 1], [1]], "val": [[1]]}, vocab_size=2, tokenizer=CHAR.meta)
    return write_dataset(folder, **{**arguments, "eot_id": None, "source": "test", **changes})


def small_bpe(folder: Path, special: bool = True) -> Path:
    """A byte-level tokenizer.json without merges: 256 bytes and an added end-of-text token."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken("<|endoftext|>", special=special)])
    tokenizer.enable_truncation(8)  # as some published files have
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def read_ids(folder: Path, split: str) -> list[int]:
    meta = read_meta(folder)
    names = [name for name in meta["files"] if name.startswith(split)]
    return np.concatenate(
        [np.fromfile(folder / name, stored_dtype(meta["dtype"])) for name in names]
    ).tolist()


def read_texts(folder: Path, split: str) -> list[str]:
    """The documents of a dataset."""
    return load_tokenizer(folder).decode(read_ids(folder, split)).split("<|endoftext|>")[:-1]


def write_jsonl(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def run_parts_here(parts, folder, tokenizer, settings, job, fast=False):
    for part in parts:
        write_part(part, folder, tokenizer, settings, job.max_bad)
