"""The samples of MDS shards as documents: text, or token ids with the lengths of the documents in them."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from common.errors import UserError
from data.pipeline.mds import read_samples
from data.pipeline.token_files import looks_wider

CHECKED_SAMPLES = 64  # of a shard, to see whether its ids have the type that is said
INTEGERS = ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64")
# of an ndarray whose type is in its first byte; others are floats, which are no ids
DTYPE_CODES = {8: "uint8", 9: "int8", 16: "uint16", 17: "int16", 32: "uint32", 33: "int32"}
DTYPE_CODES |= {64: "uint64", 65: "int64"}
SHAPE_DTYPES = ("<u1", "<u2", "<u4", "<u8")


def wrong_text(encoding: str) -> str | None:
    """What is wrong with an encoding for a column of text."""
    return None if encoding == "str" else f"has the encoding {encoding!r:.40}; text has 'str'"


def wrong_numbers(encoding: str) -> str | None:
    """What is wrong with an encoding for a column of ids or lengths."""
    if encoding == "pkl":
        return "has the encoding 'pkl', which can run any code and is never read; write the ids as 'ndarray'"
    name, *rest = encoding.split(":")
    shape = rest[1] if len(rest) == 2 else "1"
    if encoding != "bytes" and (name != "ndarray" or len(rest) > 2 or not shape.isdecimal()):
        return f"has the encoding {encoding!r:.40}; ids have 'ndarray', 'ndarray:uint32' or 'bytes'"
    if rest and rest[0] not in INTEGERS:
        return f"has the encoding {encoding!r:.40}; ids are whole numbers: {', '.join(INTEGERS)}"
    return None


def decode_numbers(encoding: str, value: memoryview, bytes_dtype: str) -> np.ndarray:
    """The numbers (N,) of a column, int64. bytes_dtype: of the encoding 'bytes'. Raises ValueError."""
    _, *rest = encoding.split(":")
    if encoding == "bytes":
        return _numbers(value, bytes_dtype, None)
    dtype = rest[0] if rest else None
    if dtype is None:
        if not len(value) or value[0] not in DTYPE_CODES:
            raise ValueError(
                f"an array of the type {value[0] if len(value) else 'none'}, not of whole numbers"
            )
        dtype, value = DTYPE_CODES[value[0]], value[1:]
    if len(rest) == 2:
        return _numbers(value, dtype, int(rest[1]))
    if not len(value) or value[0] >> 2 != 1:
        raise ValueError(f"an array of {value[0] >> 2 if len(value) else 0} axes; ids have one")
    shape_dtype = np.dtype(SHAPE_DTYPES[value[0] & 3])
    begin = 1 + shape_dtype.itemsize
    if len(value) < begin:
        raise ValueError("an array that is cut off")
    return _numbers(value[begin:], dtype, int(np.frombuffer(value[1:begin], shape_dtype)[0]))


def _numbers(value: memoryview, dtype: str, count: int | None) -> np.ndarray:
    stored = np.dtype(dtype).newbyteorder("<")
    if len(value) % stored.itemsize or count not in (None, len(value) // stored.itemsize):
        expected = f"{count:,} numbers" if count is not None else "numbers"
        raise ValueError(f"{len(value):,} bytes are not {expected} of the type {dtype}")
    return np.frombuffer(value, stored).astype(np.int64)


def read_texts(path: Path) -> Iterator[tuple[int, str | None]]:
    """(number, text) of each sample; None if it is not UTF-8."""
    for number, [(encoding, value)] in enumerate(read_samples(path, ["text"])):
        if problem := wrong_text(encoding):
            raise UserError(f"the column 'text' of {path} {problem}")
        try:
            yield number, str(value, "utf-8")
        except UnicodeDecodeError:
            yield number, None


def read_tokens(
    path: Path,
    tokens: str,
    lengths: str | None,
    split_at: int | None,
    bytes_dtype: str,
    reject: Callable[[str], None],
) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """(number, ids, lengths of the documents in them) of each sample. tokens, lengths: the columns; without
    lengths, a document ends after each id `split_at`, and where the sample ends. reject is told of samples
    whose numbers cannot be these."""
    samples = list(read_samples(path, [tokens, *([lengths] if lengths else [])]))
    _check_width(path, [column for column, *_ in samples], bytes_dtype)
    for number, columns in enumerate(samples):
        place = f"{path}, sample {number}"
        try:
            ids, *rest = (decode_numbers(*column, bytes_dtype) for column in columns)
            documents = checked_lengths(rest[0], ids) if rest else _documents(ids, split_at)
        except ValueError as error:
            reject(f"{place}: {error}")
            continue
        yield number, ids, documents


def _check_width(path: Path, columns: list[tuple[str, memoryview]], bytes_dtype: str) -> None:
    """Raises UserError if the encoding 'bytes' holds ids of a wider type, which would be other ids."""
    if columns and columns[0][0] == "bytes":
        content = b"".join(value for _, value in columns[:CHECKED_SAMPLES])
        itemsize = np.dtype(bytes_dtype).itemsize
        if looks_wider(
            _numbers(memoryview(content)[: len(content) // itemsize * itemsize], bytes_dtype, None)
        ):
            raise UserError(
                f"every second id in {path} is 0 or very small if ids are {bytes_dtype}, so they have more "
                "bits: pass another --bytes_dtype (int64 is the default)"
            )


def checked_lengths(lengths: np.ndarray, ids: np.ndarray) -> np.ndarray:
    if len(ids) > 1 and len(lengths) == len(ids) and set(np.unique(lengths)) <= {0, 1}:
        raise ValueError("the column of --lengths is a mask of zeros and ones, not the lengths of documents")
    lengths = lengths[lengths != 0]
    if (lengths < 0).any() or (lengths > len(ids)).any() or int(lengths.sum()) != len(ids):
        shown = ", ".join(map(str, lengths[:5]))
        raise ValueError(f"document lengths {shown}.. that do not add up to its {len(ids):,} tokens")
    return lengths


def _documents(ids: np.ndarray, split_at: int | None) -> np.ndarray:
    ends = np.flatnonzero(ids == split_at) + 1 if split_at is not None else np.empty(0, np.int64)
    return np.diff(np.unique(np.concatenate([[0], ends, [len(ids)]])))
