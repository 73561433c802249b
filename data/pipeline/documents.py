"""Reads documents from files on disk: .txt, .jsonl, .jsonl.gz, .jsonl.zst and .parquet, one file at a time.

A .txt file is one document, read in chunks; each line of .jsonl or row of .parquet is one, {"text": ...}, and
so is each sample of an MDS shard (data/pipeline/mds.py).
What cannot be read becomes a BadRecord and is never left out in silence. The trap: zstandard's own reader
takes the middle of a frame for its end, so an archive that was cut off reads like a shorter one; ZstdFile
below knows the difference.
"""

import glob
import gzip
import io
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from common.errors import UserError
from common.text import plain
from data.pipeline.mds import is_shard
from data.pipeline.mds_samples import read_texts
from data.pipeline.parquet import read_values

SUFFIXES = (".txt", ".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet")
LINE_BYTES = 64 << 20  # longest JSON line; decoding it takes up to nine times that in memory
SHOWN_FILES = 20  # of those that are left out; a folder may have very many
CHUNK_CHARS = 1 << 20  # of a .txt file, read at once


class BadRecord(Exception):
    """A record that holds no document: where it is, and what is wrong with it."""


def say_left_out(where: str, paths: Iterable[Path], reason: str) -> None:
    """Names the input files that are not read, and says why. Prints nothing if there are none."""
    names = sorted(str(path) for path in paths)
    more = f" and {len(names) - SHOWN_FILES:,} more" if len(names) > SHOWN_FILES else ""
    if names:
        print(plain(f"{where}left out {', '.join(names[:SHOWN_FILES])}{more} ({reason})"))


def find_files(patterns: list[str]) -> list[Path]:
    """The input files in the order in which they are read. Each pattern is a file, a folder or a glob; the
    files of one pattern are sorted."""
    files: list[Path] = []
    for pattern in patterns:
        path = Path(pattern)
        found = [path] if path.is_file() else [Path(name) for name in glob.glob(pattern, recursive=True)]
        if path.is_dir():
            within = [file for file in path.rglob("*") if not file.is_dir()]
            found = [file for file in within if file.name.endswith(SUFFIXES)]
            others = [file.relative_to(path) for file in within if not file.name.endswith(SUFFIXES)]
            say_left_out(f"--input {pattern}: ", others, f"not {', '.join(SUFFIXES)}")
            notes = [file for file in found if file.suffix == ".txt"]
            if 0 < len(notes) < len(found):  # otherwise a README.txt beside the data would become a document
                names = [file.relative_to(path) for file in notes]
                reason = "a note beside the other files? Name a .txt file that is text with a glob"
                say_left_out(f"--input {pattern}: ", names, reason)
                found = [file for file in found if file.suffix != ".txt"]
        if not found:
            raise UserError(
                f"--input {pattern}: no such file, or nothing in it ends in {', '.join(SUFFIXES)}"
            )
        files += sorted(found)
    for path in files:
        if not path.name.endswith(SUFFIXES):
            raise UserError(
                f"--input {path}: cannot read this kind of file; it must be {', '.join(SUFFIXES)}"
            )
        if not path.is_file():
            raise UserError(f"--input {path}: a link to nothing, or not a regular file")
    return list(dict.fromkeys(files))  # a file that two arguments name is read once


class ZstdFile(io.RawIOBase):
    """Decompresses one or more zstd frames; EOFError if the last one is cut off."""

    def __init__(self, raw: io.BufferedReader, path: Path):
        try:
            import zstandard
        except ImportError:
            raise UserError(f"{path} needs the zstandard library: pip install zstandard") from None
        self.raw, self.output = raw, memoryview(b"")
        self.frame: zstandard.ZstdDecompressionObj | None = None
        self.decompressor = zstandard.ZstdDecompressor(max_window_size=1 << 31)  # as zstd --long needs

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        while not self.output:
            data = self.frame.unused_data if self.frame is not None and self.frame.eof else b""
            data = data or self.raw.read(16 << 10)  # few bytes, because they may unpack to very many
            if not data:
                if self.frame is not None and not self.frame.eof:
                    raise EOFError("the zstd archive ends in the middle of a frame")
                return 0
            if self.frame is None or self.frame.eof:
                self.frame = self.decompressor.decompressobj()
            self.output = memoryview(self.frame.decompress(data))
        count = min(len(buffer), len(self.output))
        buffer[:count] = self.output[:count]
        self.output = self.output[count:]
        return count


