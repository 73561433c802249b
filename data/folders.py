"""Which folder a dataset's name stands for: data/NAME for a plain name, any other folder by its path."""

from pathlib import Path

DATA_DIR = Path(__file__).resolve().parent


def dataset_folder(dataset: str) -> Path:
    return Path(dataset) if "/" in dataset else DATA_DIR / dataset


def dataset_argument(folder: str | Path) -> str:
    """What train.py's --dataset must be for this folder."""
    folder = Path(folder).resolve()
    return folder.name if folder.parent == DATA_DIR else str(folder)
