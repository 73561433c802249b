"""A dataset made by a cluster: datatrove starts the parts, through Slurm, Ray or on this machine.

    python -m data.cluster slimpajama_627b_qwen3 --executor slurm --tasks 64 --workers 32 --partition cpu
        --time 24:00:00 -- --stream

What follows -- are options of the dataset's prepare.py, whose bytes these are. A task runs prepare.py with
--part RANK --num_parts TASKS. All machines need this folder, the Python environment, the input and the output
at the same paths. The trap: datatrove skips tasks that it has marked as completed, even if their files are
gone; here all run again, and prepare.py does what has no record.
"""

import argparse
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.arguments import user_folder, whole_number
from common.command import run_command
from common.errors import UserError
from data.folders import DATA_DIR
from data.pipeline.command import PARTS_MAX, WORKERS_MAX

ROOT = DATA_DIR.parent
OURS = ("--part", "--num_parts", "--workers", "--output", "--no-resume")  # refused after the --


@dataclass(frozen=True)
class Part:
    """A step of a datatrove pipeline: the task of rank k makes part k of the dataset."""

    command: tuple[str, ...]
    folder: str
    parts: int
    # Whether a failure of the command fails datatrove's task, which ends its other tasks on this machine.
    strict: bool

    def __call__(self, data: Any = None, rank: int = 0, world_size: int = 1) -> None:
        status = self.run(rank)
        if status and self.strict:
            raise RuntimeError(f"part {rank} ended with status {status}")

    def run(self, rank: int) -> int:
        command = [sys.executable, *self.command, "--part", str(rank), "--num_parts", str(self.parts)]
        return subprocess.run(command, cwd=self.folder).returncode


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="python -m data.cluster DATASET --executor NAME --tasks N [options] [-- options of prepare.py]",
    )
    add = parser.add_argument
    add("dataset", help="name of a folder in data/ whose prepare.py has --part")
    add("--executor", required=True, choices=EXECUTORS)
    add("--tasks", type=whole_number(1, PARTS_MAX), required=True, help="parts of the dataset")
    add(
        "--workers",
        type=whole_number(1, WORKERS_MAX),
        default=1,
        help="processes, and so cores, of each task (default: 1)",
    )
    add(
        "--at_once",
        type=whole_number(1, PARTS_MAX),
        help="tasks at a time (default: all; local: as the cores allow)",
    )
    add("--output", type=user_folder, metavar="DIR", help="dataset folder (default: that of prepare.py)")
    add(
        "--logs",
        type=user_folder,
        metavar="DIR",
        help="what datatrove writes (default: cluster/ in the output)",
    )
    add(
        "--memory",
        type=whole_number(1, 10**6),
        default=2,
        help="GB for each core, of Slurm and Ray (default: 2)",
    )
    add("--partition", help="of Slurm")
    add("--time", help="limit of a Slurm task, as 24:00:00")
    add("--sbatch", nargs="*", default=[], metavar="KEY=VALUE", help="more options of sbatch, as account=x")
    words = sys.argv[1:]
    end = words.index("--") if "--" in words else len(words)
    args = parser.parse_args(words[:end])
    args.options = words[end + 1 :]
    if args.executor == "slurm" and not (args.partition and args.time):
        parser.error("Slurm needs --partition and --time")
    if wrong := [word for word in args.options if word.split("=")[0] in OURS]:
        parser.error(
            f"{', '.join(wrong)} cannot follow --: --tasks makes the parts, --workers and --output come "
            f"before --, and prepare.py alone starts again with --no-resume"
        )
    if not all("=" in word for word in args.sbatch):
        parser.error("--sbatch takes KEY=VALUE")
    return args


# --- executors ---


def run_local(args: argparse.Namespace, part: Part, finish: Part) -> None:
    from datatrove.executor import LocalPipelineExecutor

    at_once = args.at_once or max(1, (os.cpu_count() or 1) // args.workers)
    LocalPipelineExecutor(
        [part],
        tasks=args.tasks,
        workers=min(args.tasks, at_once),
        logging_dir=str(args.logs),
        skip_completed=False,
    ).run()


def run_ray(args: argparse.Namespace, part: Part, finish: Part) -> None:
    try:
        import ray  # noqa: F401
    except ImportError:
        raise UserError("--executor ray needs Ray: pip install ray") from None
    from datatrove.executor import RayPipelineExecutor

    RayPipelineExecutor(
        [part],
        tasks=args.tasks,
        workers=args.at_once or -1,
        cpus_per_task=args.workers,
        mem_per_cpu_gb=args.memory,
        ray_remote_kwargs={"runtime_env": {"env_vars": {"PYTHONPATH": str(ROOT)}}},
        logging_dir=str(args.logs),
        skip_completed=False,
    ).run()


def run_slurm(args: argparse.Namespace, part: Part, finish: Part) -> None:
    from datatrove.executor import SlurmPipelineExecutor

    def executor(step: Part, name: str, tasks: int, cores: int, depends: Any = None) -> SlurmPipelineExecutor:
        return SlurmPipelineExecutor(
            [step],
            tasks=tasks,
            workers=args.at_once or -1,
            time=args.time,
            partition=args.partition,
            cpus_per_task=cores,
            mem_per_cpu_gb=args.memory,
            job_name=f"{args.dataset}-{name}",
            qos=None,
            env_command=f"export PATH={Path(sys.executable).parent}:$PATH PYTHONPATH={ROOT}",
            sbatch_args=dict(word.split("=", 1) for word in args.sbatch),
            depends=depends,
            logging_dir=str(args.logs / name),
            skip_completed=False,
        )

    parts = executor(part, "parts", args.tasks, args.workers)
    executor(finish, "finish", 1, 1, depends=parts).run()  # submits both


EXECUTORS = {"local": run_local, "slurm": run_slurm, "ray": run_ray}


def main() -> None:
    args = parse_arguments()
    script = DATA_DIR / args.dataset / "prepare.py"
    if not script.is_file():
        raise UserError(f"there is no {script}")
    try:
        import datatrove  # noqa: F401
    except ImportError:
        raise UserError("this needs datatrove: pip install -r requirements-data.txt") from None
    output = (args.output or script.parent).resolve()
    if args.logs is None and (output / "cluster").is_symlink():
        raise UserError(f"{output / 'cluster'} is a link, through which nothing is written; pass --logs")
    args.logs = (args.logs or output / "cluster").resolve()
    command = (str(script), *args.options, "--output", str(output), "--workers")
    submits = args.executor == "slurm"
    part = Part((*command, str(args.workers)), os.getcwd(), args.tasks, strict=submits)
    finish = Part((*command, "0"), os.getcwd(), args.tasks, strict=submits)
    # Also a check: an error in the options, the tokenizer or the input is shown before anything is queued.
    if status := finish.run(0):
        sys.exit(status)
    EXECUTORS[args.executor](args, part, finish)
    if submits:
        print(f"submitted; {output / 'meta.json'} is there when all is done, the logs are in {args.logs}")
    elif status := finish.run(0):
        sys.exit(status)
    elif not (output / "meta.json").is_file():
        raise UserError(f"parts are missing; see above or {args.logs}, and run the same command again")


if __name__ == "__main__":
    # datatrove pickles Part, and another process must find its module: data.cluster, not __main__.
    from data.cluster import main

    sys.exit(run_command(main))