def is_disk_error(error: Exception) -> bool:
    """Whether the system failed to read, which may work later; otherwise the content of the file is wrong."""
    return isinstance(error, OSError) and error.errno is not None


def open_lines(raw: io.BufferedReader, path: Path) -> io.BufferedReader | gzip.GzipFile:
    if path.suffix == ".gz":
        return gzip.open(raw)
    return io.BufferedReader(ZstdFile(raw, path), 1 << 20) if path.suffix == ".zst" else raw


def parse_line(line: bytes, place: str) -> str:
    try:
        text = json.loads(line)["text"]
        text.encode("utf-8")  # fails for half a surrogate pair, which is valid JSON but not text
        return text
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BadRecord(
            f'{place} is not a JSON object with a "text" string ({type(error).__name__}: {error})'
        ) from None


def read_lines(path: Path, progress: Callable[[int], None]) -> Iterator[tuple[int, str | BadRecord]]:
    number = position = 0
    with open(path, "rb") as raw:
        lines = open_lines(raw, path)
        while True:
            place = f"{path}, line {number + 1}"
            try:
                line = lines.readline(LINE_BYTES)
                long = len(line) == LINE_BYTES and not line.endswith(b"\n")
                if long:
                    while (rest := lines.readline(LINE_BYTES)) and not rest.endswith(b"\n"):
                        pass
            except UserError:
                raise
            except Exception as error:  # gzip, zlib and zstandard each raise errors of their own
                if is_disk_error(error):
                    raise
                reason = f"{path} is damaged after line {number}: {type(error).__name__}: {error}"
                yield number + 1, BadRecord(reason)
                return
            progress(raw.tell() - position)
            position = raw.tell()
            if not line:
                return
            number += 1
            if long:
                yield number, BadRecord(f"{place} is longer than {LINE_BYTES >> 20} MiB")
            elif line.strip():
                try:
                    yield number, parse_line(line, place)
                except BadRecord as bad:
                    yield number, bad


def read_rows(path: Path, progress: Callable[[int], None]) -> Iterator[tuple[int, str | BadRecord]]:
    number = 0
    try:
        for text in read_values(path, LINE_BYTES, progress):
            number += 1
            bad = BadRecord(f"{path}, row {number} has no text, or none of at most {LINE_BYTES >> 20} MiB")
            yield number, bad if text is None else text
    except (UserError, MemoryError):
        raise
    except Exception as error:  # pyarrow raises many kinds
        if is_disk_error(error):
            raise
        reason = f"{path} is damaged after row {number}: {type(error).__name__}: {error}"
        yield number + 1, BadRecord(reason)


def read_mds(path: Path, progress: Callable[[int], None]) -> Iterator[tuple[int, str | BadRecord]]:
    """A damaged shard is a UserError and no BadRecord: not one of its samples is used."""
    for number, text in read_texts(path):
        yield number, BadRecord(f"{path}, sample {number} is not UTF-8 text") if text is None else text
    progress(path.stat().st_size)


def read_text(path: Path, progress: Callable[[int], None]) -> Iterator[str]:
    """The chunks of a .txt file, with \\n for \\r\\n."""
    position = 0
    try:
        with open(path, "rb") as raw, io.TextIOWrapper(raw, encoding="utf-8-sig", newline="") as file:
            while chunk := file.read(CHUNK_CHARS):
                if chunk.endswith("\r"):
                    chunk += file.read(1)
                yield chunk.replace("\r\n", "\n")
                progress(raw.tell() - position)
                position = raw.tell()
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text: {error}") from None


def read_records(
    path: Path, progress: Callable[[int], None] = lambda count: None
) -> Iterator[tuple[int, Iterable[str] | BadRecord]]:
    """(number, document) of every record that is not blank. A document is its text: a list of one string, or
    an iterator of chunks for a .txt file.

    progress is told how many more bytes of the file were read. A damaged archive gives the documents before
    the damage, and then one BadRecord.
    """
    if path.suffix == ".txt":
        yield 1, read_text(path, progress)
        return
    if not path.stat().st_size:
        yield 1, BadRecord(f"{path} is empty: 0 bytes, as a copy that failed leaves behind")
        return
    for number, text in _reader(path)(path, progress):
        yield number, text if isinstance(text, BadRecord) else [text]


def _reader(path: Path) -> Callable:
    if is_shard(path):
        return read_mds
    return read_rows if path.suffix == ".parquet" else read_lines
