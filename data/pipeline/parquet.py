"""Reads the rows of a .parquet file, with memory that does not grow with the size of the file.

By default, pyarrow holds the whole column of a row group, which is gigabytes in some files; here it reads one
page after another. The trap: a page can have any size that its writer chose, and only the page's own header
says which. So all headers are read first; they are in Thrift's compact encoding.
"""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from common.errors import UserError

PAGE_BYTES = 128 << 20  # largest page, decompressed; writers make pages of about 1 MiB
BATCH_BYTES = 32 << 20  # pages that one batch of rows may hold in memory
READ_BYTES = 1 << 20
UNCOMPRESSED_SIZE, COMPRESSED_SIZE = 2, 3  # numbers of these fields in a page header


class NoColumn(Exception):
    """The file does not have this column. columns: those that it has; with_text: the largest first."""

    def __init__(self, columns: list[str], with_text: list[str]):
        self.columns, self.with_text = columns, with_text


def read_values(
    path: Path,
    max_bytes: int,
    progress: Callable[[int], None],
    column_name: str,
    span: tuple[int, int] | None = None,
) -> Iterator[tuple[int, str | None]]:
    """(number, text) of every row; None if the row has none, or more than max_bytes, or it is not UTF-8.
    span: bytes of the file, whose even share of the row groups is read; None: all."""
    try:
        import pyarrow.parquet
    except ImportError:
        raise UserError(f"{path} needs the pyarrow library: pip install pyarrow") from None
    size = path.stat().st_size
    with pyarrow.parquet.ParquetFile(path, buffer_size=READ_BYTES, pre_buffer=False) as file:
        total = max(1, file.metadata.num_rows)
        count, (first, last) = file.metadata.num_row_groups, span or (0, size)
        groups = [group for group in range(count) if first <= size * group // count < last]
        done = sum(file.metadata.row_group(group).num_rows for group in range(groups[0] if groups else 0))
        page = largest_page(path, file.metadata, column_name, groups)
        options = {"batch_size": max(1, min(64, BATCH_BYTES // max(1, page))), "row_groups": groups}
        for batch in file.iter_batches(**options, columns=[column_name], use_threads=False):
            column = batch.column(0)
            column = column.dictionary_decode() if hasattr(column, "dictionary_decode") else column
            for number, value in enumerate(column, start=done + 1):
                yield number, _text(value, max_bytes)
            progress(size * (done + len(column)) // total - size * done // total)
            done += len(column)


def _text(value: Any, max_bytes: int) -> str | None:
    if not value.is_valid or not hasattr(value, "as_buffer") or value.as_buffer().size > max_bytes:
        return None
    try:
        text = value.as_py()
    except UnicodeDecodeError:
        return None
    return text if isinstance(text, str) else None


def largest_page(path: Path, metadata: Any, column_name: str, groups: Iterable[int]) -> int:
    """Bytes of the text column's largest page in these row groups, decompressed. UserError if that is above
    PAGE_BYTES."""
    largest = 0
    with open(path, "rb") as file:
        for group in groups:
            columns = [metadata.row_group(group).column(i) for i in range(metadata.num_columns)]
            chunk = next((column for column in columns if column.path_in_schema == column_name), None)
            if chunk is None:
                texts = [column for column in columns if column.physical_type == "BYTE_ARRAY"]
                texts.sort(key=lambda column: -column.total_uncompressed_size)
                raise NoColumn(
                    [column.path_in_schema for column in columns], [column.path_in_schema for column in texts]
                )
            position = chunk.data_page_offset
            if chunk.has_dictionary_page and chunk.dictionary_page_offset:
                position = min(position, chunk.dictionary_page_offset)
            end = position + chunk.total_compressed_size
            while position < end:
                file.seek(position)
                header = _read_struct(file)
                largest = max(largest, header[UNCOMPRESSED_SIZE])
                position = file.tell() + header[COMPRESSED_SIZE]
    if largest > PAGE_BYTES:
        raise UserError(
            f"{path} has a page of {largest >> 20} MiB, and at most {PAGE_BYTES >> 20} MiB are read at once; "
            f"write it again without documents of that size, and with pages of 1 MiB (pyarrow's default)"
        )
    return largest


# --- Thrift's compact encoding ---


def _read_struct(file: BinaryIO) -> dict[int, Any]:
    """{number: value} of a struct's fields; the value is None if it is not an integer. As in JSON, the file
    decides the type of a value."""
    values, number = {}, 0
    while head := _byte(file):
        number = number + (head >> 4) if head >> 4 else _integer(file)
        values[number] = _read_value(file, head & 15)
    return values


def _read_value(file: BinaryIO, kind: int) -> int | None:
    if kind in (1, 2):  # true, false: no bytes follow
        return None
    if kind == 3:
        return _byte(file)
    if kind in (4, 5, 6):
        return _integer(file)
    if kind in (7, 8):
        file.seek(8 if kind == 7 else _varint(file), 1)
    elif kind == 12:
        _read_struct(file)
    elif kind in (9, 10):
        head = _byte(file)
        for _ in range(head >> 4 if head >> 4 < 15 else _varint(file)):
            _byte(file) if head & 15 in (1, 2) else _read_value(file, head & 15)
    else:
        raise ValueError(f"a page header holds the type {kind}")
    return None


def _byte(file: BinaryIO) -> int:
    byte = file.read(1)
    if not byte:
        raise ValueError("a page header is cut off")
    return byte[0]


def _varint(file: BinaryIO) -> int:
    value = shift = 0
    while True:
        byte = _byte(file)
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return value


def _integer(file: BinaryIO) -> int:
    value = _varint(file)
    return (value >> 1) ^ -(value & 1)
