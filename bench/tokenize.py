"""How fast text becomes token ids: data/pipeline/ beside the tokenizer's own library.

    python -m bench.tokenize --input slimpajama --tokenizer gpt2 llama2_tokenizer llama3_tokenizer --workers 8

The library runs its batch call on one thread and writes nothing; the preparation reads .jsonl, makes ids,
checks, hashes and writes them. What is counted is the rate of a worker that is at work: not the start of
processes, the loading of tokenizers and the verification of the fast encoder, which a run does once; so each
unit of the preparation takes some seconds. All methods take turns, so that a busy moment of the machine does
not fall on one of them alone.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import sys
import tempfile
import time
from pathlib import Path

from common.arguments import real_number, user_path, whole_number
from common.errors import UserError
from common.text import aligned
from data.pipeline.document_pieces import PIECE_CHARS
from data.pipeline.documents import BadRecord, read_records
from data.pipeline.input_files import find_files
from data.pipeline.units import Settings, Unit
from data.pipeline.workers import run_units
from data.tokenizers.choice import find_eot
from data.tokenizers.fast_encoder import use_fast_encoder
from data.tokenizers.file_tokenizer import FileTokenizer
from data.tokenizers.tokenizer import open_tokenizer

# What needs torch is imported where it is used: each worker process imports this module again.

UNIT_SECONDS = 1.5  # about the time that a unit shall take
UNITS_PER_WORKER = 2
FAST_GAIN = 4  # expected speed of the fast encoder, in times the library's; used to choose the size of a unit
MOST_PASSES = 30  # over the sample, in a unit
BATCH_DOCUMENTS = 1000  # of a call of the library
WORKERS_MAX = 1024  # processes of one machine
CORPUS = 627e9  # tokens, for the last column
COLUMNS = ("tokenizer", "what", "tokens/s (p10 to p90)", "MB/s", "% of library", "h for 627 B")
LEGEND = (
    "Medians of {repeats} repeats. library: its batch call on one thread, ids as lists, nothing read or\n"
    "written. N workers: data/pipeline/ from .jsonl to token files, while at work; ids by the same\n"
    "library or, where the encoder is fast, by tiktoken's loop."
)


def main(argv: list[str]) -> int:
    arguments = parse(argv)
    os.environ.update(TOKENIZERS_PARALLELISM="false", RAYON_NUM_THREADS="1")
    from bench.table import about_this, heading, new_folder, save_table

    folder = new_folder(arguments.output, "tokenize")
    texts = read_sample(find_files(arguments.input), arguments.mb)
    size = sum(len(text.encode()) for text in texts)
    content = about_this("bench.tokenize", argv) | {"documents": len(texts), "bytes": size}
    tokenizers: dict[str, dict] = {}
    print(f"{len(texts):,} documents, {size / 1e6:.1f} MB of text", flush=True)
    for name, path in named_paths(arguments.tokenizer).items():
        fast = use_fast_encoder(open_tokenizer(path))
        tokenizers[name] = {"path": path, "fast": fast, "tokens": 0, "rates": {}}
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        sample = write_sample(texts, Path(scratch))
        for repeat in range(1, arguments.repeats + 1):
            for name, result in tokenizers.items():
                measure(result, arguments.workers, sample, texts)
                last = {method: round(rates[-1]) for method, rates in result["rates"].items()}
                print(f"[{repeat}/{arguments.repeats}] {name}, tokens/s: {last}", flush=True)
            rows = [row for name, result in tokenizers.items() for row in table_rows(name, result, size)]
            lines = heading(content, f"{os.cpu_count()} cores, bench.tokenize")
            lines += ["", *aligned(COLUMNS, rows, COLUMNS[:3], "github"), "", LEGEND.format(repeats=repeat)]
            save_table(folder, {**content, "tokenizers": tokenizers}, lines)
    print("\n" + "\n".join(lines) + f"\n\nSaved in {folder}", flush=True)
    return 0


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.tokenize", description=__doc__.splitlines()[0], allow_abbrev=False
    )
    add = parser.add_argument
    inputs = "text: files, folders or quoted globs"
    add("--input", nargs="+", required=True, type=user_path, help=inputs)
    named = "gpt2, or what a prepare.py takes: tokenizer.json, tokenizer.model, or the folder of one"
    add("--tokenizer", nargs="+", required=True, metavar="[NAME=]PATH", help=named)
    add("--workers", type=whole_number(1, WORKERS_MAX), default=2, help="of the preparation, beside one (2)")
    add("--mb", type=real_number(0.001, 1e6), default=6, help="MB of text, from all of the input (6)")
    add("--repeats", type=whole_number(1), default=3, help="(3)")
    add("--output", type=user_path, help="a new folder (default: out-bench/tokenize_DATE_TIME)")
    return parser.parse_args(argv)


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


def read_sample(files: list[Path], megabytes: float) -> list[str]:
    """Documents from the beginning of the files, about the same number of bytes from each."""
    texts: list[str] = []
    bytes_per_file = megabytes * 1e6 / len(files)
    for path in files:
        size = 0
        for _, document in read_records(path):
            if isinstance(document, BadRecord):
                raise UserError(f"{document}; choose another --input")
            text = "".join(document)
            texts.append(text[: 2 * PIECE_CHARS])
            size += len(texts[-1].encode())
            if size >= bytes_per_file:
                break
    return texts


def write_sample(texts: list[str], folder: Path) -> Path:
    path = folder / "sample.jsonl"
    lines = "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts)
    path.write_text(lines, encoding="utf-8")
    return path


# --- measuring ---


def measure(result: dict, workers: int, sample: Path, texts: list[str]) -> None:
    """Adds a rate to each method of a tokenizer, one after another."""
    result["tokens"], seconds = measure_library(result["path"], texts)
    result["rates"].setdefault("library", []).append(result["tokens"] / seconds)
    expected = seconds / (FAST_GAIN if result["fast"] else 1)
    passes = round(min(MOST_PASSES, max(1, UNIT_SECONDS / expected)))
    for count in sorted({1, workers}):
        with tempfile.TemporaryDirectory(dir=sample.parent) as folder:
            rate = measure_preparation(result["path"], sample, passes, count, result["fast"], Path(folder))
        result["rates"].setdefault(f"{count} worker{'s' * (count > 1)}", []).append(rate)


def measure_library(tokenizer_name: str, texts: list[str]) -> tuple[int, float]:
    """(tokens, seconds) of its fastest call for a list of texts on one thread; it returns lists of ids."""
    tokenizer = open_tokenizer(tokenizer_name)
    if isinstance(tokenizer, FileTokenizer):
        library = tokenizer.tokenizer

        def encode(texts: list[str]) -> list[list[int]]:
            return [found.ids for found in library.encode_batch_fast(texts, add_special_tokens=False)]
    else:

        def encode(texts: list[str]) -> list[list[int]]:
            return tokenizer.encoding.encode_ordinary_batch(texts, num_threads=1)

    encode(texts[:10])
    tokens, began = 0, time.perf_counter()
    for start in range(0, len(texts), BATCH_DOCUMENTS):
        tokens += sum(map(len, encode(texts[start : start + BATCH_DOCUMENTS])))
    return tokens, time.perf_counter() - began


def measure_preparation(
    tokenizer_name: str, sample: Path, passes: int, workers: int, fast: bool, folder: Path
) -> float:
    """Tokens/s of units that read the sample `passes` times each. A worker's rate is measured from the
    beginning of its first unit to the end of its last one."""
    settings = Settings(find_eot(open_tokenizer(tokenizer_name), None), None, 0.001, 1 << 28)
    files = ((str(sample), sample.name),) * passes
    units = [Unit(number, None, files, None) for number in range(UNITS_PER_WORKER * workers)]
    (folder / "units").mkdir()
    with contextlib.redirect_stderr(io.StringIO()):  # the progress bar
        finished = run_units(units, folder, tokenizer_name, settings, workers, 0, fast=fast)
    processes = {unit.process for unit in finished}
    if len(processes) != workers:
        raise UserError("a worker process started so late that it had nothing to do; use a larger --mb")
    rate = 0.0
    for process in processes:
        own = [unit for unit in finished if unit.process == process]
        made = sum(file["tokens"] for unit in own for file in unit.manifest["files"].values())
        rate += made / (max(unit.ended for unit in own) - min(unit.began for unit in own))
    return rate


def table_rows(name: str, result: dict, size: int) -> list[list[str]]:
    from bench.results import spread

    found = {method: spread([rates]) or {} for method, rates in result["rates"].items()}
    rows = []
    for method, rate in found.items():
        encoder = f", {'fast encoder' if result['fast'] else 'library'}" * ("worker" in method)
        figures = f"{rate['median']:,.0f} ({rate['p10']:,.0f} to {rate['p90']:,.0f})"
        megabytes = rate["median"] * size / result["tokens"] / 1e6
        of_library = 100 * rate["median"] / found["library"]["median"]
        hours = CORPUS / rate["median"] / 3600
        rows.append(
            [name, method + encoder, figures, f"{megabytes:.2f}", f"{of_library:.0f}", f"{hours:,.0f}"]
        )
    return rows


if __name__ == "__main__":
    from bench.process import end_with_status

    sys.exit(end_with_status(main, sys.argv[1:]))
