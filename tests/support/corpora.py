"""Corpora of several files, and the datasets that data/pipeline/ makes of them."""

from pathlib import Path

import numpy as np
from support.preparation import write_jsonl

from data.pipeline.parts import Settings
from data.pipeline.preparation import prepare
from data.pipeline.workers import Job
from data.tokenizers.file_tokenizer import FileTokenizer

HARD = [  # emoji, CRLF, text that NFC would change, digits, spaces, special tokens' names
    "naïve 👩‍👩‍👧 日本語 ok\r\nnext\r\n\r\n\tend",
    "e\u0301cole caf\u00e9 \u1e9b\u0323 A\u030a 12345678 3.14159 1,000",
    "  leading   and trailing   \n\n\n  ",
    "<|endoftext|> </s> <|end_of_text|> <|im_end|> <s>",
    "don't WE'LL it's\u00a0x\u3000y",
]


def write_corpus(folder: Path, files: int = 6, lines: int = 40) -> list[Path]:
    folder.mkdir()
    rng = np.random.default_rng(0)
    return [
        write_jsonl(
            folder / f"{i}.jsonl", [f"<{i}.{j}>" + "x y" * int(rng.integers(50)) for j in range(lines)]
        )
        for i in range(files)
    ]


def make(
    files: list[Path],
    folder: Path,
    bpe: Path,
    shard_tokens: int = 3000,
    max_tokens: int | None = None,
    **options,
) -> dict:
    settings = Settings(256, None, 0.1, shard_tokens, max_tokens)
    return prepare(files, folder, FileTokenizer(bpe), settings, "test", Job(**options, part_bytes=1))


def tokens_and_meta(folder: Path) -> dict[str, bytes]:
    paths = [*folder.glob("*.bin"), *folder.glob("meta.*"), *folder.glob("parts/*")]
    return {path.name: path.read_bytes() for path in paths}
