"""Removes secrets from what is shown or shared (the console, the log, the run record, a tracker): logins in
URLs, and the values of environment variables whose names say that they are secret. No code of ours writes the
environment; but a setting, or the message of another library's exception, may contain one of its values.

The trap is a setting that is equal to such a value by chance, as a dataset's name may be. What programs read
back must hold the truth: state.json of a checkpoint, by which a resume compares settings and sample.py opens
the dataset, is only without logins; and the names by which the attempts of a run find each other stay.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable

MARK = "***"
LOGIN = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*://)[^\s/?#'\"]+@")  # user:password@, or a token@
SECRET_NAME = re.compile(
    r"(^|_)(KEY|API_?KEY|TOKEN|SECRET|PASS|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?|AUTH)(_|$)", re.IGNORECASE
)


def without_logins(text: str) -> str:
    return LOGIN.sub(rf"\1{MARK}@", text) if "@" in text else text


def redact(text: str) -> str:
    text = without_logins(text)
    for name, value in _secrets():
        if value in text:
            text = text.replace(value, f"{MARK}{name}{MARK}")
    return text


def redact_all(value, redact: Callable[[str], str] = redact, keep: tuple[str, ...] = ()):
    """The same content with every string redacted, but for what is under the keys in `keep`."""
    if isinstance(value, dict):
        return {key: item if key in keep else redact_all(item, redact, keep) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [redact_all(item, redact, keep) for item in value]
    return redact(value) if isinstance(value, str) else value


@functools.cache
def _secrets() -> list[tuple[str, str]]:
    """(name, value), the longest value first, because one may contain another. Read only once: a config file
    that sets some has been executed before anything is written."""
    found = [item for item in os.environ.items() if SECRET_NAME.search(item[0]) and _is_a_secret(item[1])]
    return sorted(found, key=lambda item: -len(item[1]))


def _is_a_secret(value: str) -> bool:
    """False for a switch, a word or a path, which may occur in any text."""
    return len(value) >= (12 if value.isalpha() else 8) and not os.path.exists(value)
