"""Evaluates a model: benchmarks by lm-eval, and perplexity and bits per byte of held-out text.

    python -m tools.evaluate out-quickstart --dataset=quickstart
    python -m tools.evaluate --hf=exported --text=held_out.jsonl.zst
    python -m tools.evaluate out-quickstart --tasks=hellaswag,arc_easy --batch_size=32

torchrun divides the sequences among GPUs, each of which has the whole model. The JSON and the table are saved
beside the run record. docs/evaluation.md says what is counted.
"""

from __future__ import annotations

import argparse
import datetime
import platform
import shlex
import sys
from pathlib import Path
from typing import Any, Literal

import torch

from bench.process import end_with_status
from common.arguments import check_output, user_folder, user_path, whole_number
from common.errors import UserError
from common.text import one_line
from tools.evaluate import report
from tools.evaluate.heldout import (
    check_text,
    dataset_documents,
    evaluate_documents,
    open_validation,
    text_documents,
)
from tools.evaluate.scoring import Scorer
from tools.evaluate.subject import Subject, load_checkpoint_subject, load_weights_subject
from training.configuration.dataset_name import parse_dataset
from training.configuration.dtypes import DTYPES
from training.configuration.keys import TrainConfig
from training.process.exit_status import end_process
from training.process.world import World, check_device, check_launch, init_world

WITHOUT_OUT_DIR = "out-evaluate"  # where --hf saves
BATCH_SIZE_MAX = 1 << 16


def main(argv: list[str]) -> int:
    options = parse(argv)
    check(options)
    try:
        return evaluate(argv, options)
    except torch.OutOfMemoryError as error:
        raise UserError(f"out of GPU memory; state a lower --batch_size: {one_line(str(error))}") from None


def evaluate(argv: list[str], options: argparse.Namespace) -> int:
    """All ranks."""
    harness = import_harness() if options.tasks else None
    manager, tasks = harness.load_tasks(options.tasks, options.include_path) if harness else (None, {})
    world = join(options)
    subject = load(options, world)
    scorer = Scorer(subject.model, options.batch_size, world)
    texts = evaluate_texts(options, subject, scorer)
    found = {}
    if harness:
        lm = harness.OurLM(subject, scorer)
        found = harness.run_tasks(manager, tasks, lm, options.num_fewshot, options.limit)
    if world.is_main:
        content = {
            **describe(argv, options, subject, world),
            "versions": versions(harness),
            "truncated_contexts": scorer.truncated,
            "texts": texts,
            "tasks": found,
        }
        text = report.lines(content)
        print("\n".join(text), flush=True)
        path = report.save(options.output, content, text)
        print(f"\nSaved as {path} and .txt", flush=True)
    end_process(world)
    return 0


def check(options: argparse.Namespace) -> None:
    """What can be known before the model is loaded. Raises UserError."""
    if not (options.tasks or options.text or options.dataset):
        raise UserError("nothing to evaluate: state --tasks=NAMES, --text=FILE or --dataset=NAME")
    for path in options.text:
        check_text(path)
    check_output(options.output)


def import_harness() -> Any:
    try:
        from tools.evaluate import harness
    except ImportError as error:
        if (error.name or "").partition(".")[0] != "lm_eval":
            raise
        raise UserError("--tasks needs lm-eval: pip install -r requirements-evaluate.txt") from None
    return harness


def join(options: argparse.Namespace) -> World:
    """This process among all of them. All ranks."""
    device: Literal["cuda", "cpu"] = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    # timeout_minutes=0: a rank with longer sequences may let the others wait
    config = TrainConfig(device=device, dtype="float32", out_dir=str(options.output), timeout_minutes=0)
    check_launch(config)
    check_device(config)
    if device == "cuda":
        options.output.mkdir(parents=True, exist_ok=True)  # NCCL's flight recorder writes there
    return init_world(config)


def load(options: argparse.Namespace, world: World) -> Subject:
    if options.hf:
        return load_weights_subject(options.hf, options.tokenizer, options.dtype, world)
    return load_checkpoint_subject(
        options.out_dir, options.checkpoint, options.tokenizer, options.dtype, world
    )


