"""Your own text as a dataset, under any tokenizer.

    python data/text/prepare.py --input 'corpus/*.jsonl.zst' --tokenizer gpt2 --output data/my_corpus

Reads .txt (a file is one document, held in memory whole) and .jsonl, .jsonl.gz, .jsonl.zst (a line is one
document, {"text": ...}). Each document is followed by the tokenizer's end-of-text id. Whether a document
trains or validates depends only on its number and on --val_fraction: the same input gives the same split.
"""

import argparse
import glob
import gzip
import hashlib
import io
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from tqdm import tqdm

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))

from data.tokens import DataError, open_tokenizer, report, run, write_dataset  # noqa: E402

SUFFIXES = (".txt", ".jsonl", ".jsonl.gz", ".jsonl.zst")
EOT_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>")  # in order of preference
BATCH_CHARS = 2_000_000  # of text encoded at once: keeps the cores busy and the process under about 0.5 GB
# The config whose model has this tokenizer's vocabulary, for the command printed at the end.
CONFIGS = {
    50257: "config/full_gpt2_1.36b.py",
    32000: "config/full_llama_1.36b.py",
    128256: "config/full_llama3_1.5b_optimal.py",
    151669: "config/full_qwen3_1.8b_optimal.py",
}


# --- text in ---


def find_files(patterns: list[str]) -> list[Path]:
    """The input files in the order they are read: each argument a file, a folder or a glob, sorted within."""
    files = []
    for pattern in patterns:
        path = Path(pattern)
        found = [path] if path.is_file() else [Path(name) for name in glob.glob(pattern, recursive=True)]
        if path.is_dir():
            found = [file for file in path.rglob("*") if file.name.endswith(SUFFIXES)]
            notes = [file for file in found if file.suffix == ".txt"]
            if 0 < len(notes) < len(found):  # a README.txt beside the data would become a document
                raise DataError(
                    f"--input {pattern} holds .jsonl files and {notes[0].name}; use a glob to say which"
                )
        if not found:
            raise DataError(
                f"--input {pattern}: no such file, or nothing in it ends in {', '.join(SUFFIXES)}"
            )
        files += sorted(found)
    for path in files:
        if not path.name.endswith(SUFFIXES):
            raise DataError(
                f"--input {path}: cannot read this kind of file; it must be {', '.join(SUFFIXES)}"
            )
    return list(dict.fromkeys(files))  # a file that two arguments name is read once


def open_lines(raw: io.BufferedReader, path: Path) -> Iterable[bytes]:
    if path.suffix == ".gz":
        return gzip.open(raw)
    if path.suffix != ".zst":
        return raw
    try:
        import zstandard
    except ImportError:
        raise DataError(f"{path} needs the zstandard library: pip install zstandard") from None
    decompressor = zstandard.ZstdDecompressor(max_window_size=1 << 31)  # files made with zstd --long too
    return io.BufferedReader(decompressor.stream_reader(raw, read_across_frames=True), 1 << 20)


def parse_line(line: bytes, path: Path, number: int) -> str:
    try:
        text = json.loads(line)["text"]
        text.encode("utf-8")  # half a surrogate pair is valid JSON and no text
        return text
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f'{path}, line {number} is not a JSON object with a "text" string '
            f"({type(error).__name__}: {error}); repair or remove the line"
        ) from error


def read_documents(files: list[Path], bar: tqdm) -> Iterator[str]:
    """The texts that are not empty, one after another; the bar counts bytes on disk."""
    for path in files:
        before = bar.n
        number = 0
        try:
            with open(path, "rb") as raw:
                if path.suffix == ".txt":
                    yield raw.read().decode("utf-8-sig").replace("\r\n", "\n")
                    bar.update(path.stat().st_size)
                    continue
                for number, line in enumerate(open_lines(raw, path), start=1):
                    if line.strip():
                        yield parse_line(line, path, number)
                    bar.update(before + raw.tell() - bar.n)
        except DataError:
            raise
        except Exception as error:  # gzip, zlib and zstandard each have their own
            raise DataError(
                f"{path} is damaged after line {number}: {type(error).__name__}: {error}"
            ) from error


# --- tokens out ---


