"""One decoder that is GPT-2, LLaMA, Qwen2 or Qwen3 by its ModelConfig: plain nn.Modules, no communication, no
FLOP formula. Activations have the compute dtype, and weights are cast to it where they are not stored in it,
so no autocast runs in the step. In which form an operation runs is decided in ops/.

    B batch · T sequence · C model width · H query heads · K key/value heads · D head width · A = H D
    F feed-forward width · V vocabulary
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from model_config import ModelConfig
from ops.activation import Activation, Delta, call, drop, no_delta
from ops.cross_entropy import GradientScale, linear_cross_entropy
from ops.documents import Documents
from ops.embedding import Embedding
from ops.feed_forward import feed_forward
from ops.gelu import gelu
from ops.heads import Rotary, merge_heads, split_heads
from ops.linear import Linear
from ops.norm import LayerNorm, RMSNorm
from ops.swiglu import pairs, swiglu
from rope_scaling import RopeScaling

# Radford et al. 2018, sec. 4.1; also initializer_range of the published LLaMA and Qwen3 configs
INIT_STD = 0.02

# attend(q, k, v, dropout_p): q (B, T, H, D), k and v (B, T, K, D) -> (B, T, H, D), causal; kernels that know
# documents take their mask as a fifth argument
Attend = Callable[..., Tensor]
Mask = object | None  # what Documents.mask makes; only the attention kernel that asked for it looks inside
Device = torch.device | str | None


def manual_attention(q, k, v, dropout_p: float = 0.0, mask=None) -> Tensor:
    """softmax(Q K^T / sqrt(D)) V with a causal mask, every matmul visible (Vaswani et al. 2017, sec. 3.2.1);
    or with mask, documents.dense_mask's (B, 1, T, T). The reference for other kernels, and the one whose
    FLOPs are counted."""
    T, H, K, D = q.shape[1], q.shape[2], k.shape[2], q.shape[3]
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # (B, H or K, T, D)
    if K != H:
        k, v = (t.repeat_interleave(H // K, dim=1) for t in (k, v))  # (B, H, T, D)
    scores = (q @ k.transpose(-2, -1)) / math.sqrt(D)  # (B, H, T, T)
    hidden = torch.ones(T, T, dtype=torch.bool, device=q.device).triu(1) if mask is None else ~mask
    weights = scores.float().masked_fill(hidden, float("-inf")).softmax(dim=-1).to(q.dtype)
    weights = F.dropout(weights, dropout_p, training=dropout_p > 0)
    return (weights @ v).transpose(1, 2)  # (B, T, H, D)


# --- layers ---


def make_norm(config: ModelConfig) -> RMSNorm:
    """Before each layer and before the head."""
    if config.normalization == "layernorm":
        return LayerNorm(config.n_embd, config.norm_eps, config.bias)
    return RMSNorm(config.n_embd, config.norm_eps)


def rotary_angles(
    length: int, head_dim: int, theta: float, device: Device = None, scaling: RopeScaling | None = None
) -> Rotary:
    """Angles of positions 0 to length - 1 (Su et al. 2021, sec. 3.2.2), scaled as rope_scaling.py says."""
    frequencies = theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim)
    scale = 1.0
    if scaling is not None:
        multipliers, scale = scaling.multipliers(head_dim, theta), scaling.attention_scale
        frequencies *= torch.tensor(multipliers, dtype=torch.float32, device=device)
    angles = torch.outer(torch.arange(length, dtype=torch.float32, device=device), frequencies)
    return Rotary(angles.cos() * scale, angles.sin() * scale)


class Attention(nn.Module):
    """Causal self-attention with grouped key/value heads (Ainslie et al. 2023); K = H is multi-head."""

    def __init__(self, config: ModelConfig, attend: Attend):
        super().__init__()
        self.n_head, self.n_kv_head = config.n_head, config.n_kv_head
        self.dropout, self.attend = config.dropout, attend
        self.run_heads = self.run_projection = call
        qkv_width = (config.n_head + 2 * config.n_kv_head) * config.head_dim
        # one matmul: q, then k, then v
        self.qkv = Linear(config.n_embd, qkv_width, bias=config.bias or config.qkv_bias)
        self.out = Linear(config.attention_width, config.n_embd, bias=config.bias)
        self.q_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None

    def forward(self, x: Activation, rotary: Rotary | None, mask: Mask = None) -> Delta:
        return self.run_projection(self.attend_and_project, self.qkv.activation(x), rotary, mask)

    def attend_and_project(self, qkv: Activation, rotary: Rotary | None, mask: Mask) -> Delta:
        return self.out.delta(merge_heads(self.run_heads(self.attend_heads, qkv, rotary, mask)))

    def attend_heads(self, qkv: Activation, rotary: Rotary | None, mask: Mask) -> Tensor:
        """qkv (B, T, (H + 2K) D) -> (B, T, H, D)."""
        q, k, v = split_heads(qkv, self.n_head, self.n_kv_head, rotary, self.q_norm, self.k_norm)
        # a kernel that knows no documents does not take the argument, so it cannot ignore them
        masks = () if mask is None else (mask,)
        return self.attend(q, k, v, self.dropout if self.training else 0.0, *masks)


def geglu(x: Tensor) -> Tensor:
    gate, up = pairs(x)
    return gelu(gate) * up


ACTIVATIONS: dict[tuple[str, str], Callable[[Tensor], Tensor]] = {
    ("mlp", "gelu"): gelu,
    ("mlp", "silu"): F.silu,
    ("swiglu", "silu"): swiglu,  # silu(gate) * up
    ("swiglu", "gelu"): geglu,
}


class FeedForward(nn.Module):
    """down(activation(up(x))); gated: down(activation(gate(x)) * up(x)) (Shazeer 2020), gate and up in one
    matmul, whose rows are gate 0, up 0, gate 1, up 1, ..."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.compute = feed_forward
        gated = config.ffn_type == "swiglu"
        self.activation = ACTIVATIONS[config.ffn_type, config.activation]
        self.up = Linear(config.n_embd, config.d_ff * (2 if gated else 1), bias=config.bias)
        self.down = Linear(config.d_ff, config.n_embd, bias=config.bias)

    def forward(self, x: Activation) -> Delta:
        return self.compute(x, self.up, self.activation, self.down)


