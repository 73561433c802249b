"""Run by tests instead of train.py: the same, with one fault.

    FAULT="what who where" fault_worker.py CONFIG [--key=value ...]

what: a signal's name, 'raise', 'oom', 'exit0', 'hang' (for ever), 'illegal' (a memory access of the GPU),
'slow' (50 ms more, from there on), 'slow_gpu' (the GPU alone), 'hold' (the interpreter lock), 'node'
(SIGKILL, to its torchrun, too), 'orphan' (SIGKILL, to its torchrun alone, and it hangs itself);
who: a rank, 'any', 'torchrun', or 'job' (the process in the file JOB_PID);
where: an iteration, 'evaluation', 'saving', 'start', 'hashing' or 'import'. Only in the first attempt.
FAULT_ONCE: a file that the fault makes, and happens no more: an agent that restarts because another one did
counts no restart.
HOLD_SECONDS: of 'hold'. SAY_TICKS: before the first line about the ranks that are waited for.
"""

import ctypes
import os
import signal
import sys
import time
from pathlib import Path

sys.path.extend(str(Path(__file__).resolve().parents[i]) for i in (2, 1))  # the project, and tests/

import torch

import train
from training import evaluation as evaluate
from training import inputs
from training.batches import loader as loader_module
from training.checkpoints import saver
from training.faults import watchdog
from training.process.exit_status import leave_now
from training.process.launch import launch_info, restart_count

SLOW_SECONDS, SLOW_CYCLES = 0.05, 100_000_000  # at 2 GHz
PASSED_ON_SECONDS = 0.5  # until torchrun has passed a signal on; it looks every 0.1 s


def happen(what: str, who: str) -> None:
    """On the rank that it is for; rank 0 signals others."""
    rank = launch_info()[0]
    if rank != (int(who) if who.isdigit() else 0) and who != "any":
        return
    if once := os.environ.get("FAULT_ONCE"):
        try:
            os.close(os.open(once, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return
    os.write(1, f"FAULT at {time.time():.6f}s\n".encode())  # at once: print() writes the line's end by itself
    if what == "raise":
        raise ValueError(f"a fault of rank {rank}")
    if what == "oom":
        raise torch.OutOfMemoryError("Tried to allocate too much")
    if what == "hold":
        ctypes.PyDLL(None).sleep(int(os.environ["HOLD_SECONDS"]))
        return
    if what == "exit0":
        os._exit(0)
    if what == "node":
        os.kill(os.getppid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "orphan":
        os.kill(os.getppid(), signal.SIGKILL)
    if what in ("hang", "orphan"):
        time.sleep(1000)
    if what == "illegal":
        torch.zeros(4, device="cuda")[torch.tensor([1 << 40], device="cuda")]
        return  # the host does not know yet
    target = {"torchrun": os.getppid, "job": lambda: int(Path(os.environ["JOB_PID"]).read_text())}
    os.kill(target.get(who, os.getpid)(), getattr(signal, what))


def install(what: str, who: str, where: str) -> None:
    if where == "evaluation":
        before(evaluate, "_mean_loss", lambda: happen(what, who))
    elif where == "import":
        happen(what, who)
    elif where == "start":
        before(inputs, "open_sources", lambda: happen(what, who))
    elif where == "hashing":  # the ranks have met, and do not wait for each other yet
        before(inputs, "open_sources", lambda: (time.sleep(3), happen(what, who)))
    elif where == "saving":  # the files take a while, and the fault comes in between
        before(saver, "_write_files", lambda: time.sleep(1))
        after(saver.Saver, "begin", lambda: happen(what, who))
    else:
        at_iteration(int(where), what, who)


def at_iteration(iteration: int, what: str, who: str) -> None:
    def check(loader):
        now = loader.position // loader.batches.samples
        if what.startswith("slow"):
            if now >= iteration and launch_info()[0] == int(who):
                time.sleep(SLOW_SECONDS) if what == "slow" else torch.cuda._sleep(SLOW_CYCLES)
        elif now == iteration:
            happen(what, who)
            if who == "torchrun":  # iterations of milliseconds would pass before the ranks have the signal
                time.sleep(PASSED_ON_SECONDS)

    loaders = []  # the one that is asked for a batch
    before(train.Loader, "next", lambda loader: loaders.__setitem__(slice(None), [loader]))
    before(loader_module, "inputs_and_targets", lambda: check(loaders[0]))  # in the rank's own work


def before(owner, name: str, action) -> None:
    real = getattr(owner, name)

    def patched(*arguments, **keywords):
        action(*(arguments[:1] if name == "next" else ()))
        return real(*arguments, **keywords)

    setattr(owner, name, patched)


def after(owner, name: str, action) -> None:
    real = getattr(owner, name)

    def patched(*arguments, **keywords):
        result = real(*arguments, **keywords)
        action()
        return result

    setattr(owner, name, patched)


if __name__ == "__main__":
    watchdog.SAY_TICKS = int(os.environ.get("SAY_TICKS", watchdog.SAY_TICKS))
    if os.environ.get("FAULT") and restart_count() == 0:
        install(*os.environ["FAULT"].split())
    leave_now(train.run(sys.argv[1:]))
