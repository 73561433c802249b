"""Finds the files of text that a preparation reads, and says which others it leaves out and why.

A file that --input names is read, or is an error. Of a folder, what is no text is left out: a folder of notes
or of source code also holds images, programs and what an editor has left there.
"""

import codecs
import hashlib
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator
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


def say_files(what: str, names: Iterable[str | Path], reason: str) -> None:
    """Names input files, and says what becomes of them, and why. Prints nothing if there are none."""
    shown = sorted(one_line(str(name)) for name in names)
    more = f" and {len(shown) - SHOWN_FILES:,} more" if len(shown) > SHOWN_FILES else ""
    if shown:
        print(f"{what} {len(shown):,} ({reason}): {', '.join(shown[:SHOWN_FILES])}{more}")


def find_files(patterns: list[str]) -> list[Path]:
    """The input files in the order in which they are read; prints what is left out."""
    files, left_out = find_input(patterns)
    for reason in dict.fromkeys(left_out.values()):
        say_files("left out", [path for path, why in left_out.items() if why == reason], reason)
    texts = [path for path in files if is_one_document(path)]
    if len(texts) < len(files):
        say_files("one document each", texts, "beside files of many; a glob such as *.jsonl leaves them out")
    return files


def find_input(patterns: list[str]) -> tuple[list[Path], dict[Path, str]]:
    """(the files in their order, {what is left out: why}). Each pattern is a file, a folder or a glob; the
    files of one pattern are sorted."""
    found: list[Path] = []
    left_out: dict[Path, str] = {}
    for pattern in patterns:
        if Path(pattern).is_dir():
            of_folder = dict(_files_of_folder(Path(pattern)))
            left_out |= {path: reason for path, reason in of_folder.items() if reason}
            if not (named := [path for path, reason in of_folder.items() if not reason]):
                counts = [f"{n:,} {reason}" for reason, n in Counter(of_folder.values()).items()]
                raise UserError(
                    f"--input {pattern}: nothing in it can be read as text (files: "
                    f"{', '.join(counts) or 'none'}); names must end in {KNOWN}"
                )
        elif not (named := [Path(pattern)] if Path(pattern).is_file() else matching_files(pattern)):
            hint = "; in its pattern, [[] stands for a bracket of a name" if "[" in pattern else ""
            raise UserError(f"--input {pattern}: there is no such file or folder{hint}")
        for file in named:
            if not is_read(file):
                raise UserError(f"--input {file}: this kind cannot be read; names must end in {KNOWN}")
            if not file.is_file():
                raise UserError(f"--input {file}: a link to nothing, or not a regular file")
        found += sorted(named)
    # a file that two arguments name is read once, and so are links to it and compressed forms beside it
    kept: set[object] = set()
    copies: dict[Path, str] = {}
    for path in [path for path in dict.fromkeys(found) if not is_one_document(path)]:
        stat = path.stat()
        names = {(stat.st_dev, stat.st_ino), path.with_name(path.name.partition(".jsonl")[0])}
        if names & kept:
            copies[path] = COPY
        kept |= names
    return [path for path in dict.fromkeys(found) if path not in copies], left_out | copies


def is_read(path: Path) -> bool:
    return is_one_document(path) or path.name.endswith(RECORD_SUFFIXES)


def _files_of_folder(folder: Path) -> Iterator[tuple[Path, str | None]]:
    """(path, why it is left out or None) of what is in a folder at any depth."""
    seen: set[bytes] = set()
    walked = sorted(_walk(folder))
    beside_records = any(path.name.endswith(RECORD_SUFFIXES) for path, reason in walked if not reason)
    for path, reason in walked:
        reason = reason or _why_not_text(path, seen)
        is_note = beside_records and is_one_document(path) and NOTES.match(path.name)
        yield path, NOTE if is_note and reason is None else reason


def _walk(folder: Path) -> Iterator[tuple[Path, str | None]]:
    """(path, why it is left out or "") by names alone. Links to folders are not followed: they may lead in a
    circle."""
    errors: list[OSError] = []
    for parent, folders, names in os.walk(folder, onerror=errors.append):
        for name in folders:
            if name.startswith("."):
                yield Path(parent, name), "hidden folder"
            elif os.path.islink(Path(parent, name)):
                yield Path(parent, name), "link to a folder"
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            yield Path(parent, name), "hidden" if name.startswith(".") else ""
    for error in errors:
        yield Path(error.filename), f"cannot be read: {error.strerror}"


def _why_not_text(path: Path, seen: set[bytes]) -> str | None:
    """Why this file of a folder is left out; None if it is read. seen: hashes of the files before. Files of
    records are read in any case: what is wrong in one of them is an error later, because somebody made it as
    data."""
    if not is_one_document(path):
        return None if is_read(path) else "unknown suffix"
    try:
        with open_regular(path) as file:
            content = file.read(CHECKED_BYTES)
        codecs.getincrementaldecoder("utf-8")().decode(content, final=len(content) < CHECKED_BYTES)
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    except UnicodeDecodeError:
        utf16 = content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
        return "not UTF-8 text" if utf16 or b"\0" not in content else "binary"
    except ValueError:
        return "no regular file"
    if not content:
        return "empty"
    if b"\0" in content:
        return "binary"
    # a training document that is also for validation would make the validation loss too low
    digest = hashlib.sha256(content).digest()
    if digest in seen and len(content) < CHECKED_BYTES:
        return COPY
    seen.add(digest)
    return None
