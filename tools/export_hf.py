"""Writes a run's checkpoint as a folder in Hugging Face's format.

    python -m tools.export_hf out-quickstart exported --checkpoint=best --dtype=bfloat16

The folder has the weights as safetensors, config.json and the tokenizer. It appears when it is
complete: an export that fails or is killed leaves none.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

from common.arguments import user_folder, user_path
from common.command import run_command
from common.durable_file import new_folder
from common.errors import UserError
from common.text import plain
from training.checkpoints.loading import verified_checkpoint
from training.checkpoints.saved_state import read_state
from training.checkpoints.verification import open_tensors
from training.configuration.dtypes import DTYPES
from training.pretrained.generation_settings import first_weights
from training.pretrained.tokenizer_files import find_tokenizer
from training.pretrained.writing import model_bytes, write_model
from training.process.memory import GB

SPARE_BYTES = 64 << 20  # for the tokenizer and everything else that is small


def main(argv: list[str]) -> None:
    options = parse(argv)
    check_folder(options.folder)
    export(verified_checkpoint(options.out_dir, options.checkpoint), options)


def export(checkpoint: Path, options: argparse.Namespace) -> None:
    saved = read_state(checkpoint)
    name = options.dtype or saved.config.get("dtype")
    if name not in DTYPES:
        raise UserError(f"{checkpoint} does not say in which dtype the run computed; state one with --dtype")
    check_room(options.folder, model_bytes(saved.model_config, DTYPES[name]) + SPARE_BYTES)
    tokenizer = find_tokenizer(saved, checkpoint, options.dataset)
    began_with = first_weights(saved.pretrained)
    with new_folder(options.folder) as folder:
        reader = open_tensors(checkpoint, saved)
        write_model(folder, reader, saved.model_config, DTYPES[name], began_with, tokenizer.eot_id)
        tokenizer.write(folder)
    print(f"{checkpoint}, iteration {saved.iteration:,}, is now {options.folder}, in {name}")
    print(f"tokenizer: {plain(tokenizer.description)}")


def check_folder(folder: Path) -> None:
    if folder.is_dir() and not any(folder.iterdir()):
        return
    if folder.exists() or folder.is_symlink():
        raise UserError(f"{folder} is there already and is not an empty folder; name a new one")


def check_room(folder: Path, need: int) -> None:
    there = next(path for path in folder.absolute().parents if path.is_dir())
    free = shutil.disk_usage(there).free
    if free < need:
        raise UserError(
            f"{need / GB:.3g} GB are needed on the disk of {there}, {free / GB:.3g} GB are free; make room, "
            "or name a folder on another disk"
        )


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tools.export_hf", description="Write a checkpoint in Hugging Face's format."
    )
    parser.add_argument("out_dir", type=user_folder, help="the run's out_dir")
    parser.add_argument("folder", type=user_folder, help="what to write: a new folder, or an empty one")
    parser.add_argument(
        "--checkpoint", default="latest", help="latest, best, or a name such as step-00001000"
    )
    parser.add_argument("--dtype", choices=list(DTYPES), help="default: that in which the run computed")
    parser.add_argument(
        "--dataset", type=user_path, help="a name in data/ or a path, if it has moved since training"
    )
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(run_command(main, sys.argv[1:]))
