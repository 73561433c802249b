"""Which folder a dataset's name stands for: data/NAME for a plain name, any other folder by its path."""

import os
from pathlib import Path

from common.errors import UserError

DATA_DIR = Path(__file__).resolve().parent


def dataset_folder(name: str) -> Path:
    """data/NAME, or the path itself if the name contains a slash. Raises UserError."""
    if "/" in name or os.sep in name:
        return Path(os.path.expanduser(name))  # leaves the name of an unknown user as it is
    if not is_plain_name(name):
        raise UserError(f"dataset={name!r} is no name of a folder in data/; a path contains a slash")
    return DATA_DIR / name


def dataset_argument(folder: str | Path) -> str:
    """What train.py's --dataset must be for this folder."""
    folder = Path(folder).resolve()
    return folder.name if folder.parent == DATA_DIR else str(folder)


def is_plain_name(name: object) -> bool:
    """Whether it is one printable file name, which leads to no other folder."""
    is_name = isinstance(name, str) and name not in ("", ".", "..") and name.isprintable()
    return is_name and not {"/", "\\", os.sep} & set(str(name))


def how_to_make(folder: Path) -> str:
    """The command that makes the dataset of this folder, for error messages."""
    script = folder / "prepare.py"
    if script.is_file():
        return f"make it with: python {os.path.relpath(script)}"
    shipped = ", ".join(sorted(path.parent.name for path in DATA_DIR.glob("*/prepare.py")))
    return (
        f"data/ can make: {shipped}. For your own text: "
        f"python data/text/prepare.py --input FILES --tokenizer TOKENIZER --output {os.path.relpath(folder)}"
    )
