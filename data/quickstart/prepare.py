"""The embedded corpus: the source of Python's standard library, under a 4,096-token BPE trained on it here.

It is on every machine that can run this script, so a first training run needs no network and no download.
The same Python version always gives the same files; another version gives another, equally good, corpus.
"""

import argparse
import math
import platform
import sys
import sysconfig
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))

from common.arguments import check_output, user_path  # noqa: E402
from common.command import run_command  # noqa: E402
from common.errors import UserError  # noqa: E402
from data.pipeline.input_files import say_files  # noqa: E402
from data.pipeline.next_commands import report  # noqa: E402
from data.pipeline.preparation import write_dataset  # noqa: E402
from data.tokenizers.bpe_training import EOT_ID, train_bpe  # noqa: E402
from data.tokenizers.file_tokenizer import FileTokenizer  # noqa: E402

VOCAB_SIZE = 4096
CORPUS_BYTES = 12_000_000  # about 3 M tokens; the preparation takes seconds
BPE_BYTES = 8_000_000  # of text, to learn the merges from: every k-th text; bounds time and memory
VAL_EVERY = 20  # every 20th file is for validation: whole files, so that training sees no part of them
# These are not the library itself; encodings holds tables of character codes.
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "encodings"}


def read_stdlib(limit_bytes: int) -> list[str]:
    """The modules of the running Python in the order of their paths: whole files, up to limit_bytes."""
    root = Path(sysconfig.get_path("stdlib"))
    names = (path.relative_to(root) for path in root.rglob("*.py"))
    paths = [root / name for name in names if not SKIPPED_FOLDERS & set(name.parts[:-1])]
    texts = []
    for path in sorted(paths, key=lambda path: path.as_posix()):
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            say_files("left out", [path], "not UTF-8 text")
            continue
        limit_bytes -= len(text.encode("utf-8"))
        if limit_bytes < 0:
            break
        texts += [text] if text else []
    if len(texts) < VAL_EVERY:
        raise UserError(f"only {len(texts)} .py files under {root}; use a Python with its library in .py")
    return texts


def prepare(folder: str | Path, corpus_bytes: int = CORPUS_BYTES) -> dict:
    """Make the dataset; returns its meta."""
    library = f"{platform.python_implementation()} {platform.python_version()} standard library"
    source = f"{library}, {corpus_bytes} bytes, BPE {VOCAB_SIZE} on {BPE_BYTES} bytes, val 1 in {VAL_EVERY}"
    texts = read_stdlib(corpus_bytes)
    splits = {"train": [text for i, text in enumerate(texts, start=1) if i % VAL_EVERY != 0]}
    splits["val"] = texts[VAL_EVERY - 1 :: VAL_EVERY]
    print(f"{library}: {len(texts)} files; training a BPE of {VOCAB_SIZE} tokens on a part of them")
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "quickstart" / "tokenizer.json"
        path.parent.mkdir()
        every = math.ceil(sum(map(len, splits["train"])) / BPE_BYTES)
        content, _ = train_bpe(splits["train"][::every], VOCAB_SIZE)
        path.write_text(content, encoding="utf-8")
        tokenizer = FileTokenizer(path)
        encode = lambda text: tokenizer.encode(text) + [EOT_ID]  # noqa: E731
        ids = {split: map(encode, texts) for split, texts in splits.items()}
        return write_dataset(folder, ids, tokenizer.vocab_size, tokenizer.meta, EOT_ID, source)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    where = "dataset folder (default: this one)"
    parser.add_argument("--output", type=user_path, metavar="DIR", default=HERE, help=where)
    args = parser.parse_args()
    check_output(args.output)
    report(prepare(args.output), args.output)


if __name__ == "__main__":
    sys.exit(run_command(main))
