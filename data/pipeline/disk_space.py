"""Whether the token files will fit on the disk, checked before hours of work instead of failing during them.

Their size is estimated from the beginning of a few input files. The trap: the size of a compressed file says
little; a zstd archive of prose holds three times its size in text, one of code eight times.
"""

import shutil
from collections.abc import Callable
from contextlib import suppress
from itertools import islice
from pathlib import Path

from common.errors import UserError
from data.pipeline.documents import TEXT_KEY, BadRecord, read_records
from data.pipeline.units import Unit
from data.tokenizers.tiktoken_tokenizer import EncodeError
from data.tokenizers.tokenizer import Tokenizer

SAMPLED_FILES = 5
SAMPLED_CHARS = 1 << 21  # of each file, to find the characters in a byte of input
ENCODED_CHARS = 1 << 16  # of each file, to find the tokens in a character
MOST_TOKENS = 8  # in a byte of input; if even these would fit, nothing is read
GB = 1e9


def check_disk_space(
    units: list[Unit],
    folder: Path,
    tokenizer: Tokenizer,
    itemsize: int,
    size_of: Callable[[str], int],
    text_key: str = TEXT_KEY,
) -> None:
    """Warns if the token files of these units may not fit; UserError if they cannot."""
    free = shutil.disk_usage(folder).free
    sizes = [unit.size(size_of) for unit in units]
    if sum(sizes) * MOST_TOKENS * itemsize < free:
        return
    paths = dict.fromkeys(path for unit in units for path, _ in unit.files)  # once, of a divided file
    files = [path for path in paths if Path(path).is_file()]
    ratio = tokens_per_byte(files[:: -(-len(files) // SAMPLED_FILES)] if files else [], tokenizer, text_key)
    if ratio is None:  # nothing to read yet
        return
    needed = 0.0
    for unit, size in zip(units, sizes, strict=True):
        tokens = size * ratio
        needed += itemsize * (tokens if unit.max_tokens is None else min(tokens, unit.max_tokens))
    state = (
        f"the token files will take about {needed / GB:,.2f} GB and the disk of {folder} has "
        f"{free / GB:,.2f} GB free"
    )
    fix = "make room, or use another --output, or --max_tokens, or --part with disks of several machines"
    if needed > 2 * free:
        raise UserError(f"{state}; {fix}")
    if needed > 0.95 * free:
        print(f"warning: {state}. If it fills, what is complete is kept: {fix}")


def tokens_per_byte(files: list[str], tokenizer: Tokenizer, text_key: str = TEXT_KEY) -> float | None:
    """Tokens for each byte of these files, as they are on disk (compressed); None if they hold no text."""
    read: list[int] = []
    chars = encoded = tokens = 0
    for path in files:
        before, sample = chars, ""
        for _, document in read_records(Path(path), read.append, text_key):
            for text in [] if isinstance(document, BadRecord) else islice(document, 3):
                chars += len(text)
                sample += text[: ENCODED_CHARS - len(sample)]
            if chars - before >= SAMPLED_CHARS:
                break
        with suppress(EncodeError):
            tokens += len(tokenizer.encode(sample))
            encoded += len(sample)
    return chars / sum(read) * tokens / encoded if sum(read) and encoded else None
