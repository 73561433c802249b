"""Run by tests/runs/test_hf_memory.py: one piece of work, and how much anonymous memory it took at its peak.

memory_worker.py import FOLDER           reads Hugging Face weights into a model
memory_worker.py export OUT_DIR FOLDER   exports a checkpoint

Prints bytes: the peak of RssAnon above that before the work.
"""

import gc
import sys
import threading
import time
from pathlib import Path

sys.path.extend(str(Path(__file__).resolve().parents[i]) for i in (2, 1))  # the project, and tests/

import torch

from tools import export_hf
from training.pretrained.reading import load_pretrained

PAUSE_S = 0.003


def anonymous_bytes() -> int:
    """Without the pages of mapped files, which the system can drop."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if "RssAnon" in line)
    return 1024 * int(line.split()[1])


def main(action: str, *arguments: str) -> None:
    torch.set_num_threads(1)
    gc.collect()
    before, peak, ended = anonymous_bytes(), [0], threading.Event()

    def watch() -> None:
        while not ended.is_set():
            peak[0] = max(peak[0], anonymous_bytes())
            time.sleep(PAUSE_S)

    thread = threading.Thread(target=watch)
    thread.start()
    if action == "import":
        load_pretrained(f"hf:{arguments[0]}", torch.device("cpu"))
    else:
        export_hf.main([*arguments, "--dtype=float32"])
    ended.set()
    thread.join()
    print(f"peak {peak[0] - before}")


if __name__ == "__main__":
    main(*sys.argv[1:])
