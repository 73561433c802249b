"""Encodes a document of any length in pieces, so that it takes little memory. The ids are the same as if the
whole text were encoded at once.
"""

import os
import re
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path

import numpy as np

from common.errors import UserError
from data.pipeline.documents import BadRecord, is_one_document
from data.tokenizers.tiktoken_tokenizer import EncodeError

# Characters encoded at once, which bounds the memory: short documents together, a long one in pieces.
PIECE_CHARS = 1 << 19
LARGE_BYTES = 8 << 20  # a file of text beyond this is written in pieces, which bounds the memory, too
UNCUT_CHARS = 1 << 20  # a document that has no place to cut for this long is a bad record
CONTEXT_CHARS = 256  # on either side of a cut, encoded to check that the cut changes no id
BOUNDARIES = [  # places to try a cut, the likeliest to change no id first: between words, lines, clauses
    re.compile(pattern)
    for pattern in (r"(?<=\w)(?=[ \n]\w)", r"(?<=\S)(?=[ \n]\S)|(?<=\n)(?=\S)", r"(?<=\w)(?=[^\w\s])")
]
TRIES = 30  # cuts to try at each kind of boundary


def find_cut(text: str, start: int, encode: Callable) -> tuple[int, int, int] | None:
    """The first cut after `start` that changes no id around it: (end of the left side, start of the right
    side, number of ids to drop from the beginning of the right side's).

    Pre-tokenizers end a word before a space, so the right side may begin with one. If the tokenizer itself
    puts a space before every text, as LLaMA 2's does, then the right side must begin after the space, or the
    id of the tokenizer's own space must be dropped.
    """
    for boundary in BOUNDARIES:
        for match in islice(boundary.finditer(text, start, start + PIECE_CHARS), TRIES):
            cut = match.start()
            left, right = text[cut - CONTEXT_CHARS : cut], text[cut : cut + CONTEXT_CHARS]
            whole, head = encode(left + right), encode(left)
            for skip, drop in ((0, 0), (1, 0), (0, 1)):
                if head + encode(right[skip:])[drop:] == whole:
                    return cut, cut + skip, drop
    return None


def encode_document(chunks: Iterable[str], encode: Callable[[str], list[int]]) -> Iterator[np.ndarray]:
    """The ids of a document, piece by piece: the same ids as if its whole text were encoded at once."""
    text, searched, drop = "", PIECE_CHARS, 0  # searched: characters from start, up to which no cut was found
    for chunk in chunks:
        text += chunk
        start = 0
        while len(text) - start > 2 * PIECE_CHARS:
            cut = find_cut(text, start + searched, encode)
            if cut is None:
                searched += PIECE_CHARS
                if searched > UNCUT_CHARS:
                    raise BadRecord(f"{UNCUT_CHARS:,} characters without a place to cut the text")
                if len(text) - start <= searched + PIECE_CHARS:
                    break
                continue
            yield np.array(encode(text[start : cut[0]])[drop:], dtype=np.uint32)
            _, start, drop = cut
            searched = PIECE_CHARS
        text = text[start:]
    yield np.array(encode(text)[drop:], dtype=np.uint32)


def read_pieces(path: str, document: Iterable[str], encode: Callable) -> Iterator[np.ndarray]:
    """The ids of a document, all encoded before this returns, so that a BadRecord is raised before anything
    is written. A large file of text is encoded while it is written, and what would be a BadRecord is a
    UserError."""

    def streamed() -> Iterator[np.ndarray]:
        try:
            yield from pieces
        except (BadRecord, EncodeError) as error:
            raise UserError(f"{path}: {error}") from None

    pieces = encode_document(document, encode)
    is_large = is_one_document(Path(path)) and os.path.getsize(path) > LARGE_BYTES
    return streamed() if is_large else iter(list(pieces))
