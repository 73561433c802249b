"""What a seal holds: the whole record, the code that made it, and digests of its parts.

A digest is the SHA-256 of the JSON text with sorted keys and no spaces. It finds what was changed afterwards.
It does not prove who made the seal: whoever changes a figure can make all digests anew, so publish `digest`,
that of all the others, where readers trust it.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common.errors import UserError
from common.json_file import read_json
from common.text import one_line, shown
from training.process.redaction import redact, redact_all
from training.records.startup_info import GIT_ERRORS, difference_sha256, working_difference
from training.records.startup_info import code_text as code_text  # which says it of a seal, too

VERSION = 2  # 1 has digests of parts of the record, too
PARTS = ("record", "code", "bench")  # which have digests; seals of earlier versions may have results of peers
COMMIT = re.compile(r"[0-9a-f]{40}([0-9a-f]{24})?")  # git gets it as an argument, and people copy it
MAX_BYTES = 256 << 20  # of a seal; a record of a million rows has more


def make_seal(record: dict[str, Any]) -> dict[str, Any]:
    content = {
        "seal": VERSION,
        "sealed": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "record": redact_all(record),
        "code": describe_code(record["startup_info"].get("git") or {}),
    }
    digests = digests_of(content)
    return {**content, "digests": digests, "digest": sha256(digests)}


def describe_code(git: dict[str, Any]) -> dict[str, Any]:
    """The commit that the record names, and what was changed on top of it, if that is here still: then it has
    the digest that the record has."""
    commit, modified = git.get("commit"), git.get("modified")
    difference, note = None, git.get("reason")
    if not commit:
        note = note or "the record does not say which code ran"
    elif modified and not note:
        note = "the code was modified, and has been changed since: the difference is unknown"
        try:
            found = working_difference(commit)
            if difference_sha256(found) == git.get("difference_sha256"):
                difference, note = redact(found), None
        except GIT_ERRORS as error:
            note = f"the code was modified, and git does not give the difference: {error}"
    return {"commit": commit, "modified": modified, "difference": difference, "note": note}


def digests_of(seal: dict[str, Any]) -> dict[str, str]:
    return {name: sha256(seal.get(name)) for name in PARTS}


def sha256(content: Any) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def changed_parts(seal: dict[str, Any]) -> list[str]:
    """What was changed after sealing: names of parts, or 'digests'."""
    changed = [name for name, digest in digests_of(seal).items() if digest != seal["digests"].get(name)]
    return changed or ["digests"] * (sha256(seal["digests"]) != seal["digest"])


@contextlib.contextmanager
def readable(path: Path) -> Iterator[None]:
    """Around all that is done with a file that anybody may have written: what is wrong is one UserError."""
    try:
        yield
    except UserError:
        raise
    except OSError as error:
        raise UserError(f"{error.filename or path}: {error.strerror}") from None
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
        why = one_line(f"{type(error).__name__}: {error}", 200)
        raise UserError(f"{path} is no record or seal, damaged, or of another version: {why}") from None


def read_record(path: Path) -> dict[str, Any]:
    """A run record that can be sealed."""
    record = read_json(path, MAX_BYTES)
    if "seal" in record:
        raise UserError(f"{path} is a seal already; to check it: python -m tools.seal --verify {path}")
    return _checked(record, path)


def read_seal(path: Path) -> dict[str, Any]:
    """A seal whose digests are still to be compared."""
    seal = read_json(path, MAX_BYTES)
    if "seal" not in seal and "training_iterations" in seal:
        raise UserError(f"{path} is a run record, no seal; make one: python -m tools.seal {path}")
    if seal["seal"] not in (1, VERSION):
        raise UserError(f"{path} is no seal of version 1 or {VERSION}: its 'seal' is {shown(seal['seal'])}")
    _checked(seal["record"], path)
    return seal


def _checked(record: dict[str, Any], path: Path) -> dict[str, Any]:
    commit = (record["startup_info"].get("git") or {}).get("commit")
    if record["status"] != "completed" or not record["training_iterations"]:
        raise UserError(
            f"{path} is not of a completed run with rows: its status is {shown(record['status'])}; seal the "
            "record of a run that reached its last iteration"
        )
    if commit is not None and not COMMIT.fullmatch(commit):
        raise UserError(f"{path} is damaged: its commit is {shown(commit)}, not 40 or 64 digits of a hash")
    return record
