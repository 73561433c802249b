"""Chooses the next token from the logits: the most likely one, or one drawn by temperature, top-k and top-p.

A draw is a number in [0, 1) that picks a point of the cumulative distribution. Each sequence has its numbers
from a generator of its own, on the CPU, so its text depends neither on its neighbors nor on the device's
generator.

    B sequences · V vocabulary · N tokens that stay
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

COLDEST = 1e-3  # a temperature below it is as 0: logits divided by it would be no numbers in float32


@dataclass(frozen=True)
class Choice:
    temperature: float = 0.0  # logits are divided by it; 0: always the most likely token
    top_k: int = 0  # only the k most likely tokens; 0: all
    top_p: float = 1.0  # of these, the fewest that have this probability together; 1: all

    def choose(self, logits: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
        """logits (B, V) in fp32, draws (B,) in [0, 1) -> ids (B,). No sync point."""
        if self.temperature < COLDEST:
            return logits.argmax(dim=-1)
        logits, ids = logits / self.temperature, None  # None: the ids are 0 to V - 1
        if 0 < self.top_k < logits.shape[-1]:
            logits, ids = logits.topk(self.top_k)
        elif self.top_p < 1:  # only then, because a sort of the vocabulary costs more than all the rest
            logits, ids = logits.sort(dim=-1, descending=True)
        # float64, because the sum over a vocabulary is compared with a draw
        probabilities = logits.softmax(dim=-1, dtype=torch.float64)
        reached = probabilities.cumsum(dim=-1)  # (B, N)
        if self.top_p < 1:
            # Holtzman et al. 2020, sec. 3.1: a token stays if those before it have not reached top_p yet
            reached = reached.masked_fill(reached - probabilities >= self.top_p, 0.0)
        total = reached.amax(dim=-1, keepdim=True)
        index = (reached > draws[:, None] * total).int().argmax(dim=-1, keepdim=True)  # the first one above
        return (index if ids is None else ids.gather(1, index))[:, 0]


GREEDY = Choice()


def draw(seeds: Sequence[int], count: int, device: torch.device) -> torch.Tensor:
    """(count, B): the draws of B sequences, each from its own seed."""
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    numbers = [torch.rand(count, generator=generator, dtype=torch.float64) for generator in generators]
    return torch.stack(numbers, dim=1).to(device)
