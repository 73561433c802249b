"""Perplexity and bits per byte of held-out text: files of any kind that prepare.py reads, or the validation
split of a prepared dataset.

Every document is a text of its own. What counts:

- Tokens: each token of a document is predicted exactly once, the first one from the end-of-text token
  before it (beginning-of-text for weights that have one). Without such a token, the first one is not
  predicted. The end-of-text token itself is never predicted.
- Bytes: those of the document as UTF-8; of a prepared dataset, those of its decoded tokens. The bytes of a
  first token that is not predicted do not count, nor does an end-of-text token, which has none.
- perplexity = exp(nats / tokens); bits per byte = nats / ln 2 / bytes, which compares models of different
  tokenizers (Gao et al. 2020, The Pile, sec. 3.1; lm-eval's bits_per_byte is the same).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from common.errors import UserError
from data.pipeline.documents import BadRecord, read_records
from data.pipeline.input_files import KNOWN, is_read
from data.pipeline.verified import damaged_files
from data.tokenizers.tiktoken_tokenizer import EncodeError
from data.tokenizers.tokenizer import Tokenizer
from tools.evaluate.scoring import Pair, Scorer, windows
from tools.evaluate.subject import Subject
from training.batches.dataset import open_dataset
from training.batches.document_starts import find_documents
from training.batches.token_files import TokenFiles
from training.configuration.keys import TrainConfig
from training.pretrained.same_tokenizer import check_dataset
from training.process.world import World, gather_objects

LARGEST_NATS = 700.0  # of a token; e to this power is still a number
BATCHES_SORTED = 64  # of each rank: as many windows are held in memory to be sorted by length


@dataclass(frozen=True)
class Document:
    ids: np.ndarray
    bytes: int


@dataclass
class Totals:
    documents: int = 0
    tokens: int = 0  # predicted
    bytes: int = 0  # of the predicted tokens
    nats: float = 0.0

    def figures(self) -> dict[str, Any]:
        nats_per_token = self.nats / self.tokens
        return {
            "documents": self.documents,
            "tokens": self.tokens,
            "bytes": self.bytes,
            "nats": self.nats,
            "nats_per_token": nats_per_token,
            "perplexity": math.exp(nats_per_token),
            "bits_per_byte": self.nats / math.log(2) / self.bytes,
        }


def evaluate_documents(
    documents: Iterator[Document], subject: Subject, scorer: Scorer, stride: int, where: str
) -> dict[str, Any]:
    """The figures of all documents together. All ranks, with the same documents. Raises UserError if there
    is nothing to predict."""
    world, totals = scorer.world, Totals()

    def pairs() -> Iterator[Pair]:
        for document in documents:
            totals.documents += 1
            totals.bytes += document.bytes
            if subject.prefix_id is None:
                totals.bytes -= _bytes(subject.tokenizer, document.ids[:1])
            for pair in windows(document.ids, subject.prefix_id, subject.block_size, stride):
                totals.tokens += len(pair[1])
                yield pair

    remaining, mine = pairs(), 0.0
    with tqdm(desc=where, unit=" tokens", unit_scale=True, disable=not world.is_main) as bar:
        while some := list(itertools.islice(remaining, BATCHES_SORTED * scorer.batch_size * world.size)):
            mine += math.fsum(score.nats for score in scorer.score_share(some).values())
            bar.update(totals.tokens - bar.n)
    totals.nats = math.fsum(gather_objects(mine, world))
    if not totals.tokens or not totals.bytes:
        raise UserError(f"{where} has no text that could be predicted: it is empty, or of one token alone")
    if not totals.nats < LARGEST_NATS * totals.tokens:  # also NaN
        raise UserError(
            f"{where}: the loss is not finite in {subject.facts['precision']['compute_dtype']}; compute in "
            "another dtype: --dtype=float32"
        )
    return totals.figures()


def _bytes(tokenizer: Tokenizer, ids: np.ndarray) -> int:
    return len(tokenizer.decode(ids.tolist()).encode("utf-8"))


# --- text files ---


def check_text(path: Path) -> None:
    """Raises UserError if it is no file that can be read."""
    if path.is_dir():
        raise UserError(f"--text={path} is a folder; name its files, one --text for each")
    if not path.is_file():
        raise UserError(f"--text={path}: there is no such file")
    if not is_read(path):
        raise UserError(f"--text={path}: cannot read this kind of file; its name must end in {KNOWN}")


def text_documents(path: Path, tokenizer: Tokenizer, limit: int | None) -> Iterator[Document]:
    """Raises UserError at the first record that cannot be read: a figure of a part of the text would not be
    that of the text."""
    for number, record in itertools.islice(read_records(path), limit):
        if isinstance(record, BadRecord):
            raise UserError(f"--text={path}: {record}")
        text = "".join(record)
        if not text:
            continue
        try:
            (ids,) = tokenizer.encode_arrays([text])
        except (EncodeError, UserError) as error:
            raise UserError(f"--text={path}, document {number}: {error}") from None
        yield Document(ids, len(text.encode("utf-8")))


# --- prepared datasets ---


def open_validation(
    name: str, subject: Subject, world: World
) -> tuple[TokenFiles, np.ndarray | None, int | None]:
    """(the tokens of the validation split, the positions after its documents, the end-of-text id) of a
    dataset. None: the split is one document. Checks names, sizes and hashes. Raises UserError."""
    vocab_size = subject.model.config.vocab_size
    # block_size=1: a split need not fill a window
    config = TrainConfig(dataset=name, vocab_size=vocab_size, block_size=1, eval_only=True, doc_masking=True)
    splits, meta = open_dataset(config, scan=False)
    tokens = splits["val"]
    folder = tokens.paths[0].parent
    fix = "evaluate the text that it was made of: --text=FILE"
    check_dataset(subject.tokenizer, "the model", folder, fix)
    files = {path.name: meta["files"].get(path.name, {}) for path in tokens.paths}
    if world.local_rank == 0 and (damaged := damaged_files(folder, meta["dtype"], files)):
        raise UserError(f"{folder / min(damaged)} is not the file that meta.json describes; copy it again")
    ends = None
    if meta["eot_id"] is not None or all("lengths" in file for file in files.values()):
        documents = find_documents(config, meta, tokens)
        ends = np.concatenate(list(documents.ends()))
    return tokens, ends, meta["eot_id"]


def dataset_documents(
    tokens: TokenFiles, ends: np.ndarray | None, eot_id: int | None, tokenizer: Tokenizer, limit: int | None
) -> Iterator[Document]:
    """The documents of a split, without their end-of-text tokens."""
    start = 0
    for end in itertools.islice([tokens.total] if ends is None else ends.tolist(), limit):
        ids = tokens.read(start, end - start)
        start = end
        if len(ids) and ids[-1] == eot_id:
            ids = ids[:-1]
        if len(ids):
            yield Document(ids, _bytes(tokenizer, ids))
