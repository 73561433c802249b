"""Documents inside a window: which tokens may see each other, and where positions begin again.

The ids say where a document begins: its first token has the bit START. The loader sets it, and nothing else
has to carry boundaries to the model. No id of a vocabulary is as large.

    B batch · T sequence
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

START = 1 << 32  # ids have at most 32 bits, and tensors of ids 64


@dataclass(frozen=True)
class Documents:
    """What Transformer.documents is in a run with doc_masking=True."""

    # documents' numbers (B, T) -> what the kernel takes, of training/hardware/attention_kernels.py
    mask: Callable[[torch.Tensor], object]

    def __call__(self, marked: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, object]:
        """Marked ids (B, T) -> ids (B, T), positions (B, T), each counted from its document's first token,
        and the mask."""
        starts = document_starts(marked)
        return plain_ids(marked), positions(starts), self.mask(starts.cumsum(-1, dtype=torch.int32))

    def length_per_token(self, marked: torch.Tensor) -> torch.Tensor:
        """The length of the document that a token of ids (..., T) is in, as far as it is in the window, on
        average over tokens: sum of squared lengths / sum of lengths. A scalar in fp32 on the device.

        The sum of 2p + 1 over the positions p of a document of length L is L^2.
        """
        return 2 * positions(document_starts(marked)).float().mean() + 1


def document_starts(marked: torch.Tensor) -> torch.Tensor:
    """(..., T) bool: the first token of each document, and of each window."""
    return F.pad(marked[..., 1:] >= START, (1, 0), value=True)


def plain_ids(marked: torch.Tensor) -> torch.Tensor:
    """The ids without the bit."""
    return marked & (START - 1)


def positions(starts: torch.Tensor) -> torch.Tensor:
    """(..., T) int64: how many tokens ago the document began."""
    index = torch.arange(starts.shape[-1], device=starts.device).expand(starts.shape)
    return index - torch.where(starts, index, 0).cummax(-1).values


class Edges:
    """The mask of a kernel for sequences of any length: where each document of a micro-batch begins.

    Numbers (B, T) -> (room + 1,) int32; B * T in the places that are left, as documents without tokens.
    """

    def __init__(self):
        self.room, self.told = 1, False

    def expect(self, marked: torch.Tensor) -> None:
        """The marked ids (A, B, T) of the next A micro-steps, on the host. Else each waits for the device."""
        self.told = True
        self._make_room(int(document_starts(marked).sum((1, 2)).max()))

    def _make_room(self, documents: int) -> None:
        self.room = max(self.room, documents)

    def __call__(self, numbers: torch.Tensor) -> torch.Tensor:
        inside = (numbers - numbers[:, :1]).long()  # from 0 in each window
        ends = (inside[:, -1:] + 1).cumsum(0)
        if not (self.told and torch.is_grad_enabled()):  # nobody counts those of an evaluation
            self._make_room(int(ends[-1]))  # sync point
        torch._assert_async(ends[-1] <= self.room, "more documents than the host was told of")
        numbered = (inside + F.pad(ends[:-1], (0, 0, 1, 0))).flatten()
        each = torch.arange(self.room + 1, device=numbers.device)
        edges = torch.searchsorted(numbered, each, out_int32=True)
        # a compiled block takes any number of them; else it would be compiled for each size, and torch ends
        # the run at the ninth form of a block (training/optimization/compile.py)
        torch._dynamo.mark_dynamic(edges, 0)
        return edges


def dense_mask(numbers: torch.Tensor) -> torch.Tensor:
    """(B, T) document numbers -> (B, 1, T, T) bool, True where a query (rows) may see a key (columns)."""
    T = numbers.shape[-1]
    same = numbers[:, None, :, None] == numbers[:, None, None, :]
    return same & torch.ones(T, T, dtype=torch.bool, device=numbers.device).tril()
