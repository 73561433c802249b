"""Keeps the keys and values of all tokens so far, so that a new token costs one position and not all of them.

A model generates if it was built with attend=cached_attention. Without a cache, this is causal attention.

Slot p of a sequence holds its position p, whatever the lengths of its neighbors: a new token writes to its
own slot and sees the slots up to it. Slots beyond are left over from padding and are overwritten before they
are seen, so sequences of different lengths need no shift of positions and no mask of padding.

    B sequences · T tokens of the longest prompt · S slots · H query heads · K key/value heads · D head width
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from model import Transformer


class LayerCache(NamedTuple):
    """What cached_attention gets in place of a mask. Without positions, T tokens of each prompt are stored,
    as positions 0 to T - 1."""

    keys: torch.Tensor  # (B, K, S, D)
    values: torch.Tensor  # (B, K, S, D)
    positions: torch.Tensor | None = None  # (B,) that of the one new token of each sequence
    visible: torch.Tensor | None = None  # (B, 1, 1, S) bool: the slots that it sees


class KeyValueCache:
    """Every layer's keys and values, allocated once: 2 n_layer B K S D numbers in the dtype in which the
    model computes. For Qwen3 1.8B (24 layers, 8 heads of 128) in bf16: 96 KiB a slot, 192 MiB for 2,048."""

    def __init__(self, model: Transformer, sequences: int, slots: int):
        config = model.config
        shape = (config.n_layer, sequences, config.n_kv_head, slots, config.head_dim)
        # zeros: a value that is hidden by the mask is multiplied by 0, and must not be NaN
        self.slots = torch.arange(slots, device=model.embed.weight.device)
        store = torch.zeros(2, *shape, dtype=model.compute_dtype, device=self.slots.device)
        self.keys, self.values = store

    def layers(self, positions: torch.Tensor | None = None) -> list[LayerCache]:
        """For each layer, to store prompts; with positions (B,), one new token of each sequence."""
        visible = None if positions is None else (self.slots <= positions[:, None])[:, None, None]
        return [LayerCache(k, v, positions, visible) for k, v in zip(self.keys, self.values, strict=True)]


def cached_attention(q, k, v, dropout_p: float = 0.0, cache: LayerCache | None = None) -> torch.Tensor:
    """model.Attend. With a cache that has positions, q is (1, B, H, D), k and v (1, B, K, D): the new tokens
    of B sequences stand in a row, so that each has rotary angles of its own."""
    if cache is not None and cache.positions is not None:
        keys, values, positions, visible = cache
        sequences = torch.arange(len(keys), device=keys.device)
        keys[sequences, :, positions], values[sequences, :, positions] = k[0], v[0]
        # query heads that share a key head are rows of one query, so keys are read once and not repeated
        q = q[0].unflatten(1, (k.shape[2], -1))  # (B, K, H/K, D)
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=visible).flatten(1, 2)[None]
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # (B, H or K, T, D)
    if cache is not None:
        T = k.shape[2]
        cache.keys[:, :, :T], cache.values[:, :, :T] = k, v
    grouped = q.shape[1] != k.shape[1]
    y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout_p, is_causal=True, enable_gqa=grouped)
    return y.transpose(1, 2)
