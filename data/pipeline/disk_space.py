"""Whether the disk has room for the token files: asked before hours of work, not by them.

What the input will become is estimated from the beginning of a few of its files. The trap: the sizes of
compressed files say little; a zstd archive of prose holds three times its size in text, one of code eight.
"""

import shutil
from collections.abc import Callable
from itertools import islice
from pathlib import Path

from data.pipeline.documents import BadRecord, read_records
from data.pipeline.token_files import DataError, EncodeError
from data.pipeline.units import Unit

SAMPLED_FILES = 5
SAMPLED_CHARS = 1 << 21  # of each
ENCODED_CHARS = 1 << 16  # of each
MOST_TOKENS = 8  # for a byte of input; where so many would fit, nothing is read
GB = 1e9


def check_room(units: list[Unit], folder: Path, tokenizer, itemsize: int, size_of: Callable[[str], int]):
    """Warns where the token files of these units will hardly fit, and refuses where they cannot."""
    free = shutil.disk_usage(folder).free
    sizes = [sum(size_of(path) for path, _ in unit.files) for unit in units]
    if sum(sizes) * MOST_TOKENS * itemsize < free:
        return
    files = [path for unit in units for path, _ in unit.files if Path(path).is_file()]
    ratio = tokens_per_byte(files[:: -(-len(files) // SAMPLED_FILES)] if files else [], tokenizer)
    if ratio is None:  # nothing to read yet
        return
    tokens = [size * ratio for size in sizes]
    shares = [unit.max_tokens for unit in units]
    tokens = sum(t if share is None else min(t, share) for t, share in zip(tokens, shares, strict=True))
    needed = tokens * itemsize
    state = (
        f"the token files will take about {needed / GB:,.2f} GB and the disk of {folder} has "
        f"{free / GB:,.2f} GB free"
    )
    fix = "another --output, or --max_tokens, or --part with disks of several machines"
    if needed > 2 * free:
        raise DataError(f"{state}; make room, or use {fix}")
    if needed > 0.95 * free:
        print(f"warning: {state}. If it fills, what is complete is kept: make room, or use {fix}")


def tokens_per_byte(files: list[str], tokenizer) -> float | None:
    """Of the input as it is on disk; None if there is no text."""
    read = chars = encoded = tokens = 0

    def advance(size: int):
        nonlocal read
        read += size

    for path in files:
        of_file, sample = 0, ""
        for _, document in read_records(Path(path), advance):
            if isinstance(document, BadRecord):
                continue
            for text in islice(document, 3):
                of_file += len(text)
                sample += text[: ENCODED_CHARS - len(sample)]
            if of_file >= SAMPLED_CHARS:
                break
        chars += of_file
        try:
            tokens += len(tokenizer.encode(sample))
            encoded += len(sample)
        except EncodeError:
            continue
    return chars / read * tokens / encoded if read and encoded else None
