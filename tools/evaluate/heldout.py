"""Perplexity and bits per byte of held-out text: files of any kind that prepare.py reads, or the validation
split of a prepared dataset.

Every document is a text of its own. docs/evaluation.md says which tokens and bytes count.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from common.errors import UserError
from common.json_file import read_json
from data.pipeline.documents import BadRecord, read_records
from data.pipeline.input_files import KNOWN, is_read
from data.pipeline.token_files import MASKED, described, largest_id, plain_ids
from data.pipeline.verified import damaged_files
from data.tokenizers.tiktoken_tokenizer import EncodeError
from data.tokenizers.tokenizer import Tokenizer
from generation.source import Source
from model import Transformer
from training.batches.dataset import open_dataset
from training.batches.document_starts import find_documents
from training.batches.windows import NO_TARGET
from training.configuration.keys import TrainConfig
from training.pretrained.same_tokenizer import check_dataset

LARGEST_NATS = 700.0  # of a token; e to this power is still a number
BATCHES_SORTED = 64  # as many batches of windows are held in memory to be sorted by length
LENGTH_MULTIPLE = 64  # lengths are rounded up to one, so that GPU kernels meet few shapes

Document = tuple[np.ndarray, int]  # its ids, and its bytes
# ids, of which the last so many are predicted; a negative one is no target (data/pipeline/conversations.py)
Window = tuple[np.ndarray, int]


def evaluate_documents(
    documents: Iterator[Document], source: Source, batch_size: int, stride: int, where: str
) -> dict[str, Any]:
    """The figures of all documents together. Raises UserError if there is nothing to predict."""
    config, prefix_id = source.model.config, prefix_of(source)
    number = tokens = size = 0

    def all_windows() -> Iterator[Window]:
        nonlocal number, tokens, size
        for ids, length in documents:
            if (largest := largest_id(ids)) >= config.vocab_size:
                raise UserError(
                    f"a text has the id {largest:,}, but the model has only the ids below "
                    f"{config.vocab_size:,}; take this token out, or use the tokenizer of this model"
                )
            number, size = number + 1, size + length
            is_chat = ids.min(initial=0) < 0  # it begins where its template begins
            if prefix_id is None or is_chat:
                size -= _bytes(source.tokenizer, ids[:1])
            for window in windows(ids, None if is_chat else prefix_id, config.block_size, stride):
                tokens += int((window[0][-window[1] :] >= 0).sum())
                yield window

    remaining, sums = iter(tqdm(all_windows(), desc=where, unit=" windows")), []
    while some := list(itertools.islice(remaining, BATCHES_SORTED * batch_size)):
        some.sort(key=lambda window: -len(window[0]))  # each batch has windows of about one length
        for first in range(0, len(some), batch_size):
            sums += window_nats(source.model, some[first : first + batch_size])
    nats = math.fsum(sums)
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
    last = len(whole) - 1
    done = 0  # whole[done] is the last token that needs no prediction any more
    while done < last:
        end = min(last, block_size if done == 0 else done + stride)
        yield whole[max(0, end - block_size) : end + 1], end - done
        done = end


@torch.no_grad()
def window_nats(model: Transformer, batch: list[Window]) -> list[float]:
    """-ln p of the predicted tokens of each window. Windows are padded on the right: attention is causal, so
    no token sees the padding, and no mask is needed."""
    longest = max(len(ids) for ids, _ in batch) - 1  # the last token is no input
    padded = min(-(-longest // LENGTH_MULTIPLE) * LENGTH_MULTIPLE, model.config.block_size)
    inputs = np.zeros((len(batch), padded), np.int64)  # any id can be the padding
    for row, (ids, _) in zip(inputs, batch, strict=True):
        row[: len(ids) - 1] = plain_ids(ids[:-1])
    device = model.embed.weight.device
    logits = model(torch.from_numpy(inputs).to(device))  # (B, T, V)
    sums = []
    for (ids, count), found in zip(batch, logits, strict=True):
        targets = torch.from_numpy(np.where(ids < 0, NO_TARGET, ids)[-count:]).to(device)
        chosen = found[len(ids) - 1 - count : len(ids) - 1].float()  # (count, V)
        sums.append(torch.nn.functional.cross_entropy(chosen, targets, reduction="none").double().sum())
    return torch.stack(sums).tolist()  # sync point, one for each batch


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


def _bytes(tokenizer: Tokenizer, ids: np.ndarray) -> int:
    return len(tokenizer.decode(ids[ids >= 0].tolist()).encode("utf-8"))


# --- where documents come from ---


def check_text(path: Path) -> None:
    """Raises UserError if it is no file that can be read."""
    if not path.is_file() or not is_read(path):
        what = "is a file of another kind" if path.is_file() else "is no file"
        raise UserError(f"--text={path} {what}; name a file that ends in {KNOWN}, one --text for each")


def text_documents(path: Path, tokenizer: Tokenizer, limit: int | None) -> Iterator[Document]:
    """Raises UserError at the first record that cannot be read: a figure of a part of the text would not be
    that of the text."""
    for number, record in itertools.islice(read_records(path), limit):
        if isinstance(record, BadRecord):
            raise UserError(f"--text={path}: {record}")
        if not (text := "".join(record)):
            continue
        try:
            (ids,) = tokenizer.encode_arrays([text])
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
    tokens = splits["val"]
    folder = tokens.paths[0].parent
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
            yield ids, _bytes(source.tokenizer, ids)