class Block(nn.Module):
    """Pre-norm residual block. The stream comes and goes as (x, delta), what the last layer wants added to x
    not yet added, so that adding and normalizing are one pass."""

    def __init__(self, config: ModelConfig, attend: Attend):
        super().__init__()
        self.attn_norm, self.attn = make_norm(config), Attention(config, attend)
        self.ffn_norm, self.ffn = make_norm(config), FeedForward(config)
        self.dropout = nn.Dropout(config.dropout)
        self.compute = self.layers

    def forward(self, *inputs) -> tuple[Tensor, Delta]:
        return self.compute(*inputs)

    def layers(
        self, x: Tensor, delta: Delta, rotary: Rotary | None, mask: Mask = None
    ) -> tuple[Tensor, Delta]:
        x, normed = self.attn_norm.add(x, delta)
        delta = drop(self.attn(normed, rotary, mask), self.dropout)
        x, normed = self.ffn_norm.add(x, delta)
        return x, drop(self.ffn(normed), self.dropout)


class Head(nn.Module):
    """Final norm, output projection and loss. One module, so that the logits, the largest tensor of the step,
    live only inside it; loss_chunks splits the tokens, so that only a part of them lives at a time."""

    loss_chunks = 1

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.norm = make_norm(config)
        self.lm_head = Linear(config.n_embd, config.vocab_size, bias=False)
        self.compute_normed = self.normed

    def forward(
        self,
        x: Tensor,
        delta: Delta,
        targets: Tensor | None = None,
        gradient_scale: GradientScale | None = None,
    ) -> Tensor:
        x = self.compute_normed(x, delta)
        if targets is None:
            return self.lm_head(x)  # (B, T, V)
        return linear_cross_entropy(x, self.lm_head, targets, self.loss_chunks, gradient_scale)

    def normed(self, x: Tensor, delta: Delta) -> Tensor:
        return self.norm.add(x, delta)[1].plain()


