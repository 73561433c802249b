"""Reads documents from files on disk: text and source code, .jsonl, .jsonl.gz, .jsonl.zst and .parquet.

A file of text is one document, read in chunks; each line of .jsonl or row of .parquet is one, {"text": ...},
and so is each sample of an MDS shard (data/pipeline/mds.py).
What cannot be read becomes a BadRecord and is never left out in silence.
"""

import hashlib
import io
import json
import re
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from common.errors import UserError
from data.pipeline.bad_records import BadRecord, MissingColumn
from data.pipeline.decompression import is_disk_error, open_decompressed
from data.pipeline.mds import read_samples
from data.pipeline.parquet import read_values

# A file with one of these is one document, read as it stands: also the tags of .html, the markup of .md.
PROSE_SUFFIXES = (".txt", ".md", ".rst", ".tex", ".html")
SOURCE_SUFFIXES = (
    *(".py", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".cs", ".java", ".kt", ".scala", ".js", ".ts", ".go"),
    *(".rs", ".swift", ".rb", ".php", ".pl", ".lua", ".r", ".jl", ".hs", ".sql", ".sh"),
)
TEXT_SUFFIXES = PROSE_SUFFIXES + SOURCE_SUFFIXES
RECORD_SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet")  # many documents each
TEXT_KEY = "text"  # the name in a JSON line, or the column of .parquet, that holds a document
LINE_BYTES = 64 << 20  # longest JSON line; decoding it takes up to nine times that in memory
CHUNK_CHARS = 1 << 20  # of a file of text, read at once
# int() refuses more than 4,300 digits, which a field beside the text may have; no number is a document
DECODER = json.JSONDecoder(parse_int=float)


def is_one_document(path: Path) -> bool:
    """Whether a file of this name is one document, as .txt and source code are."""
    return path.suffix.lower() in TEXT_SUFFIXES


def parse_line(line: bytes, place: str, text_key: str | None) -> str:
    try:
        if text_key is None:
            record = json.dumps(json.loads(line), ensure_ascii=False)
            record.encode("utf-8")  # fails for half a surrogate pair
            return record
        values = DECODER.decode(line.decode(json.detect_encoding(line), "surrogatepass"))
        if isinstance(values, dict) and text_key not in values:
            texts = [name for name, value in values.items() if isinstance(value, str)]
            raise MissingColumn(place, text_key, values, sorted(texts, key=lambda name: -len(values[name])))
        text = values[text_key]
        text.encode("utf-8")  # fails for half a surrogate pair, which is valid JSON but not text
        return text
    except RecursionError:
        raise BadRecord(f"{place} has brackets that are nested too deeply to be read") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        wanted = f'a JSON object with a "{text_key}" string' if text_key else "JSON of text"
        raise BadRecord(f"{place} is not {wanted} ({type(error).__name__}: {error})") from None


def read_lines(
    path: Path, text_key: str | None, span: tuple[int, int] | None
) -> Iterator[tuple[int, str | BadRecord]]:
    number = 0
    with open(path, "rb") as raw:
        lines = open_decompressed(raw, {".gz": "gz", ".zst": "zstd"}.get(path.suffix))
        if span and span[0]:  # a line belongs to the part of the file in which it begins
            raw.seek(span[0] - 1)
            _skip_line(raw)
        while span is None or raw.tell() < span[1]:
            place = f"{path}, byte {raw.tell():,}" if span else f"{path}, line {number + 1}"
            if not (line := lines.readline(LINE_BYTES)):
                return
            number += 1
            if len(line) == LINE_BYTES and not line.endswith(b"\n"):
                _skip_line(lines)
                yield number, BadRecord(f"{place} is longer than {LINE_BYTES >> 20} MiB")
            elif line.strip():
                try:
                    yield number, parse_line(line, place, text_key)
                except BadRecord as bad:
                    yield number, bad


def _skip_line(lines: BinaryIO) -> None:
    while (rest := lines.readline(LINE_BYTES)) and not rest.endswith(b"\n"):
        pass


def read_mds(path: Path) -> Iterator[tuple[int, str | BadRecord]]:
    """The column is always "text". A damaged shard is a UserError and no BadRecord: not one of its samples is
    used."""
    for number, [(_, value)] in enumerate(read_samples(path, ["text"])):
        try:
            yield number, str(value, "utf-8")
        except UnicodeDecodeError:
            yield number, BadRecord(f"{path}, sample {number} is not UTF-8 text")


def read_text(path: Path) -> Iterator[str]:
    """The chunks of a file of text, with \\n for \\r\\n. Raises BadRecord."""
    try:
        with open(path, "rb") as raw, io.TextIOWrapper(raw, encoding="utf-8-sig", newline="") as file:
            while chunk := file.read(CHUNK_CHARS):
                if chunk.endswith("\r"):
                    chunk += file.read(1)
                yield chunk.replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise BadRecord(f"{path} is not UTF-8 text: {error}") from None


def read_records(
    path: Path, text_key: str | None = TEXT_KEY, span: tuple[int, int] | None = None
) -> Iterator[tuple[int, Iterable[str] | BadRecord]]:
    """(number, document) of every record that is not blank. A document is its text: a list of one string, or
    an iterator of chunks for a file of text. span: of one part of a large file, (its first byte, the byte
    after its last); spans that together cover the file give each record once. A damaged archive gives the
    documents before the damage, and then one BadRecord. Without a text_key, the whole record is the
    document, as JSON.
    """
    if is_one_document(path):
        try:
            deque(read_text(path), maxlen=0)  # nothing of a bad file may be used before it is known to be bad
            yield 1, read_text(path)
        except BadRecord as bad:
            yield 1, bad
        return
    if not path.stat().st_size:
        yield 1, BadRecord(f"{path} is empty: 0 bytes, as a copy that failed leaves behind")
        return
    if re.search(r"\.mds(\.\w+)?$", path.name):
        records = read_mds(path)
    elif path.suffix == ".parquet":
        records = read_values(path, LINE_BYTES, text_key, span)
    else:
        records = read_lines(path, text_key, span)
    number = 0
    try:
        for number, text in records:
            yield number, text if isinstance(text, BadRecord) else [text]
    except (UserError, MemoryError):
        raise
    except Exception as error:  # pyarrow, gzip, zlib and zstandard each raise errors of their own
        if is_disk_error(error):
            raise
        reason = f"{path} is damaged after record {number}: {type(error).__name__}: {error}"
        yield number + 1, BadRecord(reason)


def hash_content(content: Iterable[bytes]) -> int:
    """64 bits, of a document in any number of pieces."""
    digest = hashlib.blake2b(digest_size=8)
    for piece in content:
        digest.update(piece)
    return int.from_bytes(digest.digest(), "big")


def hash_document(path: str, document: Iterable[str]) -> int:
    """Of its text. A file that is one document is read for it, since its chunks come only once."""
    chunks = document if isinstance(document, list) else read_text(Path(path))
    return hash_content(chunk.encode() for chunk in chunks)
