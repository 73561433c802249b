"""How fast text becomes token ids: data/pipeline/ beside the tokenizer's own library and datasets.map.

    python -m bench.tokenize --input slimpajama --tokenizer gpt2 llama2_tokenizer llama3_tokenizer \\
        qwen3_tokenizer --workers 8

The library runs its batch call on one thread and writes nothing; the preparation reads .jsonl.zst, makes ids,
checks, hashes and writes them. What is counted is the rate of a worker that is at work: not the start of
processes, the loading of tokenizers and the verification of the fast encoder, which a run does once. All
methods take turns, so that a busy moment of the machine does not fall on one of them alone.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import importlib.util
import json
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from bench.results import spread
from bench.table import new_folder, save_table
from bench.tokenization import Peers, Rate, measure_preparation, read_sample
from common.arguments import real_number, user_path, whole_number
from common.errors import UserError
from common.text import aligned
from data.pipeline.input_files import find_files
from data.tokenizers.tokenizer import open_tokenizer

# What needs torch is imported where it is used: each worker process imports this module again.

UNIT_SECONDS = 1.5  # about the time that a unit shall take; each worker makes two
FAST_GAIN = 4  # expected speed of the fast encoder, in times the library's; used to choose the size of a unit
MOST_PASSES = 30  # over the sample, in a unit
WORKERS_MAX = 1024  # processes of one machine
CORES = 128  # of the machine for which the time of CORPORA is extrapolated
CORPORA = {"6 B": 6e9, "627 B": 627e9}  # tokens
COLUMNS = (
    "tokenizer",
    "what",
    "tokens/s (p10 to p90)",
    "MB/s",
    "% of library",
    "% by CPU time",
    "x 1 worker",
)
TEXT_COLUMNS = ("tokenizer", "what", "tokens/s (p10 to p90)")
MISSING_PEER = "datasets.map was not measured: the datasets package is missing (pip install datasets)."
LEGEND = (
    "Medians of {repeats} repeats. library: its batch call on one thread, ids as lists, nothing read or\n"
    "written. N workers: data/pipeline/ from .jsonl.zst to token files, while at work; ids by the same\n"
    "library or, where the encoder is fast, by tiktoken's loop. datasets.map: batched, one process, the\n"
    "library's call, into an Arrow file. By CPU time: tokens for each second of a core, which counts no\n"
    "waiting for other programs."
)


def main(argv: list[str]) -> int:
    arguments = parse(argv)
    started = datetime.datetime.now().astimezone()
    folder = new_folder(arguments.output, f"tokenize_{started:%Y%m%d_%H%M%S}")
    texts = read_sample(find_files(arguments.input), arguments.mb)
    size = sum(len(text.encode()) for text in texts)
    print(f"{len(texts):,} documents, {size / 1e6:.1f} MB of text", flush=True)
    content = describe(argv, started, len(texts), size, arguments)
    results = {name: open_result(path) for name, path in named_paths(arguments.tokenizer).items()}
    peers = Peers(texts)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        sample = write_sample(texts, Path(scratch))
        for repeat in range(1, arguments.repeats + 1):
            for name, result in results.items():
                for method, rate in measure_all(result, arguments, peers, sample, size, Path(scratch)):
                    result["rates"].setdefault(method, []).append(dataclasses.asdict(rate))
                    progress = f"[{repeat}/{arguments.repeats}] {name}, {method}"
                    print(f"{progress}: {rate.tokens_per_sec:,.0f} tokens/s", flush=True)
                everything = {**content, "tokenizers": results}
                save_table(folder, everything, document_lines(content, results))
    peers.close()
    print("\n" + "\n".join(document_lines(content, results)) + f"\n\nSaved in {folder}", flush=True)
    return 0


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.tokenize", description=__doc__.splitlines()[0], allow_abbrev=False
    )
    add = parser.add_argument
    add(
        "--input",
        nargs="+",
        required=True,
        type=user_path,
        metavar="PATH",
        help="text: files, folders or quoted globs",
    )
    add(
        "--tokenizer",
        nargs="+",
        required=True,
        metavar="[NAME=]PATH",
        help="gpt2, or what a prepare.py takes: tokenizer.json, tokenizer.model, or the folder of one",
    )
    add("--workers", type=whole_number(1, WORKERS_MAX), default=2, help="of the preparation, beside one (2)")
    add("--mb", type=real_number(0.001, 1e6), default=6, help="MB of text, from all of the input (6)")
    add("--repeats", type=whole_number(1), default=3, help="(3)")
    add("--quick", action="store_true", help="one repeat of 1.5 MB: whether it works, not how fast")
    add("--no_peer", action="store_true", help="leave datasets.map out")
    add("--output", type=user_path, help="a new folder (default: out-bench/tokenize_DATE_TIME)")
    arguments = parser.parse_args(argv)
    if arguments.quick:
        arguments.mb, arguments.repeats = 1.5, 1
    return arguments


def named_paths(arguments: list[str]) -> dict[str, str]:
    """{name in the table: path}; the name is the folder's where none is given."""
    named = {}
    for argument in arguments:
        name, _, named_path = argument.rpartition("=")
        named_path = os.path.expanduser(named_path)
        resolved = Path(named_path).resolve()
        if not name and not resolved.exists():
            name = named_path
        elif not name:
            name = resolved.parent.name if resolved.is_file() else resolved.name
        if name in named:
            raise UserError(f"two tokenizers would be called {name}; pass --tokenizer NAME=PATH")
        named[name] = named_path
    return named


