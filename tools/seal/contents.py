"""What a seal holds, and its digests.

    seal        the version of this form, 1
    record      the whole run record, without secrets
    code        commit, whether it was modified, and the difference if it is known for certain
    bench       the results of bench.throughput that were measured beside the run, or null
    digests     {section: SHA-256}, of parts of the above that have a name
    digest      SHA-256 of `digests`: the one number to publish

A digest is of the JSON text with sorted keys and no spaces. It finds what was changed afterwards. It does not
prove who made the seal: whoever changes a figure can make all digests anew, so publish `digest` where readers
trust it.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import re
from pathlib import Path
from typing import Any

from common.errors import UserError
from common.json_file import read_json
from common.text import shown
from training.process.redaction import redact, redact_all
from training.records.startup_info import difference_sha256, working_difference

VERSION = 1
ENVIRONMENT = ("software", "hardware", "machine", "launch", "attention")  # of startup_info
CLOCKS = ("sm_clock_mhz", "power_w", "temperature_c", "throttle", "gpu_reason")
SECTIONS = ("configuration", "environment", "data", "clocks", "rows", "code", "bench", "record")
COMMIT = re.compile(r"[0-9a-f]{40}([0-9a-f]{24})?")  # git gets it as an argument, and people copy it
RUN_NAME = re.compile(r"\w[\w.-]{0,99}", re.ASCII)  # replay names a folder after it
MAX_BYTES = 256 << 20  # of a seal; a record of a million rows has more


def make_seal(record: dict[str, Any], bench: dict[str, Any] | None = None) -> dict[str, Any]:
    """The seal of a record that check_record() accepts."""
    startup = record["startup_info"]
    content = {
        "seal": VERSION,
        "sealed": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "record": redact_all(record),
        "code": describe_code(startup.get("git") or {}),
        "bench": redact_all(bench) if bench else None,
    }
    digests = digests_of(content)
    return {**content, "digests": digests, "digest": sha256(digests)}


def describe_code(git: dict[str, Any]) -> dict[str, Any]:
    """The commit that the record names, and what was changed on top of it. The record has the digest of the
    changes, so those that are here now are the run's if theirs is the same."""
    commit, modified = git.get("commit"), git.get("modified")
    code = {"commit": commit, "modified": modified, "difference": None, "note": None}
    if commit is None:
        code["note"] = "the run's code was not in a git checkout, so nothing is known of it"
    elif modified and not git.get("difference_sha256"):
        code["note"] = "the code was modified, and the record does not say how"
    elif modified:
        difference = working_difference(commit)
        if difference is not None and difference_sha256(difference) == git["difference_sha256"]:
            code["difference"] = redact(difference)
            if code["difference"] != difference:
                code["note"] = "secrets were taken out of the difference, so its SHA-256 is not the record's"
        else:
            code["note"] = "the code was modified, and has been changed since: the difference is unknown"
    return code


def sections(seal: dict[str, Any]) -> dict[str, Any]:
    """The parts of a seal that have a digest each, by name. 'record' is the whole of it, so a change that no
    narrower section names is found, too."""
    record = seal["record"]
    startup = record["startup_info"]
    rows = record["training_iterations"]
    return {
        "configuration": record["config"],
        "environment": {name: startup.get(name) for name in ENVIRONMENT},
        "data": startup.get("data"),
        "clocks": [{name: row.get(name) for name in CLOCKS} for row in rows],
        "rows": rows,
        "code": seal["code"],
        "bench": seal["bench"],
        "record": record,
    }


def digests_of(seal: dict[str, Any]) -> dict[str, str]:
    return {name: sha256(section) for name, section in sections(seal).items()}


def sha256(content: Any) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def changed_sections(seal: dict[str, Any]) -> list[str]:
    """What was changed after sealing: names of sections, the narrowest, or what is wrong with the digests."""
    now, then = digests_of(seal), seal["digests"]
    changed = [name for name in SECTIONS if now[name] != then.get(name)]
    if len(changed) > 1 and "record" in changed:
        within = {"configuration", "environment", "data", "clocks", "rows"}
        changed = [name for name in changed if name != "record" or not within & set(changed)]
    if not changed and (set(then) != set(SECTIONS) or sha256(then) != seal["digest"]):
        changed = ["digests"]
    return changed


