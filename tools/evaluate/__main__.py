"""Evaluates a model: perplexity and bits per byte of held-out text, and benchmarks by lm-eval.

    python -m tools.evaluate out-quickstart --dataset=quickstart
    python -m tools.evaluate --hf=exported --text=held_out.jsonl.zst
    python -m tools.evaluate out-quickstart --tasks=hellaswag,arc_easy --batch_size=32

Its JSON is saved beside the run record. docs/evaluation.md says what is counted.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import platform
import shlex
import sys
from pathlib import Path
from typing import Any

import torch

from common.arguments import check_output, user_folder, user_path, whole_number
from common.command import run_command
from common.durable_file import write_json
from common.errors import UserError
from common.text import aligned, one_line
from generation.source import Source, choose_device, compute_in, load_run, load_weights
from tools.evaluate.benchmarks import run_benchmarks
from tools.evaluate.heldout import (
    check_text,
    dataset_documents,
    evaluate_documents,
    prefix_of,
    text_documents,
)
from training.configuration.dataset_name import parse_dataset
from training.configuration.dtypes import DTYPES
from training.pretrained.same_tokenizer import tokenizer_hash
from training.process.launch import launch_info


def main(argv: list[str]) -> None:
    options = parse(argv)
    if not (options.tasks or options.text or options.dataset):
        raise UserError("nothing to evaluate: state --tasks=NAMES, --text=FILE or --dataset=NAME")
    if launch_info()[2] > 1:
        raise UserError("tools.evaluate is one process on one GPU; start it with python instead of torchrun")
    for path in options.text:
        check_text(path)
    check_output(options.output)
    if options.tasks and importlib.util.find_spec("lm_eval") is None:
        raise UserError("--tasks needs lm-eval: pip install -r requirements/evaluate.txt")
    try:
        evaluate(argv, options)
    except torch.OutOfMemoryError as error:
        raise UserError(f"out of GPU memory; state a lower --batch_size: {one_line(str(error))}") from None


def evaluate(argv: list[str], options: argparse.Namespace) -> None:
    device = choose_device(options.device)
    options.device = device.type
    if options.hf:
        source = load_weights(options.hf, device)
    else:
        source = load_run(options.out_dir, options.checkpoint, device)
    if options.tasks and prefix_of(source) is None:
        raise UserError("--tasks needs a tokenizer with an end-of-text token; this model's has none")
    stored = source.trained_in["dtype"]
    dtype = options.dtype or (stored if stored in DTYPES else "float32")
    compute_in(source.model, dtype)
    content = describe(argv, options, source, dtype)
    content["texts"] = evaluate_texts(options, source)
    print("\n".join(table(source.about, content)), flush=True)
    if options.tasks:
        content["lm_eval"] = run_benchmarks(options, source, dtype)
    options.output.mkdir(parents=True, exist_ok=True)
    path = options.output / f"evaluate_{datetime.datetime.now():%Y%m%d_%H%M%S_%f}.json"
    write_json(path, content)
    print(f"\nSaved as {path}", flush=True)


def evaluate_texts(options: argparse.Namespace, source: Source) -> list[dict[str, Any]]:
    """The figures of every text and dataset."""
    block_size = source.model.config.block_size
    stride = options.stride or block_size
    if stride > block_size:
        raise UserError(f"--stride={stride} is more than the model's block_size={block_size}")
    texts = [(path, text_documents(path, source.tokenizer, options.limit)) for path in options.text]
    datasets = parse_dataset(options.dataset) if options.dataset else ()
    documents = [("text", str(path), found) for path, found in texts]
    documents += [("dataset", name, dataset_documents(name, source, options.limit)) for name in datasets]
    return [
        {"kind": kind, "name": name, "stride": stride}
        | evaluate_documents(found, source, options.batch_size, stride, f"--{kind}={name}")
        for kind, name, found in documents
    ]


def table(about: str, content: dict[str, Any]) -> list[str]:
    low = content["trained_in"].get("low_precision", "none")
    trained = "" if low == "none" else f"; trained with low_precision={low}, evaluated without"
    head = ["text", "stride", "documents", "tokens", "bytes", "perplexity", "bits/byte"]
    rows = []
    for found in content["texts"]:
        counts = [f"{found[name]:,}" for name in head[1:5]]
        rows.append([found["name"], *counts, f"{found['perplexity']:.4f}", f"{found['bits_per_byte']:.4f}"])
    heading = [about, f"computed in {content['precision']['compute_dtype']}{trained}"]
    return [*heading, "", *aligned(head, rows, ["text"])] if rows else heading


def describe(argv: list[str], options: argparse.Namespace, source: Source, dtype: str) -> dict[str, Any]:
    model, tokenizer = source.model, source.tokenizer
    size = {"parameters": model.count_parameters()["total"], "block_size": model.config.block_size}
    kind = {key: tokenizer.meta[key] for key in ("kind", "name")}
    kind |= {"sha256": tokenizer_hash(tokenizer), "vocab_size": tokenizer.vocab_size}
    is_gpu = options.device == "cuda"
    return {
        "format": 2,
        "time": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": shlex.join(["python", "-m", "tools.evaluate", *argv]),
        "model": {**source.facts, **size},
        "precision": {"compute_dtype": dtype, "low_precision": "none", "attention": "sdpa"},
        "trained_in": source.trained_in,
        "tokenizer": {**kind, "prefix_id": prefix_of(source)},
        "limit": options.limit,
        "batch_size": options.batch_size,
        "hardware": {"device": torch.cuda.get_device_name() if is_gpu else platform.processor() or "cpu"},
        "versions": {"torch": torch.__version__},
    }


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tools.evaluate", description="Evaluate a model.", allow_abbrev=False
    )
    add = parser.add_argument
    add("out_dir", nargs="?", type=user_folder, help="the run's out_dir")
    add("--hf", type=user_path, help="weights in Hugging Face's format: FOLDER or OWNER/NAME[@REVISION]")
    add("--checkpoint", default="latest", help="latest, best, or a name such as step-00001000")
    add("--tasks", type=user_path, help="of lm-eval, or task files; with commas")
    add("--include_path", type=user_path, help="a folder of task files of lm-eval")
    add("--num_fewshot", type=whole_number(0), help="examples in each prompt")
    add("--text", type=user_folder, action="append", default=[], help="a text file; may be repeated")
    add("--dataset", type=user_path, help="a name in data/ or a path: its validation split")
    add("--stride", type=whole_number(1), help="tokens predicted by each window (default: block_size)")
    add("--limit", type=whole_number(1), help="the first examples of each task and documents of each text")
    add("--batch_size", type=whole_number(1, 1 << 16), default=8, help="sequences (8)")
    add("--dtype", choices=list(DTYPES), help="default: that in which the run computed")
    add("--device", choices=("cuda", "cpu"), help="default: cuda where there is a GPU")
    add("--output", type=user_folder, help="where to save (OUT_DIR; with --hf, out-evaluate)")
    options = parser.parse_args(argv)
    if (options.out_dir is None) == (options.hf is None):
        parser.error("name either the run's OUT_DIR or --hf=FOLDER")
    options.output = options.output or options.out_dir or Path("out-evaluate")
    return options


if __name__ == "__main__":
    sys.exit(run_command(main, sys.argv[1:]))
