"""What tests/faults/test_history.py runs as a process: attempts at a run that only logs, each killed at a
random moment.

    python tests/support/record_worker.py OUT_DIR KILLS

Prints what each attempt was seen to log as JSON. Imports no torch, so that 100 attempts take seconds.
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

sys.path.extend(str(Path(__file__).resolve().parents[i]) for i in (2, 1))  # the project, and tests/

from training.records import run_record as record  # noqa: E402
from training.records.attempts import find_history  # noqa: E402

record.SAVING_SHARE = 1e9  # rewrites the JSON after every fifth row, so that many kills hit a rewrite


def attempt(out_dir: Path, number: int, run_before: str | None, start: int, acknowledge: int) -> None:
    history = find_history(out_dir, run_before, None)
    path = out_dir / f"run_20260101_{number:06d}.json"
    info = {"resumed_from": None, "padding": "x" * 200_000}  # so that writing it takes a while
    content = record.RunRecord(path, {}, info, True, history, start)
    content.save()
    for iteration in range(start, start + 10_000):
        row = {"iter": iteration, "loss": 1 / (1 + iteration), "time_ms": 1.0, "tokens_per_sec": 1.0}
        content.add_iteration({**row, "mfu": {"mfu": 0.5}, "memory": None})
        os.write(acknowledge, b"%d\n" % iteration)
        if iteration % 5 == 0:
            content.save()


def main(out_dir: Path, kills: int) -> None:
    rng, seen, start, run_before = random.Random(1), [], 0, None
    for number in range(kills):
        readable, writable = os.pipe()
        child = os.fork()
        if not child:
            os.close(readable)
            attempt(out_dir, number, run_before, start, writable)
        os.close(writable)
        first = os.read(readable, 10)  # it has begun
        time.sleep(rng.uniform(0, 0.02))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        with open(readable, "rb") as pipe:
            logged = [int(line) for line in (first + pipe.read()).split()]
        seen.append({"start": start, "logged": logged})
        run_before = f"run_20260101_{number:06d}"
        json.loads((out_dir / f"{run_before}.json").read_text())
        start = rng.randint(start, logged[-1] + 1)  # the checkpoint that the next attempt goes on from
    print(json.dumps(seen))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
