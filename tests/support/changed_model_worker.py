"""runs_worker.py with the model.py that CHANGED_MODEL names."""

import importlib.util
import os
import sys
from pathlib import Path

sys.path.extend(str(Path(__file__).resolve().parents[i]) for i in (2, 1))  # the project, and tests/

spec = importlib.util.spec_from_file_location("model", os.environ["CHANGED_MODEL"])
sys.modules["model"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules["model"])

from support import runs_worker  # noqa: E402  # it imports train.py, which imports model

if __name__ == "__main__":
    runs_worker.main(sys.argv[1])
