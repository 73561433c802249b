"""Benchmarks by EleutherAI's lm-eval: its own command runs the model, by its backend `hf`, from a folder in
Hugging Face's format. What it prints, tables and warnings, is shown as it is."""

from __future__ import annotations

import argparse
import contextlib
import json
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from common.errors import UserError
from common.json_file import read_json
from generation.source import Source
from tools import export_hf
from tools.evaluate.heldout import prefix_of

PASSED_ON = ("tasks", "include_path", "num_fewshot", "limit", "batch_size", "device")  # options of both
RECORDED = ("lm_eval_version", "results", "versions", "n-shot", "n-samples")


def run_benchmarks(options: argparse.Namespace, source: Source, dtype: str) -> dict[str, Any]:
    """What lm-eval finds, in its own form. A run's checkpoint is exported for the time that it takes. The
    model of the source cannot be used afterwards. Raises UserError if lm-eval fails.

    logits_cache gives wrong scores where equal tokens are divided into context and answer at different
    places; without it, a batch of any size gives the scores of a batch of one.
    """
    source.model.to("meta")  # its memory is for lm-eval now
    torch.cuda.empty_cache()
    keys: dict[str, Any] = {"pretrained": str(source.folder), "dtype": dtype, "softmax_dtype": "float32"}
    keys |= {"prefix_token_id": prefix_of(source), "logits_cache": False}
    options.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="lm_eval-", dir=options.output) as scratch:
        if not options.hf:
            keys |= {"pretrained": f"{scratch}/export", "add_bos_token": False}  # it was trained without one
            checkpoint = Path(source.facts["checkpoint"]).name
            argv = [
                str(options.out_dir),
                keys["pretrained"],
                f"--checkpoint={checkpoint}",
                f"--dtype={dtype}",
            ]
            with contextlib.redirect_stdout(sys.stderr):
                export_hf.main(argv)
        flags = {name: value for name in PASSED_ON if (value := getattr(options, name)) is not None}
        flags |= {"model": "hf", "model_args": json.dumps(keys), "output_path": f"{scratch}/found.json"}
        command = ["-m", "lm_eval", "run", *(f"--{name}={value}" for name, value in flags.items())]
        if status := subprocess.run([sys.executable, *command]).returncode:
            shown = shlex.join(["python", *command])
            raise UserError(f"lm-eval ended with status {status} and says why above; its command: {shown}")
        (path,) = Path(scratch).glob("found_*.json")
        found = read_json(path)
    return {name: found[name] for name in RECORDED}
