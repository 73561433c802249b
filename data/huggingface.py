"""The client library of the Hugging Face hub, which only a download needs."""

import os
from types import ModuleType

from common.errors import UserError

NO_ANSWER = "; behind a proxy, set HTTPS_PROXY=http://HOST:PORT"
OFFLINE = "; HF_HUB_OFFLINE is set, so that the hub is not asked"


def hub_library(instead: str = "pass --input DIR") -> ModuleType:
    """`instead`: what a user does who has the files already."""
    try:
        import huggingface_hub
    except ImportError:
        raise UserError(
            "downloading needs huggingface_hub: pip install -r requirements/data.txt; or get the files "
            f"elsewhere and {instead}"
        ) from None
    return huggingface_hub


def first_line(error: Exception) -> str:
    """(kind of error: first line of its message); the library's messages have many lines."""
    return f"({type(error).__name__}: {(str(error).splitlines() or [''])[0]})"


def is_offline() -> bool:
    return os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0")


def why_no_download(error: Exception) -> str:
    """first_line(), and what may help if no server has answered."""
    answered = any(getattr(error, name, None) is not None for name in ("response", "code"))
    of_hub = type(error).__module__.startswith("huggingface_hub")
    return first_line(error) + ("" if answered else OFFLINE if of_hub and is_offline() else NO_ANSWER)
