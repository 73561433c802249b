"""Which folder a dataset's name stands for: data/NAME for a plain name, any other folder by its path."""

import os
from pathlib import Path

DATA_DIR = Path(__file__).resolve().parent


def dataset_folder(dataset: str) -> Path:
    return Path(dataset).expanduser() if "/" in dataset else DATA_DIR / dataset


def dataset_argument(folder: str | Path) -> str:
    """What train.py's --dataset must be for this folder."""
    folder = Path(folder).resolve()
    return folder.name if folder.parent == DATA_DIR else str(folder)


def is_plain_name(name: object) -> bool:
    """Whether it is one printable file name, which leads to no other folder."""
    if not isinstance(name, str) or name in ("", ".", ".."):
        return False
    return name.isprintable() and not {"/", "\\", os.sep} & set(name)


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
