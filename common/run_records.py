"""Finds and reads run records.

While a run goes on, it writes a journal, run_X.jsonl. A line is {section: entry}, or an object of other
fields, of which the last value counts, or {"resumed_at": n}: what is there of iteration n and later was done
again. run_X.json is rendered from it now and then, and at the end, when the journal is removed. Whoever wants
every row of a run that goes on, or was killed, renders the journal here.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from common.json_file import open_regular, parse_object, read_json

SECTIONS = ("training_iterations", "training_progress", "eval_steps", "checkpoints", "events")
# sections in which iteration n comes before update n, and so belongs to a checkpoint of n
BEFORE_THE_UPDATE = ("eval_steps", "checkpoints")
ENTRY = re.compile(rb'\{"(%s)": (\{"iter": (\d+), .*\})\}\n' % "|".join(SECTIONS).encode())
JOURNAL = ".jsonl"  # ends the name of a record's journal
MAX_BYTES = 64 << 30  # of a record: far above any


def run_records(out_dir: Path) -> list[Path]:
    """In the order of their names, so the newest is last."""
    return sorted(path for path in out_dir.glob("run_*.json") if not is_old_seal(path))


def is_old_seal(path: Path) -> bool:
    """Whether this is a seal of the earlier name, run_*.seal.json, beside the record that it seals."""
    return path.name.endswith(".seal.json")


def load_record(path: Path) -> dict[str, Any]:
    """The record at this path, with all that its run wrote. Raises OSError or ValueError."""
    # the journal first: a run that ends meanwhile completes the JSON, then removes it
    journal = list(_journal(path.with_suffix(JOURNAL)))
    record = read_json(path, MAX_BYTES)
    if not journal or record.get("end_time") is not None:
        return record
    try:
        if journal[0].startswith(b'{"run_name": '):
            return json.loads(b"".join(render(journal)))
        known = record.get("journal_lines", 0)
        for line in map(parse_object, journal):  # an earlier version numbered them, the JSON has the first
            number, section, entry = map(line.get, ("line", "section", "entry"))
            if type(number) is int and number >= known and section in SECTIONS and isinstance(entry, dict):
                record.setdefault(section, []).append(entry)
    except (AttributeError, TypeError):
        raise ValueError("it is not what a run writes") from None
    return record


def read_record(path: Path) -> dict[str, Any]:
    """A record with all that its run wrote, and with what those of earlier versions lack. Raises OSError, or
    ValueError if a run would not have written it."""
    record = load_record(path)
    names = "run_name", "start_time", "end_time", "status"
    record.setdefault("attempts", [{"attempt": 1, **{name: record.get(name) for name in names}}])
    try:
        for section in SECTIONS:
            record.setdefault(section, [])
        for _, entry in [*entries_of(record), *entries_of(record.setdefault("superseded", {}))]:
            is_of_one = entry.setdefault("attempt", 1) <= len(record["attempts"])
            if not is_of_one or type(entry["iter"]) is not int or entry["iter"] < 0:
                raise ValueError("an entry belongs to no iteration, or to no attempt")
        if any(type(each["run_name"]) is not str for each in record["attempts"]):
            raise ValueError("an attempt has no name")
        (record["startup_info"].get("launch") or {}).get("id")
        # earlier versions listed rows without a loss or an MFU there, too
        progress = record["training_progress"]
        record["training_progress"] = [row for row in progress if None not in (row["loss"], row["mfu"])]
    except (AttributeError, KeyError, TypeError):  # something is no object, or no list
        raise ValueError("it is not what a run writes") from None
    return record


def entries_of(lists: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """(section, entry) of each that a record, or its `superseded`, lists."""
    return ((section, entry) for section in SECTIONS for entry in lists.get(section, []))


def _journal(path: Path) -> Iterator[bytes]:
    """Its complete lines. A kill or a full disk may have cut off the last one."""
    with contextlib.suppress(OSError, ValueError), open_regular(path) as file:  # there may be none
        for line in file:
            with contextlib.suppress(ValueError):
                if parse_object(line):
                    yield line


def render(journal: Iterable[bytes]) -> Iterator[bytes]:
    """The text of the JSON. Each entry has a line of its own and is not parsed, so that this is quick."""
    record: dict[str, Any] = {}
    found: dict[str, list[tuple[int, bytes]]] = {section: [] for section in SECTIONS}
    again: dict[str, list[bytes]] = {}  # entries of what was done again
    for line in journal:
        if entry := ENTRY.fullmatch(line):
            found[entry[1].decode()].append((int(entry[3]), entry[2]))
            continue
        record |= json.loads(line)
        if (start := record.pop("resumed_at", None)) is not None:
            for section, entries in found.items():
                end = start + (section in BEFORE_THE_UPDATE)
                found[section] = [entry for entry in entries if entry[0] < end]
                if lost := [text for iteration, text in entries if iteration >= end]:
                    again.setdefault(section, []).extend(lost)
    lists = {section: [text for _, text in entries] for section, entries in found.items()}
    record |= lists | {"superseded": again, "summary": record.pop("summary", None)}
    for number, (name, value) in enumerate(record.items()):
        yield b'%s\n "%s": ' % (b"," if number else b"{", name.encode())
        if name in SECTIONS:
            yield b"[\n  %s\n ]" % b",\n  ".join(value) if value else b"[]"
        elif name == "superseded":
            listed = (b'"%s": [%s]' % (section.encode(), b", ".join(value[section])) for section in value)
            yield b"{%s}" % b", ".join(listed)
        else:
            yield json.dumps(value, indent=1).replace("\n", "\n ").encode()
    yield b"\n}\n"


def plain(value: Any) -> Any:
    """The same content as JSON that every reader takes: NaN and infinity, which JSON lacks, are null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value
