"""Reads the text of the rows of a .parquet file, with memory for one page and a few rows.

pyarrow holds the whole column of a row group by default, which is gigabytes in some files; without pre_buffer
and with a buffer it reads one page after another. The trap: damage in one row group says nothing of the
others, so each is read by itself, and only its rows from the damage on are lost.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common.errors import UserError
from data.pipeline.bad_records import BadRecord, MissingColumn
from data.pipeline.decompression import is_disk_error

BATCH_BYTES = 32 << 20  # of the rows that are decoded at once, by the average size of a row
MOST_ROWS = 64  # of these
READ_BYTES = 1 << 20
TEXT_TYPES = ("string", "large_string", "string_view", "binary", "large_binary", "binary_view")


def read_values(
    path: Path, max_bytes: int, column_name: str | None, span: tuple[int, int] | None = None
) -> Iterator[tuple[int, str | BadRecord]]:
    """(number, text) of every row, of a column of strings or of UTF-8 bytes; without a column_name, the whole
    row as JSON. span: bytes of the file, whose even share of the row groups is read; None: all."""
    try:
        import pyarrow.parquet
    except ImportError:
        raise UserError(f"{path} needs the pyarrow library: pip install pyarrow") from None
    options: dict[str, Any] = {"buffer_size": READ_BYTES, "pre_buffer": False}
    size = path.stat().st_size
    with pyarrow.parquet.ParquetFile(path, page_checksum_verification=True, **options) as file:
        column = _find_column(path, file, column_name) if column_name else 0
        count, (first, last) = file.metadata.num_row_groups, span or (0, size)
        groups = [group for group in range(count) if first <= size * group // count < last]
        done = sum(file.metadata.row_group(group).num_rows for group in range(groups[0] if groups else 0))
        for group in groups:
            for value in _read_group(file, group, column, column_name):
                done += 1
                yield done, _text(value, max_bytes, f"{path}, row {done}", column_name is None)


def _find_column(path: Path, file: Any, name: str) -> int:
    """Its number among the columns that hold values. Raises UserError."""
    schema, metadata = file.schema_arrow, file.metadata
    types = {field.name: str(getattr(field.type, "value_type", field.type)) for field in schema}
    leaves = {metadata.schema.column(i).path: i for i in range(metadata.num_columns)}
    texts = [each for each in types if each in leaves and types[each] in TEXT_TYPES]
    if name in texts:
        return leaves[name]
    if metadata.num_row_groups:
        group = metadata.row_group(0)
        texts.sort(key=lambda each: -group.column(leaves[each]).total_uncompressed_size)
    if name in types:
        kind, fix = schema.field(name).type, f"; use --text_key={texts[0]}" if texts else ""
        raise UserError(f"the column {name!r:.100} of {path} holds {kind!s:.200}, not text{fix}")
    raise UserError(str(MissingColumn(path, name, types, texts)))


def _read_group(file: Any, group: int, column: int, name: str | None) -> Iterator[Any]:
    """The values of a row group; for each row from the batch with damage on, why it is unreadable."""
    rows = file.metadata.row_group(group).num_rows
    row_bytes = file.metadata.row_group(group).column(column).total_uncompressed_size // max(1, rows)
    batch_size, done = max(1, min(MOST_ROWS, BATCH_BYTES // max(1, row_bytes))), 0
    try:
        for batch in file.iter_batches(batch_size, [group], name and [name], use_threads=False):
            values = batch.column(0) if name else batch.to_struct_array()
            yield from values.dictionary_decode() if hasattr(values, "dictionary_decode") else values
            done += len(values)
    except Exception as error:  # pyarrow raises many kinds
        if isinstance(error, MemoryError) or is_disk_error(error):
            raise
        damage = f"cannot be read, as this part of the file is damaged: {type(error).__name__}: {error}"
        yield from [damage] * (rows - done)


def _text(value: Any, max_bytes: int, place: str, row: bool) -> str | BadRecord:
    if isinstance(value, str):
        return BadRecord(f"{place} {value}")
    if row:
        return json.dumps(_without_nulls(value.as_py()), ensure_ascii=False, default=str)
    if value.is_valid and value.as_buffer().size <= max_bytes:
        try:
            return str(value.as_buffer(), "utf-8")
        except UnicodeDecodeError:
            pass
    return BadRecord(f"{place} has no text, or none of at most {max_bytes >> 20} MiB")


def _without_nulls(value: Any) -> Any:
    """In a column, what one row's object does not have is null if another row's has it."""
    if isinstance(value, dict):
        return {name: _without_nulls(each) for name, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value
