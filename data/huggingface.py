"""The client library of the Hugging Face hub, which only a download needs."""

from types import ModuleType

from common.errors import UserError


def hub_library() -> ModuleType:
    try:
        import huggingface_hub
    except ImportError:
        raise UserError(
            "downloading needs huggingface_hub: pip install -r requirements-data.txt; or get the files "
            "elsewhere and pass --input DIR"
        ) from None
    return huggingface_hub


def first_line(error: Exception) -> str:
    """(kind of error: first line of its message); the library's messages have many lines."""
    return f"({type(error).__name__}: {(str(error).splitlines() or [''])[0]})"