def open_result(path: str) -> dict:
    """What is known of a tokenizer before it is measured: whether the preparation uses its fast encoder."""
    tokenizer = open_tokenizer(path)
    began = time.perf_counter()
    fast = tokenizer.use_fast_encoder()
    return {"path": path, "fast": fast, "verify_seconds": time.perf_counter() - began, "rates": {}}


def describe(
    argv: list[str], started: datetime.datetime, documents: int, size: int, arguments: argparse.Namespace
) -> dict:
    from training.hardware.description import describe_hardware
    from training.records.startup_info import git_state

    software = describe_hardware("cpu")
    for package in ("tokenizers", "tiktoken", "datasets"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            software[package] = metadata.version(package)
    peer = None if arguments.no_peer or "datasets" in software else MISSING_PEER
    return {
        "date": started.isoformat(timespec="seconds"),
        "command": shlex.join(["python", "-m", "bench.tokenize", *argv]),
        "repeats": arguments.repeats,
        "documents": documents,
        "bytes": size,
        "cores": os.cpu_count(),
        "software": software,
        "git": git_state(),
        "peer_missing": peer,
    }


def write_sample(texts: list[str], folder: Path) -> Path:
    lines = "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts).encode()
    try:
        import zstandard
    except ImportError:
        raise UserError("the benchmark writes .jsonl.zst: pip install zstandard") from None
    path = folder / "sample.jsonl.zst"
    path.write_bytes(zstandard.compress(lines))
    return path


def measure_all(
    result: dict, arguments: argparse.Namespace, peers: Peers, sample: Path, size: int, scratch: Path
) -> Iterator[tuple[str, Rate]]:
    """(method, rate) of each method, measured one after another."""
    path, fast = result["path"], result["fast"]
    library = peers.measure("library", path)
    yield "library", library
    seconds = size / 1e6 / library.mb_per_sec / (FAST_GAIN if fast else 1)
    passes = round(min(MOST_PASSES, max(1, UNIT_SECONDS / seconds)))
    for workers in sorted({1, arguments.workers}):
        with tempfile.TemporaryDirectory(dir=scratch) as folder:
            rate = measure_preparation(path, sample, size, passes, workers, fast, Path(folder) / "out")
        yield _workers(workers), rate
    if not arguments.no_peer and importlib.util.find_spec("datasets"):
        yield "datasets.map", peers.measure("datasets.map", path)


def _workers(count: int) -> str:
    return f"{count} worker{'s' * (count > 1)}"


# --- the table ---


def document_lines(content: dict, results: dict) -> list[str]:
    software, git = content["software"], content["git"]
    versions = ", ".join(
        f"{name} {v}" for name, v in software.items() if v and name not in ("gpu_name", "torch")
    )
    commit = f"commit {(git['commit'] or 'unknown')[:12]}{' with changes' * bool(git['modified'])}"
    lines = [
        f"## {content['date'][:10]}, {software['gpu_name']}, {content['cores']} cores, bench.tokenize",
        "",
    ]
    lines += [f"    {content['command']}", "", f"{versions}; {commit}.", ""]
    rows = [row for name, result in results.items() for row in table_rows(name, result)]
    lines += aligned(COLUMNS, rows, TEXT_COLUMNS, "github")
    lines += ["", LEGEND.format(repeats=content["repeats"])]
    lines += [""] * bool(results) + [line for name, r in results.items() for line in extrapolation(name, r)]
    if content["peer_missing"]:
        lines += ["", content["peer_missing"]]
    return lines


def table_rows(name: str, result: dict) -> list[list[str]]:
    medians = {method: summary(rates) for method, rates in result["rates"].items()}
    one = medians.get(_workers(1))
    rows = []
    for method, figures in medians.items():
        library = medians["library"]  # measured before all others
        rate = figures["tokens_per_sec"]
        ratio = figures["mb_per_sec"]["median"] / library["mb_per_sec"]["median"]
        by_cpu = figures["cpu_tokens_per_sec"]["median"] / library["cpu_tokens_per_sec"]["median"]
        scaling = rate["median"] / one["tokens_per_sec"]["median"] if one and "workers" in method else None
        what = (
            f"{method}, {'fast encoder' if result['fast'] else 'library'}" if "worker" in method else method
        )
        spread_text = f"{rate['median']:,.0f} ({rate['p10']:,.0f} to {rate['p90']:,.0f})"
        rows.append(
            [
                name,
                what,
                spread_text,
                f"{figures['mb_per_sec']['median']:.2f}",
                f"{100 * ratio:.0f}",
                f"{100 * by_cpu:.0f}",
                "" if scaling is None else f"{scaling:.2f}",
            ]
        )
    return rows


def summary(rates: list[dict]) -> dict:
    return {key: spread([[rate[key]] for rate in rates]) for key in rates[0] if key != "tokens"}


def duration(seconds: float) -> str:
    for name, length in (("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.1f} {name}"
    return f"{seconds:.1f} s"


def extrapolation(name: str, result: dict) -> list[str]:
    """One line, from the rate of one worker."""
    rates = result["rates"].get(_workers(1))
    if not rates:
        return []
    rate = summary(rates)["tokens_per_sec"]["median"]
    times = ", ".join(f"{corpus} tokens {duration(n / rate / CORES)}" for corpus, n in CORPORA.items())
    return [
        f"{name}, {CORES} cores: {times} (extrapolated: {CORES} x the rate of one worker, nothing measured)"
    ]


if __name__ == "__main__":
    from bench.process import end_with_status

    sys.exit(end_with_status(main, sys.argv[1:]))
