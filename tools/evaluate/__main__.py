"""Evaluates a model: benchmarks by lm-eval, and perplexity and bits per byte of held-out text.

    python -m tools.evaluate out-quickstart --dataset=quickstart
    python -m tools.evaluate --hf=exported --text=held_out.jsonl.zst
    python -m tools.evaluate out-quickstart --tasks=hellaswag,arc_easy --batch_size=32

torchrun divides the sequences among GPUs, each of which has the whole model. The JSON and the table are saved
beside the run record. docs/evaluation.md says what is counted.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import platform
import shlex
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import torch

from bench.process import end_with_status
from common.arguments import check_output, user_folder, user_path, whole_number
from common.errors import UserError
from common.text import one_line
from generation.source import Source, compute_in, load_run, load_weights
from tools import export_hf
from tools.evaluate import report
from tools.evaluate.heldout import check_text, dataset_documents, evaluate_documents, text_documents
from training.checkpoints.folder import find_checkpoint
from training.configuration.dataset_name import parse_dataset
from training.configuration.dtypes import DTYPES
from training.configuration.keys import TrainConfig
from training.pretrained.same_tokenizer import tokenizer_hash
from training.process.exit_status import end_process
from training.process.launch import check_launch
from training.process.world import World, check_device, gather_objects, init_world

WITHOUT_OUT_DIR = "out-evaluate"  # where --hf saves


def main(argv: list[str]) -> int:
    options = parse(argv)
    if not (options.tasks or options.text or options.dataset):
        raise UserError("nothing to evaluate: state --tasks=NAMES, --text=FILE or --dataset=NAME")
    for path in options.text:
        check_text(path)
    check_output(options.output)
    try:
        evaluate(argv, options)
    except torch.OutOfMemoryError as error:
        raise UserError(f"out of GPU memory; state a lower --batch_size: {one_line(str(error))}") from None
    return 0


def evaluate(argv: list[str], options: argparse.Namespace) -> None:
    """All ranks."""
    benchmarks = import_benchmarks() if options.tasks else None
    manager, tasks = benchmarks.load_tasks(options.tasks, options.include_path) if benchmarks else (None, {})
    world = join(options)
    source = load(options, world)
    if benchmarks and source.prefix_id is None:
        raise UserError("--tasks needs a tokenizer with an end-of-text token; this model's has none")
    stored = source.trained_in["dtype"]
    dtype = options.dtype or (stored if stored in DTYPES else "float32")
    compute_in(source.model, dtype)
    content = describe(argv, options, source, dtype, world)
    content["texts"] = evaluate_texts(options, source, world)
    content |= {"truncated_contexts": 0, "tasks": {}}
    if benchmarks:
        source.model.to("meta")  # its memory is for the benchmarks now
        begins = None if options.hf else False  # a run was trained without a beginning-of-text token
        keys = {"prefix_token_id": source.prefix_id, "add_bos_token": begins}
        with model_folder(options, source, dtype, world) as folder:
            lm = benchmarks.open_model(folder, DTYPES[dtype], options.batch_size, world, **keys)
        content["tasks"] = benchmarks.run_tasks(manager, tasks, lm, options.num_fewshot, options.limit)
        content["truncated_contexts"] = sum(gather_objects(lm.truncated, world))
        content["versions"]["lm_eval"] = benchmarks.VERSION
    if world.is_main:
        text = report.lines(source.about, content)
        print("\n".join(text), flush=True)
        print(f"\nSaved as {report.save(options.output, content, text)} and .txt", flush=True)
    end_process(world)


def import_benchmarks() -> Any:
    try:
        from tools.evaluate import benchmarks
    except ImportError as error:
        raise UserError(
            f"--tasks needs lm-eval: pip install -r requirements-evaluate.txt ({error})"
        ) from None
    return benchmarks


def join(options: argparse.Namespace) -> World:
    """This process among all of them. All ranks."""
    device: Literal["cuda", "cpu"] = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    # timeout_minutes=0: a rank with longer sequences may let the others wait
    config = TrainConfig(device=device, dtype="float32", out_dir=str(options.output), timeout_minutes=0)
    check_launch(config)
    check_device(config)
    if device == "cuda" or options.out_dir:  # for NCCL's flight recorder, or an export
        options.output.mkdir(parents=True, exist_ok=True)
    return init_world(config)


def load(options: argparse.Namespace, world: World) -> Source:
    """The same model on every rank. All ranks."""
    if options.hf:
        return load_weights(options.hf, world.device)
    # a run that goes on may save another one before the last rank has looked
    options.checkpoint = gather_objects(find_checkpoint(options.out_dir, options.checkpoint).name, world)[0]
    return load_run(options.out_dir, options.checkpoint, world.device)


@contextlib.contextmanager
def model_folder(options: argparse.Namespace, source: Source, dtype: str, world: World) -> Iterator[str]:
    """A folder in Hugging Face's format: what --hf names, or an export of the checkpoint, which is deleted in
    the end. All ranks."""
    if options.hf:
        yield str(source.folder)
        return
    with contextlib.ExitStack() as stack:
        mine = ""
        if world.local_rank == 0:
            mine = stack.enter_context(tempfile.TemporaryDirectory(prefix="export-", dir=options.output))
            argv = [str(options.out_dir), mine, f"--checkpoint={options.checkpoint}", f"--dtype={dtype}"]
            with contextlib.redirect_stdout(sys.stderr):
                export_hf.main(argv)
        yield gather_objects(mine, world)[world.rank - world.local_rank]  # of this machine
        gather_objects(None, world)  # until every rank has read it


def evaluate_texts(options: argparse.Namespace, source: Source, world: World) -> list[dict[str, Any]]:
    """The figures of every text and dataset. All ranks."""
    block_size = source.model.config.block_size
    stride = options.stride or block_size
    if stride > block_size:
        raise UserError(f"--stride={stride} is more than the model's block_size={block_size}")
    documents = [
        ("text", str(path), text_documents(path, source.tokenizer, options.limit)) for path in options.text
    ]
    for name in parse_dataset(options.dataset) if options.dataset else ():
        documents.append(("dataset", name, dataset_documents(name, source, world, options.limit)))
    return [
        {"kind": kind, "name": name, "stride": stride}
        | evaluate_documents(found, source, options.batch_size, stride, f"--{kind}={name}", world)
        for kind, name, found in documents
    ]


def describe(
    argv: list[str], options: argparse.Namespace, source: Source, dtype: str, world: World
) -> dict[str, Any]:
    model, tokenizer = source.model, source.tokenizer
    size = {"parameters": model.count_parameters()["total"], "block_size": model.config.block_size}
    kind = {key: tokenizer.meta[key] for key in ("kind", "name")}
    kind |= {"sha256": tokenizer_hash(tokenizer), "vocab_size": tokenizer.vocab_size}
    name = torch.cuda.get_device_name() if world.device.type == "cuda" else platform.processor() or "cpu"
    return {
        "format": report.FORMAT,
        "time": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": shlex.join(["python", "-m", "tools.evaluate", *argv]),
        "model": {**source.facts, **size},
        "precision": {"compute_dtype": dtype, "low_precision": "none", "attention": "sdpa"},
        "trained_in": source.trained_in,
        "tokenizer": {**kind, "prefix_id": source.prefix_id},
        "limit": options.limit,
        "batch_size": options.batch_size,
        "hardware": {"device": name, "processes": world.size},
        "versions": {"torch": torch.__version__, "lm_eval": None},
    }


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tools.evaluate", description="Evaluate a model.", allow_abbrev=False
    )
    add = parser.add_argument
    add("out_dir", nargs="?", type=user_folder, help="the run's out_dir")
    add("--hf", type=user_path, help="weights in Hugging Face's format: FOLDER or OWNER/NAME[@REVISION]")
    add("--checkpoint", default="latest", help="latest, best, or a name such as step-00001000")
    add("--tasks", type=names, default=[], help="of lm-eval, or task files; with commas")
    add("--include_path", type=user_path, help="a folder of task files of lm-eval")
    add("--num_fewshot", type=whole_number(0), help="examples in each prompt")
    add("--text", type=user_folder, action="append", default=[], help="a text file; may be repeated")
    add("--dataset", type=user_path, help="a name in data/ or a path: its validation split")
    add("--stride", type=whole_number(1), help="tokens predicted by each window (default: block_size)")
    add("--limit", type=whole_number(1), help="the first examples of each task and documents of each text")
    add("--batch_size", type=whole_number(1, 1 << 16), default=8, help="sequences (8)")
    add("--dtype", choices=list(DTYPES), help="default: that in which the run computed")
    add("--device", choices=("cuda", "cpu"), help="default: cuda where there is a GPU")
    add("--output", type=user_folder, help=f"where to save (OUT_DIR; with --hf, {WITHOUT_OUT_DIR})")
    options = parser.parse_args(argv)
    if (options.out_dir is None) == (options.hf is None):
        parser.error("name either the run's OUT_DIR or --hf=FOLDER")
    options.output = options.output or options.out_dir or Path(WITHOUT_OUT_DIR)
    return options


def names(text: str) -> list[str]:
    return list(dict.fromkeys(user_path(name.strip()) for name in text.split(",")))


if __name__ == "__main__":
    sys.exit(end_with_status(main, sys.argv[1:]))
