"""runs_worker.py for commands that name a model.py first; its FLOPs are not compared with the formula's."""

import importlib.util
import sys
from pathlib import Path

sys.path.extend(str(Path(__file__).resolve().parents[i]) for i in (2, 1))  # the project, and tests/

from support import runs_worker

import model_builder
import train


def main(command: list[str], main=train.main) -> None:
    spec = importlib.util.spec_from_file_location("changed_model", command[0])
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    model_builder.Transformer = module.Transformer
    main(command[1:])


if __name__ == "__main__":
    train.main, model_builder.EXACT = main, False
    runs_worker.main(sys.argv[1])
