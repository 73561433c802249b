"""Finds the files of text that a preparation reads, and says which others it leaves out and why.

A file that --input names is read, or is an error. Of a folder, what is no text is left out: a folder of notes
or of source code also holds images, programs and what an editor has left there.
"""

import codecs
import hashlib
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from common.arguments import matching_files
from common.errors import UserError
from common.json_file import open_regular
from common.text import one_line
from data.pipeline.documents import RECORD_SUFFIXES, TEXT_SUFFIXES, is_one_document

KNOWN = ", ".join(RECORD_SUFFIXES + TEXT_SUFFIXES)
SHOWN_FILES = 10  # of those that are left out for one reason; a folder may have very many
CHECKED_BYTES = 16 << 20  # of a file; what is no UTF-8 after them is an error when the file is read
COPY = "copy of another file"
NOTE = "a note beside files of many documents; name it to read it"
NOTES = re.compile(r"(readme|licen[cs]e|copying|notice|changelog|contributing)(?![a-z])", re.IGNORECASE)


@dataclass
class InputFiles:
    """What --input names: the files to read, in their order, and those that are left out."""

    files: list[Path] = field(default_factory=list)
    left_out: dict[str, list[str]] = field(default_factory=dict)  # {reason: files}

    def leave_out(self, path: Path, reason: str) -> None:
        self.left_out.setdefault(reason, []).append(str(path))


def say_files(what: str, names: Iterable[str | Path], reason: str) -> None:
    """Names input files, and says what becomes of them, and why. Prints nothing if there are none."""
    shown = sorted(one_line(str(name)) for name in names)
    more = f" and {len(shown) - SHOWN_FILES:,} more" if len(shown) > SHOWN_FILES else ""
    if shown:
        print(f"{what} {len(shown):,} ({reason}): {', '.join(shown[:SHOWN_FILES])}{more}")


def find_files(patterns: list[str]) -> list[Path]:
    """The input files in the order in which they are read; prints what is left out."""
    found = find_input(patterns)
    for reason, names in found.left_out.items():
        say_files("left out", names, reason)
    texts = [path for path in found.files if is_one_document(path)]
    if len(texts) < len(found.files):
        say_files("one document each", texts, "beside files of many; a glob such as *.jsonl leaves them out")
    return found.files


def find_input(patterns: list[str]) -> InputFiles:
    """Each pattern is a file, a folder or a glob; the files of one pattern are sorted."""
    found = InputFiles()
    for pattern in patterns:
        path = Path(pattern)
        if path.is_dir():
            found.files += sorted(_files_of_folder(path, found))
            continue
        named = [path] if path.is_file() else matching_files(pattern)
        if not named:
            hint = "; in its pattern, [[] stands for a bracket of a name" if "[" in pattern else ""
            raise UserError(f"--input {pattern}: there is no such file or folder{hint}")
        for file in named:
            if not is_read(file):
                raise UserError(
                    f"--input {file}: cannot read this kind of file; its name must end in {KNOWN}"
                )
        found.files += sorted(named)
    for path in found.files:
        if not path.is_file():
            raise UserError(f"--input {path}: a link to nothing, or not a regular file")
    found.files = list(dict.fromkeys(found.files))  # a file that two arguments name is read once
    _leave_out_copies(found)
    return found


def _leave_out_copies(found: InputFiles) -> None:
    """Leaves out files of records that are another one: links to it, and compressed forms beside it."""
    kept: set[object] = set()
    for path in [path for path in found.files if not is_one_document(path)]:
        stat = path.stat()
        names = {(stat.st_dev, stat.st_ino), path.with_name(path.name.partition(".jsonl")[0])}
        if names & kept:
            found.files.remove(path)
            found.leave_out(path, COPY)
        kept |= names


def is_read(path: Path) -> bool:
    return is_one_document(path) or path.name.endswith(RECORD_SUFFIXES)


def _files_of_folder(folder: Path, found: InputFiles) -> list[Path]:
    files: list[Path] = []
    seen: set[bytes] = set()
    walked = sorted(_walk(folder))
    beside_records = any(path.name.endswith(RECORD_SUFFIXES) for path, reason in walked if not reason)
    for path, reason in walked:
        reason = reason or _why_not_text(path, seen)
        if beside_records and is_one_document(path) and NOTES.match(path.name):
            reason = reason or NOTE
        if reason is None:
            files.append(path)
        else:
            found.leave_out(path, reason)
    if not files:
        counts = [f"{len(names):,} {reason}" for reason, names in found.left_out.items()]
        raise UserError(
            f"--input {folder}: nothing in it can be read as text (files: {', '.join(counts) or 'none'}); "
            f"names must end in {KNOWN}"
        )
    return files


def _walk(folder: Path) -> Iterator[tuple[Path, str | None]]:
    """(path, why it is left out or None) of what is in a folder at any depth. Links to folders are not
    followed: they may lead in a circle."""
    errors: list[OSError] = []
    for parent, folders, names in os.walk(folder, onerror=errors.append):
        for name in folders:
            if name.startswith("."):
                yield Path(parent, name), "hidden folder"
            elif os.path.islink(Path(parent, name)):
                yield Path(parent, name), "link to a folder"
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            yield Path(parent, name), "hidden" if name.startswith(".") else None
    for error in errors:
        yield Path(error.filename), f"cannot be read: {error.strerror}"


def _why_not_text(path: Path, seen: set[bytes]) -> str | None:
    """Why this file of a folder is left out; None if it is read. seen: hashes of the files before. Files of
    records are read in any case: what is wrong in one of them is an error later, because somebody made it as
    data."""
    if path.name.endswith(RECORD_SUFFIXES):
        return None
    if not is_one_document(path):
        return "unknown suffix"
    try:
        with open_regular(path) as file:
            content = file.read(CHECKED_BYTES)
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    except ValueError:
        return "no regular file"
    if not content:
        return "empty"
    if b"\0" in content and not content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "binary"
    try:
        codecs.getincrementaldecoder("utf-8")().decode(content, final=len(content) < CHECKED_BYTES)
    except UnicodeDecodeError:
        return "not UTF-8 text"
    # a training document that is also for validation would make the validation loss too low
    digest = hashlib.sha256(content).digest()
    if digest in seen and len(content) < CHECKED_BYTES:
        return COPY
    seen.add(digest)
    return None
