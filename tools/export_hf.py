"""Writes a run's checkpoint as a folder in Hugging Face's format.

    python -m tools.export_hf out-quickstart exported --checkpoint=best --dtype=bfloat16

The folder has the weights as safetensors, config.json and the tokenizer. It appears when it is
complete: an export that fails or is killed leaves none.
"""

from __future__ import annotations

import argparse
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
from training.pretrained.tokenizer_files import find_tokenizer
from training.pretrained.writing import write_model


def main(argv: list[str]) -> None:
    options = parse(argv)
    check_folder(options.folder)
    export(verified_checkpoint(options.out_dir, options.checkpoint), options)


def export(checkpoint: Path, options: argparse.Namespace) -> None:
    saved = read_state(checkpoint)
    name = options.dtype or saved.config.get("dtype")
    if name not in DTYPES:
        raise UserError(f"{checkpoint} does not say in which dtype the run computed; state one with --dtype")
    tokenizer = find_tokenizer(saved, checkpoint, options.dataset)
    with new_folder(options.folder) as folder:
        reader = open_tensors(checkpoint, saved)
        write_model(folder, reader, saved.model_config, DTYPES[name], saved.pretrained, tokenizer.eot_id)
        tokenizer.write(folder)
    print(f"{checkpoint}, iteration {saved.iteration:,}, is now {options.folder}, in {name}")
    print(f"tokenizer: {plain(tokenizer.description)}")


def check_folder(folder: Path) -> None:
    if folder.is_dir() and not any(folder.iterdir()):
        return
    if folder.exists() or folder.is_symlink():
        raise UserError(f"{folder} is there already and is not an empty folder; name a new one")


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tools.export_hf", description="Write a checkpoint in Hugging Face's format."
    )
    add = parser.add_argument
    add("out_dir", type=user_folder, help="the run's out_dir")
    add("folder", type=user_folder, help="what to write: a new folder, or an empty one")
    add("--checkpoint", default="latest", help="latest, best, or a name such as step-00001000")
    add("--dtype", choices=list(DTYPES), help="default: that in which the run computed")
    add("--dataset", type=user_path, help="a name in data/ or a path, if it has moved since training")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(run_command(main, sys.argv[1:]))