def find_eot(tokenizer, wanted: str | None) -> int:
    names = EOT_NAMES if wanted is None else (wanted,)
    found = {name: tokenizer.token_id(name) for name in names if tokenizer.token_id(name) is not None}
    if not found:
        raise DataError(
            f"the tokenizer has no token {' or '.join(names)}; name its end-of-text token with --eot"
        )
    name, eot_id = next(iter(found.items()))
    if eot_id in tokenizer.encode(name):
        raise DataError(
            f"a document that spells {name} would end there, as the tokenizer does not mark it as special; "
            f'choose another with --eot, or set "special": true for it in tokenizer.json'
        )
    return eot_id


def in_batches(texts: Iterable[str]) -> Iterator[list[str]]:
    batch, chars = [], 0
    for text in texts:
        if not text:
            continue
        batch.append(text)
        chars += len(text)
        if chars >= BATCH_CHARS:
            yield batch
            batch, chars = [], 0
    if batch:
        yield batch


def encode_documents(
    texts: Iterable[str], tokenizer, eot_id: int, max_tokens: int | None
) -> Iterator[list[int]]:
    """Whole documents, each with its end-of-text id, until max_tokens are reached."""
    tokens = 0
    for batch in in_batches(texts):
        for ids in tokenizer.encode_batch(batch):
            yield ids + [eot_id]
            tokens += len(ids) + 1
            if max_tokens is not None and tokens >= max_tokens:
                return


def is_validation(number: int, val_fraction: float) -> bool:
    """A coin that depends only on the document's number, so it falls alike on every run and machine."""
    digest = hashlib.sha256(str(number).encode()).digest()
    return int.from_bytes(digest[:8], "big") < val_fraction * 2**64


def assign_splits(documents: Iterable[list[int]], val_fraction: float) -> Iterator[tuple[str, list[int]]]:
    """(split, ids) for each document. The last goes where none has gone; an only one is cut in two."""
    missing = {"train", "val"}
    number, last = 0, None  # the newest document waits here, for it may be the last
    for number, ids in enumerate(documents, start=1):
        if last is not None:
            missing.discard(last[0])
            yield last
        last = ("val" if is_validation(number, val_fraction) else "train", ids)
    if last is None:
        return
    split, ids = last
    if number == 1:
        cut = int(len(ids) * (1 - val_fraction))
        yield "train", ids[:cut]
        yield "val", ids[cut:]
    else:
        yield (missing.pop() if missing else split), ids


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--input", nargs="+", required=True, metavar="PATH", help="files, folders or quoted globs"
    )
    parser.add_argument(
        "--tokenizer", required=True, metavar="NAME", help="gpt2, a tokenizer.json, or its folder"
    )
    parser.add_argument("--output", metavar="DIR", default=HERE, help="dataset folder (default: this one)")
    parser.add_argument(
        "--val_fraction", type=float, default=0.01, help="share of the documents (default: 0.01)"
    )
    parser.add_argument(
        "--max_tokens", type=int, help="stop after the document that reaches this many tokens"
    )
    parser.add_argument("--eot", metavar="TOKEN", help=f"end-of-text token (default: {', '.join(EOT_NAMES)})")
    args = parser.parse_args()
    if not 0 < args.val_fraction < 1:
        raise DataError(f"--val_fraction={args.val_fraction} must lie between 0 and 1, for example 0.01")
    if args.max_tokens is not None and args.max_tokens < 1:
        raise DataError(
            f"--max_tokens={args.max_tokens} must be at least 1; leave it out for the whole input"
        )

    files = find_files(args.input)
    tokenizer = open_tokenizer(args.tokenizer)
    eot_id = find_eot(tokenizer, args.eot)
    source = f"{' '.join(args.input)}, val_fraction {args.val_fraction}, max_tokens {args.max_tokens}"
    size = sum(path.stat().st_size for path in files)
    with tqdm(total=size, unit="B", unit_scale=True, desc=f"{len(files)} files") as bar:
        documents = encode_documents(read_documents(files, bar), tokenizer, eot_id, args.max_tokens)
        splits = assign_splits(documents, args.val_fraction)
        meta = write_dataset(args.output, splits, tokenizer.vocab_size, tokenizer.meta, eot_id, source)
    report(meta, args.output, CONFIGS.get(tokenizer.vocab_size))


if __name__ == "__main__":
    run(main)
