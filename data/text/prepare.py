"""Your own text as a dataset, under any tokenizer.

    python data/text/prepare.py --input 'corpus/*.jsonl.zst' --tokenizer gpt2 --output data/my_corpus

One process, two files: for up to a few GB. data/slimpajama_*/prepare.py --input does more with many.
Reads .txt (a file is one document, held in memory whole), .jsonl, .jsonl.gz, .jsonl.zst (a line is one
document, {"text": ...}) and .parquet. Each document is followed by the tokenizer's end-of-text id. Whether it
trains or validates depends only on its number and on --val_fraction: the same input gives the same split.
"""

import argparse
import hashlib
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from tqdm import tqdm

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))

from data.documents import BadRecord, find_files, read_records  # noqa: E402
from data.end_of_text import EOT_NAMES, find_eot  # noqa: E402
from data.tokens import DataError, open_tokenizer, report, run, write_dataset  # noqa: E402

BATCH_CHARS = 2_000_000  # of text encoded at once: keeps the cores busy and the process under about 0.5 GB
# The config whose model has this tokenizer's vocabulary, for the command printed at the end.
CONFIGS = {
    50257: "config/full_gpt2_1.36b.py",
    32000: "config/full_llama_1.36b.py",
    128256: "config/full_llama3_1.5b_optimal.py",
    151669: "config/full_qwen3_1.8b_optimal.py",
}


# --- text in ---


def read_documents(files: list[Path], bar: tqdm) -> Iterator[str]:
    """The texts, one after another; the bar counts bytes on disk. An unreadable record is an error."""
    for path in files:
        for _, document in read_records(path, bar.update):
            if isinstance(document, BadRecord):
                raise DataError(f"{document}; repair or remove it")
            yield "".join(document)


# --- tokens out ---


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