def evaluate_texts(options: argparse.Namespace, subject: Subject, scorer: Scorer) -> list[dict[str, Any]]:
    """The figures of every text and dataset. All ranks."""
    stride = options.stride or subject.block_size
    if stride > subject.block_size:
        raise UserError(f"--stride={stride} is more than the model's block_size={subject.block_size}")
    found = []
    for path in options.text:
        documents = text_documents(path, subject.tokenizer, options.limit)
        figures = evaluate_documents(documents, subject, scorer, stride, f"--text={path}")
        found.append({"kind": "text", "name": str(path), "stride": stride, **figures})
    for name in parse_dataset(options.dataset) if options.dataset else ():
        opened = open_validation(name, subject, scorer.world)
        documents = dataset_documents(*opened, subject.tokenizer, options.limit)
        figures = evaluate_documents(documents, subject, scorer, stride, f"--dataset={name}")
        found.append({"kind": "dataset", "name": name, "stride": stride, **figures})
    return found


def describe(argv: list[str], options: argparse.Namespace, subject: Subject, world: World) -> dict[str, Any]:
    is_cuda = world.device.type == "cuda"
    return {
        "format": report.FORMAT,
        "time": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": shlex.join(["python", "-m", "tools.evaluate", *argv]),
        **subject.facts,
        "limit": options.limit,
        "batch_size": options.batch_size,
        "hardware": {
            "device": torch.cuda.get_device_name() if is_cuda else platform.processor() or "cpu",
            "processes": world.size,
        },
    }


def versions(harness: Any) -> dict[str, str | None]:
    return {"torch": torch.__version__, "lm_eval": harness.VERSION if harness else None}


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tools.evaluate", description="Evaluate a model.", allow_abbrev=False
    )
    parser.add_argument("out_dir", nargs="?", type=user_folder, help="the run's out_dir")
    parser.add_argument(
        "--hf", type=user_path, help="weights in Hugging Face's format: FOLDER or OWNER/NAME[@REVISION]"
    )
    parser.add_argument(
        "--checkpoint", default="latest", help="latest, best, or a name such as step-00001000"
    )
    parser.add_argument("--tasks", type=names, default=[], help="of lm-eval, or task files; with commas")
    parser.add_argument("--include_path", type=user_path, help="a folder of task files of lm-eval")
    parser.add_argument("--num_fewshot", type=whole_number(0), help="examples in each prompt")
    parser.add_argument(
        "--text", type=user_folder, action="append", default=[], help="a text file; may be repeated"
    )
    parser.add_argument("--dataset", type=user_path, help="a name in data/ or a path: its validation split")
    parser.add_argument(
        "--stride", type=whole_number(1), help="tokens predicted by each window (default: block_size)"
    )
    parser.add_argument(
        "--limit", type=whole_number(1), help="the first examples of each task and documents of each text"
    )
    parser.add_argument("--batch_size", type=whole_number(1, BATCH_SIZE_MAX), default=8, help="sequences (8)")
    parser.add_argument("--dtype", choices=list(DTYPES), help="default: that in which the run computed")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda where there is a GPU")
    parser.add_argument(
        "--tokenizer", type=user_path, help="a file or folder, if the run's dataset has moved"
    )
    parser.add_argument(
        "--output", type=user_folder, help=f"where to save (default: OUT_DIR; with --hf, {WITHOUT_OUT_DIR})"
    )
    options = parser.parse_args(argv)
    if (options.out_dir is None) == (options.hf is None):
        parser.error("name either the run's OUT_DIR or --hf=FOLDER")
    options.output = options.output or options.out_dir or Path(WITHOUT_OUT_DIR)
    return options


def names(text: str) -> list[str]:
    found = [user_path(name.strip()) for name in text.split(",")]
    return list(dict.fromkeys(found))


if __name__ == "__main__":
    sys.exit(end_with_status(main, sys.argv[1:]))
