"""Evaluates a model: perplexity and bits per byte of held-out text, and benchmarks by lm-eval.

    python -m tools.evaluate out-quickstart --dataset=quickstart
    python -m tools.evaluate --hf=exported --text=held_out.jsonl.zst
    python -m tools.evaluate out-quickstart --tasks=hellaswag,arc_easy --batch_size=32

Its JSON is saved beside the run record. docs/evaluation.md says which tokens and bytes count.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.util
import itertools
import json
import math
import platform
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from common.arguments import check_output, user_folder, user_path, whole_number
from common.command import run_command
from common.durable_file import write_json
from common.errors import UserError
from common.json_file import read_json
from common.text import aligned, one_line
from data.pipeline.documents import BadRecord, read_records
from data.pipeline.input_files import KNOWN, is_read
from data.pipeline.token_files import MASKED, described, largest_id, plain_ids
from data.pipeline.verified import damaged_files
from data.tokenizers.tiktoken_tokenizer import EncodeError
from generation.source import Source, choose_device, compute_in, load_run, load_weights
from model import Transformer
from tools import export_hf
from training.batches.dataset import open_dataset
from training.batches.document_starts import find_documents
from training.batches.windows import NO_TARGET
from training.configuration.dataset_name import parse_dataset
from training.configuration.dtypes import DTYPES
from training.configuration.keys import TrainConfig
from training.pretrained.same_tokenizer import check_dataset, tokenizer_hash
from training.process.launch import launch_info

LARGEST_NATS = 700.0  # of a token; e to this power is still a number
BATCHES_SORTED = 64  # as many batches of windows are held in memory to be sorted by length
PASSED_ON = ("tasks", "include_path", "num_fewshot", "limit", "batch_size", "device")  # to lm-eval

Document = tuple[np.ndarray, int]  # its ids, and its bytes
# ids, of which the last so many are predicted; a negative one is no target (data/pipeline/conversations.py)
Window = tuple[np.ndarray, int]


def main(argv: list[str]) -> None:
    options = parse(argv)
    if not (options.tasks or options.text or options.dataset):
        raise UserError("nothing to evaluate: state --tasks=NAMES, --text=FILE or --dataset=NAME")
    if launch_info()[2] > 1:
        raise UserError("tools.evaluate is one process on one GPU; start it with python instead of torchrun")
    for path in options.text:
        if not path.is_file() or not is_read(path):
            what = "is a file of another kind" if path.is_file() else "is no file"
            raise UserError(f"--text={path} {what}; name a file that ends in {KNOWN}, one --text for each")
    check_output(options.output)
    if options.tasks and importlib.util.find_spec("lm_eval") is None:
        raise UserError("--tasks needs lm-eval: pip install -r requirements/evaluate.txt")
    try:
        content = evaluate(options)
    except torch.OutOfMemoryError as error:
        raise UserError(f"out of GPU memory; state a lower --batch_size: {one_line(str(error))}") from None
    options.output.mkdir(parents=True, exist_ok=True)
    path = options.output / f"evaluate_{datetime.datetime.now():%Y%m%d_%H%M%S_%f}.json"
    write_json(path, {"command": shlex.join(["python", "-m", "tools.evaluate", *argv]), **content})
    print(f"\nSaved as {path}", flush=True)


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


def evaluate(options: argparse.Namespace) -> dict[str, Any]:
    """All that is found, with what is needed to find it again."""
    device = choose_device(options.device)
    options.device = device.type
    if options.hf:
        source = load_weights(options.hf, device)
    else:
        source = load_run(options.out_dir, options.checkpoint, device)
    if options.tasks and prefix_of(source) is None:
        raise UserError("--tasks needs a tokenizer with an end-of-text token; this model's has none")
    model, tokenizer, trained_in = source.model, source.tokenizer, source.trained_in
    size = {"parameters": model.count_parameters()["total"], "block_size": model.config.block_size}
    kind = {
        "kind": tokenizer.meta["kind"],
        "name": tokenizer.meta["name"],
        "sha256": tokenizer_hash(tokenizer),
    }
    dtype = options.dtype or (trained_in["dtype"] if trained_in["dtype"] in DTYPES else "float32")
    compute_in(model, dtype)
    content = {
        "format": 2,
        "time": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "model": {**source.facts, **size},
        "precision": {"compute_dtype": dtype, "low_precision": "none", "attention": "sdpa"},
        "trained_in": trained_in,
        "tokenizer": {**kind, "vocab_size": tokenizer.vocab_size, "prefix_id": prefix_of(source)},
        "limit": options.limit,
        "batch_size": options.batch_size,
        "hardware": {
            "device": torch.cuda.get_device_name() if device.type == "cuda" else platform.processor()
        },
        "versions": {"torch": torch.__version__},
        "texts": evaluate_texts(options, source),
    }
    low = trained_in.get("low_precision", "none")
    trained = "" if low == "none" else f"; trained with low_precision={low}, evaluated without"
    print(f"{source.about}\ncomputed in {dtype}{trained}")
    formats = {"name": "", "stride": ",", "documents": ",", "tokens": ",", "bytes": ","}
    formats |= {"perplexity": ".4f", "bits_per_byte": ".4f"}
    rows = [[format(text[name], how) for name, how in formats.items()] for text in content["texts"]]
    print("", *(aligned(list(formats), rows, ["name"]) if rows else []), sep="\n", flush=True)
    if options.tasks:
        content["lm_eval"] = run_benchmarks(options, source, dtype)
    return content


def run_benchmarks(options: argparse.Namespace, source: Source, dtype: str) -> dict[str, Any]:
    """What lm-eval's own command finds with its backend `hf`, from a folder in Hugging Face's format: a run's
    checkpoint is exported for that time. The model of the source cannot be used afterwards. logits_cache
    gives wrong scores where equal tokens are divided into context and answer at different places."""
    source.model.to("meta")  # its memory is for lm-eval now
    torch.cuda.empty_cache()
    keys: dict[str, Any] = {"pretrained": str(source.folder), "dtype": dtype, "softmax_dtype": "float32"}
    keys |= {"prefix_token_id": prefix_of(source), "logits_cache": False}
    options.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="lm_eval-", dir=options.output) as scratch:
        if not options.hf:
            keys |= {"pretrained": f"{scratch}/export", "add_bos_token": False}  # it was trained without one
            checkpoint = Path(source.facts["checkpoint"]).name
            with contextlib.redirect_stdout(sys.stderr):
                to = (str(options.out_dir), keys["pretrained"])
                export_hf.main([*to, f"--checkpoint={checkpoint}", f"--dtype={dtype}"])
        flags = {name: value for name in PASSED_ON if (value := getattr(options, name)) is not None}
        flags |= {"model": "hf", "model_args": json.dumps(keys), "output_path": f"{scratch}/found.json"}
        command = ["-m", "lm_eval", "run", *(f"--{name}={value}" for name, value in flags.items())]
        if status := subprocess.run([sys.executable, *command]).returncode:
            shown = shlex.join(["python", *command])
            raise UserError(f"lm-eval ended with status {status} and says why above; its command: {shown}")
        found = read_json(next(Path(scratch).glob("found_*.json")))
    return {name: found[name] for name in ("lm_eval_version", "results", "versions", "n-shot", "n-samples")}


def prefix_of(source: Source) -> int | None:
    """What comes before the first token of a document; None if there is no such token. Of a run, that is the
    end-of-text token, as in training; of weights, what lm-eval puts there: beginning-of-text, else
    end-of-text, as the tokenizer names them."""
    path = source.folder / "tokenizer_config.json"
    config = read_json(path) if "weights" in source.facts and path.exists() else {}
    named = (config.get("bos_token"), config.get("eos_token"))
    names = [token.get("content") if isinstance(token, dict) else token for token in named]
    ids = [source.tokenizer.token_id(name) for name in names if isinstance(name, str)]
    return next((one for one in ids if one is not None), source.eot_id)


# --- perplexity and bits per byte; every document is a text of its own ---


def evaluate_texts(options: argparse.Namespace, source: Source) -> list[dict[str, Any]]:
    """The figures of every text and dataset."""
    block_size = source.model.config.block_size
    if (stride := options.stride or block_size) > block_size:
        raise UserError(f"--stride={stride} is more than the model's {block_size=}")
    found = [("text", str(path), text_documents(path, source, options.limit)) for path in options.text]
    for name in parse_dataset(options.dataset) if options.dataset else ():
        found.append(("dataset", name, dataset_documents(name, source, options.limit)))
    return [
        {"kind": kind, "name": name, "stride": stride}
        | score(documents, source, options.batch_size, stride, f"--{kind}={name}")
        for kind, name, documents in found
    ]


def score(
    documents: Iterator[Document], source: Source, batch_size: int, stride: int, where: str
) -> dict[str, Any]:
    """The figures of all documents together. Raises UserError if there is nothing to predict."""
    config, prefix_id, counts = source.model.config, prefix_of(source), [0, 0, 0]

    def all_windows() -> Iterator[Window]:
        for ids, size in documents:
            if (largest := largest_id(ids)) >= config.vocab_size:
                raise UserError(f"{where} has the id {largest:,}, and the model's embedding has no such row")
            # a conversation, which has tokens that are no targets, begins where its template begins
            before = None if ids.min(initial=0) < 0 else prefix_id
            not_predicted = _bytes(source, ids[:1]) if before is None else 0
            counts[:2] = counts[0] + 1, counts[1] + size - not_predicted
            for window, count in windows(ids, before, config.block_size, stride):
                counts[2] += int((window[-count:] >= 0).sum())
                yield window, count

    remaining, sums = iter(tqdm(all_windows(), desc=where, unit=" windows")), []
    while some := list(itertools.islice(remaining, BATCHES_SORTED * batch_size)):
        some.sort(key=lambda window: -len(window[0]))  # each batch has windows of about one length
        for first in range(0, len(some), batch_size):
            sums += window_nats(source.model, some[first : first + batch_size])
    (number, size, tokens), nats = counts, math.fsum(sums)
    if not tokens or not size:
        raise UserError(f"{where} has no text that could be predicted: it is empty, or of one token alone")
    if not nats < LARGEST_NATS * tokens:  # also NaN
        raise UserError(f"{where}: the loss is not finite; compute in another dtype: --dtype=float32")
    figures = {"documents": number, "tokens": tokens, "bytes": size, "nats": nats}
    figures |= {"nats_per_token": nats / tokens, "perplexity": math.exp(nats / tokens)}
    return {**figures, "bits_per_byte": nats / math.log(2) / size}


def windows(ids: np.ndarray, prefix_id: int | None, block_size: int, stride: int) -> Iterator[Window]:
    """Cuts a document of any length, so that each token is predicted exactly once. Without a prefix_id, the
    first token is not predicted, because nothing comes before it.

    The first window predicts block_size tokens, each further one at most `stride` more, from as many tokens
    before them as fit into block_size. It equals get_rolling_token_windows of lm-eval with context_len =
    block_size - stride + 1; lm-eval's own figures have stride = block_size.
    """
    prefix = [] if prefix_id is None else [prefix_id]
    whole = np.concatenate([np.array(prefix, np.int64), np.asarray(ids, np.int64)])
    done = 0  # whole[done] is the last token that needs no prediction any more
    while done < len(whole) - 1:
        end = min(len(whole) - 1, block_size if done == 0 else done + stride)
        yield whole[max(0, end - block_size) : end + 1], end - done
        done = end


@torch.no_grad()
def window_nats(model: Transformer, batch: list[Window]) -> list[float]:
    """-ln p of the predicted tokens of each window. Windows are padded on the right: attention is causal, so
    no token sees the padding, and no mask is needed."""
    shape = (len(batch), max(len(ids) for ids, _ in batch))
    inputs, targets = np.zeros(shape, np.int64), np.full(shape, NO_TARGET)
    for row, (ids, count) in enumerate(batch):
        inputs[row, : len(ids)] = plain_ids(ids)
        targets[row, len(ids) - count : len(ids)] = np.where(ids < 0, NO_TARGET, ids)[-count:]
    device, loss = model.embed.weight.device, torch.nn.functional.cross_entropy
    logits = model(torch.from_numpy(inputs[:, :-1]).to(device))  # (B, T, V); the last token is no input
    goals = torch.from_numpy(targets[:, 1:]).to(device)  # (B, T)
    # one window after another: all logits in float32 could be more than the memory
    nats = [loss(logits[i].float(), goals[i], reduction="none").double().sum() for i in range(len(batch))]
    return torch.stack(nats).tolist()  # sync point, one for each batch


def text_documents(path: Path, source: Source, limit: int | None) -> Iterator[Document]:
    """Raises UserError at the first record that cannot be read: a figure of a part of the text would not be
    that of the text."""
    for number, record in itertools.islice(read_records(path), limit):
        if isinstance(record, BadRecord):
            raise UserError(f"--text={path}: {record}")
        if text := "".join(record):
            try:
                (ids,) = source.tokenizer.encode_arrays([text])
            except (EncodeError, UserError) as error:
                raise UserError(f"--text={path}, document {number}: {error}") from None
            yield ids, len(text.encode("utf-8"))


def dataset_documents(name: str, source: Source, limit: int | None) -> Iterator[Document]:
    """The documents of a dataset's validation split, without their end-of-text tokens. Checks names, sizes
    and hashes. Raises UserError."""
    vocab_size = source.model.config.vocab_size
    # block_size=1: a split need not fill a window
    config = TrainConfig(dataset=name, vocab_size=vocab_size, block_size=1, eval_only=True, doc_masking=True)
    splits, meta = open_dataset(config, scan=False)
    tokens, folder = splits["val"], splits["val"].paths[0].parent
    check_dataset(source.tokenizer, "the model", folder, "evaluate the text that it was made of: --text=FILE")
    files = {path.name: meta["files"].get(path.name, {}) for path in tokens.paths}
    if damaged := damaged_files(folder, described(meta["dtype"], files)):
        raise UserError(f"{folder / min(damaged)} is not the file that meta.json describes; copy it again")
    start, ends = 0, iter([np.array([tokens.total])])  # one document, if nothing says where documents end
    if meta["eot_id"] is not None or all("lengths" in file for file in files.values()):
        ends = find_documents(config, meta, tokens).ends()
    for end in itertools.islice(itertools.chain.from_iterable(ends), limit):
        ids = tokens.read(start, int(end) - start)
        start = int(end)
        if len(ids) and ids[-1] == meta["eot_id"] and meta["dtype"] != MASKED:  # which an answer ends with
            ids = ids[:-1]
        if len(ids):
            yield ids, _bytes(source, ids)


def _bytes(source: Source, ids: np.ndarray) -> int:
    return len(source.tokenizer.decode(ids[ids >= 0].tolist()).encode("utf-8"))


if __name__ == "__main__":
    sys.exit(run_command(main, sys.argv[1:]))
