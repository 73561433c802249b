"""The client library of the Hugging Face hub, which only a download needs."""

from types import ModuleType

from common.errors import UserError


def hub_library(instead: str = "pass --input DIR") -> ModuleType:
    """`instead`: what a user does who has the files already."""
    try:
        import huggingface_hub
    except ImportError:
        raise UserError(
            "downloading needs huggingface_hub: pip install -r requirements-data.txt; or get the files "
            f"elsewhere and {instead}"
        ) from None
    return huggingface_hub


def first_line(error: Exception) -> str:
    """(kind of error: first line of its message); the library's messages have many lines."""
    return f"({type(error).__name__}: {(str(error).splitlines() or [''])[0]})"