def code_disagreements(seal: dict[str, Any]) -> list[str]:
    """The seal's code must be that of the record: its commit, and whether it was modified."""
    git, code = seal["record"]["startup_info"].get("git") or {}, seal["code"]
    return [
        f"code.{name} is {shown(code.get(name))}, and the record's git has {shown(git.get(name))}"
        for name in ("commit", "modified")
        if code.get(name) != git.get(name)
    ]


# --- reading ---


def read_record(path: Path) -> dict[str, Any]:
    """A run record that can be sealed. Raises UserError."""
    record = _read(path, "a run record")
    check_record(record, path)
    return record


def read_seal(path: Path) -> dict[str, Any]:
    """A seal whose form is right; its digests are still to be compared. Raises UserError."""
    seal = _read(path, "a seal")
    if "seal" not in seal and "training_iterations" in seal:
        raise UserError(f"{path} is a run record, no seal; make one: python -m tools.seal {path}")
    if seal.get("seal") != VERSION:
        raise UserError(
            f"{path} is no seal that this version reads: its 'seal' is {seal.get('seal')!r}, not {VERSION}"
        )
    lacks = [name for name in ("record", "code", "digests") if not isinstance(seal.get(name), dict)]
    lacks += ["digest"] * (not isinstance(seal.get("digest"), str)) + ["bench"] * ("bench" not in seal)
    if lacks:
        raise UserError(f"{path} is cut short or damaged: it has no {', '.join(lacks)}; fetch it again")
    for name in ("modified", "difference", "note"):
        if not isinstance(seal["code"].get(name), (bool if name == "modified" else str, type(None))):
            raise UserError(f"{path} is damaged: its code.{name} is {shown(seal['code'][name])}")
    _check_commit(seal["code"], path)
    check_record(seal["record"], path)
    return seal


def check_record(record: dict[str, Any], path: Path) -> None:
    """Raises UserError if the record is not complete, or older than what can be checked."""
    startup, rows = record.get("startup_info"), record.get("training_iterations")
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise UserError(f"{path} is no run record: it has no list of training_iterations")
    needed = {"software", "hardware", "model", "flops", "data"}
    if not isinstance(startup, dict) or not isinstance(record.get("config"), dict):
        raise UserError(f"{path} is of an older version: it has no startup_info and config; run it again")
    if missing := sorted(name for name in needed if not isinstance(startup.get(name), dict)):
        raise UserError(
            f"{path} is of an older version: its startup_info has no {', '.join(missing)}; run it again"
        )
    name = record.get("run_name")
    if not (isinstance(name, str) and RUN_NAME.fullmatch(name)):
        raise UserError(f"{path} is damaged: its run_name is {shown(name)}, no name of a folder")
    for name in ("eval_steps", "attempts"):
        if not isinstance(record.get(name) or [], list):
            raise UserError(f"{path} is damaged: its {name} is {shown(record[name])}, no list")
    _check_commit(startup.get("git") or {}, path)
    if not isinstance(startup["flops"].get("totals"), dict):
        raise UserError(f"{path} is of an older version: it has no startup_info.flops.totals; run it again")
    if record.get("status") != "completed" or not isinstance(record.get("summary"), dict):
        raise UserError(
            f"{path} is not of a completed run: its status is {shown(record.get('status'))}; seal the record "
            "of a run that reached its last iteration"
        )
    if not rows:
        raise UserError(f"{path} has no row; log at least one iteration (log_interval)")


def _check_commit(git: Any, path: Path) -> None:
    """Raises UserError unless this names a commit by its full hash, or none."""
    commit = git.get("commit") if isinstance(git, dict) else git
    if commit is not None and not (isinstance(commit, str) and COMMIT.fullmatch(commit)):
        raise UserError(f"{path} is damaged: its commit is {shown(commit)}, not 40 or 64 digits of a hash")


def _read(path: Path, kind: str) -> dict[str, Any]:
    try:
        return read_json(path, MAX_BYTES)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise UserError(f"{path} is not {kind}: {error}") from None