# --- the model ---


class Transformer(nn.Module):
    """Decoder-only transformer. forward(ids (B, T), targets (B, T)) is the mean loss, a scalar in fp32;
    without targets, the logits (B, T, V). gradient_scale: see ops/cross_entropy.py.

    documents, if set, keeps the documents of a window from seeing each other (ops/documents.py). Build it on
    meta, then call init_weights(): see model_builder.build_model."""

    documents: Documents | None = None
    rotary_cos: Tensor  # buffers, without learned positions
    rotary_sin: Tensor

    def __init__(self, config: ModelConfig, attend: Attend = manual_attention, dtype=torch.float32):
        super().__init__()
        self.config, self.compute_dtype = config, dtype
        self.embed = Embedding(config.vocab_size, config.n_embd)
        learned = config.position_encoding == "learned"
        self.positions = Embedding(config.block_size, config.n_embd) if learned else None
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config, attend) for _ in range(config.n_layer))
        self.head = Head(config)
        if not learned:
            self._set_rotary(device=None)
        self._tie()

    def forward(
        self, ids: Tensor, targets: Tensor | None = None, gradient_scale: GradientScale | None = None
    ) -> Tensor:
        T = ids.shape[1]
        if T > self.config.block_size:
            raise ValueError(f"a sequence of {T} tokens is longer than block_size={self.config.block_size}")
        positions, mask = torch.arange(T, device=ids.device), None
        if self.documents is not None:
            ids, positions, mask = self.documents(ids)
        x = self.embed(ids)  # (B, T, C)
        rotary = None
        if self.positions is not None:
            x = x + self.positions(positions)
        else:  # scores depend on differences of positions alone, so these need not begin again
            rotary = Rotary(self.rotary_cos[:T], self.rotary_sin[:T])
        x = self.dropout(x.to(self.compute_dtype))
        delta = no_delta(x)
        for block in self.blocks:
            x, delta = block(x, delta, rotary, mask)
        return self.head(x, delta, targets, gradient_scale)

    def init_weights(self, device: torch.device | str, seed: int) -> Transformer:
        """Allocates on device and draws the weights: N(0, 0.02), residual projections N(0, 0.02 / sqrt(2L))
        (Radford et al. 2019, sec. 2.3), norms 1, biases 0. Each tensor's draw depends on (seed, its name)
        alone, so every rank and strategy starts alike."""
        self.to_empty(device=device)
        self._tie()  # to_empty gives shared parameters separate storage
        if self.positions is None:
            self._set_rotary(device)
        for name, parameter in self.named_parameters():
            if parameter.ndim < 2:
                nn.init.constant_(parameter, 0.0 if name.endswith("bias") else 1.0)
                continue
            residual = name.endswith(("attn.out.weight", "ffn.down.weight"))
            std = INIT_STD / math.sqrt(2 * self.config.n_layer) if residual else INIT_STD
            generator = torch.Generator(parameter.device).manual_seed(_name_seed(seed, name))
            nn.init.normal_(parameter, std=std, generator=generator)
        return self

    def count_parameters(self) -> dict[str, int]:
        """total, trainable, and non_embedding: total less learned positions, the N of the PaLM formula."""
        total = sum(p.numel() for p in self.parameters())
        positions = 0 if self.positions is None else self.positions.weight.numel()
        trainable = sum(p.numel() for p in self.parameters() if p.requires_grad)
        return {"total": total, "trainable": trainable, "non_embedding": total - positions}

    def _tie(self):
        if self.config.weight_tying:
            self.head.lm_head.weight = self.embed.weight

    def _set_rotary(self, device):
        c = self.config
        cos, sin = rotary_angles(c.block_size, c.head_dim, c.rope_theta, device, c.rope_scaling)
        self.register_buffer("rotary_cos", cos, persistent=False)
        self.register_buffer("rotary_sin", sin, persistent=False)


def _name_seed(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=7).digest(), "little")
