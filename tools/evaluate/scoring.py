"""Log-likelihoods of continuations, in batches: what lm-eval and held-out text both need.

A sequence is padded on the right. Attention is causal, so no token sees the padding, and no mask is needed.
Sequences of about the same length share a batch. Every rank is given all pairs, and computes its share.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from common.errors import UserError
from model import Transformer
from training.process.world import World, gather_objects

# Lengths are rounded up to a multiple of it, so that GPU kernels meet few shapes.
LENGTH_MULTIPLE = 64

Ids = Sequence[int] | np.ndarray
Pair = tuple[Ids, Ids]  # (context, at least one id; continuation, whose ids are predicted)


@dataclass(frozen=True)
class Score:
    nats: float  # -ln p(continuation | context)
    is_greedy: bool  # whether each of its tokens is the most likely one


def windows(ids: Ids, prefix_id: int | None, block_size: int, stride: int) -> Iterator[Pair]:
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
        yield whole[max(0, end - block_size) : done + 1], whole[done + 1 : end + 1]
        done = end


class Scorer:
    """Scores pairs with one model."""

    def __init__(self, model: Transformer, batch_size: int, world: World):
        """batch_size: sequences of one forward pass of each rank."""
        self.model, self.batch_size, self.world = model, batch_size, world
        self.truncated = 0  # pairs whose context was too long; its first tokens are left out

    def score(self, pairs: Sequence[Pair]) -> list[Score]:
        """The scores of all pairs. All ranks, with the same pairs."""
        shares = gather_objects(self.score_share(pairs), self.world)
        merged = {number: score for share in shares for number, score in share.items()}
        return [merged[number] for number in range(len(pairs))]

    def score_share(self, pairs: Sequence[Pair]) -> dict[int, Score]:
        """{number of a pair: its score} of this rank's share. Every rank has long ones and short ones."""
        block_size = self.model.config.block_size
        sequences = [np.concatenate([np.asarray(part, np.int64) for part in pair]) for pair in pairs]
        vocabulary = self.model.config.vocab_size
        for (_, continuation), ids in zip(pairs, sequences, strict=True):
            if ids.max(initial=0) >= vocabulary:
                raise UserError(
                    f"a text has the id {ids.max():,}, but the model has only the ids below {vocabulary:,}; "
                    "take this token out, or use the tokenizer of this model"
                )
            if len(continuation) > block_size:
                raise UserError(
                    f"a continuation of {len(continuation):,} tokens does not fit into this model's context "
                    f"of {block_size:,}; leave that task out"
                )
            self.truncated += len(ids) > block_size + 1
        order = sorted(range(len(pairs)), key=lambda number: -len(sequences[number]))
        mine = order[self.world.rank :: self.world.size]
        found: dict[int, Score] = {}
        for batch in batches(mine, self.batch_size):
            rows = [sequences[number][-(block_size + 1) :] for number in batch]
            lengths = [len(pairs[number][1]) for number in batch]
            found.update(zip(batch, self._score_batch(rows, lengths), strict=True))
        return found

    @torch.no_grad()
    def _score_batch(self, rows: list[np.ndarray], predicted: list[int]) -> list[Score]:
        """The last `predicted` tokens of each row are scored."""
        longest = max(len(row) for row in rows) - 1  # the last token is no input
        padded = min(-(-longest // LENGTH_MULTIPLE) * LENGTH_MULTIPLE, self.model.config.block_size)
        inputs = np.zeros((len(rows), padded), np.int64)  # any id can be the padding
        for number, row in enumerate(rows):
            inputs[number, : len(row) - 1] = row[:-1]
        device = self.world.device
        logits = self.model(torch.from_numpy(inputs).to(device))  # (B, T, V)
        sums, greedy = [], []
        for row, count, found in zip(rows, predicted, logits, strict=True):
            targets = torch.from_numpy(row[-count:]).to(device)
            chosen = found[len(row) - 1 - count : len(row) - 1].float()  # (count, V)
            losses = torch.nn.functional.cross_entropy(chosen, targets, reduction="none")
            sums.append(losses.double().sum())
            greedy.append((chosen.argmax(-1) == targets).all())
        nats = torch.stack(sums).tolist()  # sync point, one for each batch
        return [Score(*pair) for pair in zip(nats, torch.stack(greedy).tolist(), strict=True)]


def batches(numbers: list[int], size: int) -> Iterator[list[int]]:
    remaining = iter(numbers)
    while batch := list(itertools.islice(remaining, size)):
        yield batch
