"""One decoder that is GPT-2, LLaMA or Qwen3 by its ModelConfig: plain nn.Modules, no communication, no FLOP
formula. Activations have the compute dtype and weights are cast to it where they are not stored in it, so no
autocast runs in the step.

    B batch · T sequence · C model width · H query heads · K key/value heads · D head width
    F feed-forward width · V vocabulary
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable

import torch
import torch.nn as nn
import torch.nn.functional as F

from model_config import ModelConfig
from ops.cross_entropy import LinearCrossEntropy
from ops.documents import Documents
from ops.float8_layers import Float8Heads, Float8SwiGLU
from ops.heads import add_rms_norm, fused_heads, split_heads, swiglu
from ops.linear import Embedding, Linear

INIT_STD = (
    0.02  # Radford et al. 2018, sec. 4.1; also initializer_range of the published LLaMA and Qwen3 configs
)

# attend(q, k, v, dropout_p): q (B, T, H, D), k and v (B, T, K, D) -> (B, T, H, D), causal; kernels that know
# documents take their mask as a fifth argument
Attend = Callable[..., torch.Tensor]


def manual_attention(q, k, v, dropout_p: float = 0.0, mask=None) -> torch.Tensor:
    """softmax(Q K^T / sqrt(D)) V with a causal mask, every matmul visible (Vaswani et al. 2017, sec. 3.2.1);
    or with mask, documents.dense_mask's (B, 1, T, T).

    The reference that other backends are tested against, and the one whose FLOPs are counted.
    """
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


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight, statistics in fp32. Zhang and Sennrich 2019."""

    def __init__(self, width: int, config: ModelConfig):
        super().__init__()
        self.eps = config.norm_eps
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x):
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)

    def add(self, x, delta):
        """x + delta, its norm, and the largest magnitude of each row of that if it costs nothing, or None."""
        return add_rms_norm(x, delta, self.weight, self.eps)


class LayerNorm(nn.Module):
    """(x - mean) / sqrt(var + eps) * weight + bias, statistics in fp32. Ba et al. 2016; bias optional."""

    def __init__(self, width: int, config: ModelConfig):
        super().__init__()
        self.eps = config.norm_eps
        self.weight = nn.Parameter(torch.empty(width))
        self.bias = nn.Parameter(torch.empty(width)) if config.bias else None

    def forward(self, x):
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.layer_norm(x, self.weight.shape, self.weight.to(x.dtype), bias, self.eps)

    def add(self, x, delta):
        x = x + delta
        return x, self(x), None


NORMS = {"rmsnorm": RMSNorm, "layernorm": LayerNorm}


def rotary_angles(length: int, head_dim: int, theta: float, device=None):
    """Rotary angles: cos, sin of shape (T, D/2), fp32. Su et al. 2021, sec. 3.2.2."""
    frequencies = theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim)
    angles = torch.outer(torch.arange(length, dtype=torch.float32, device=device), frequencies)
    return angles.cos(), angles.sin()


class Attention(nn.Module):
    """Causal self-attention with grouped key/value heads (Ainslie et al. 2023); K = H is multi-head."""

    def __init__(self, config: ModelConfig, attend: Attend):
        super().__init__()
        self.n_head, self.n_kv_head, self.head_dim = config.n_head, config.n_kv_head, config.head_dim
        self.dropout, self.attend = config.dropout, attend
        qkv_width = (config.n_head + 2 * config.n_kv_head) * config.head_dim
        self.qkv = Linear(config.n_embd, qkv_width, bias=config.bias)  # one matmul: q, then k, then v
        self.out = Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.q_norm = RMSNorm(config.head_dim, config) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config) if config.qk_norm else None

    def forward(self, x, amax, rotary, mask=None):
        heads = self.n_head, self.n_kv_head, rotary, self.q_norm, self.k_norm
        if self.qkv.float8 is not None and self.qkv.bias is None and fused_heads(x, self.head_dim, rotary):
            norms = (self.q_norm.weight, self.k_norm.weight) if self.q_norm is not None else (None, None)
            eps = 0.0 if self.q_norm is None else self.q_norm.eps
            q, k, v = Float8Heads.apply(x, amax, *self.qkv.float8_arguments, *norms, *rotary, *heads[:2], eps)
        else:
            q, k, v = split_heads(self.qkv(x, amax), *heads)  # (B, T, H, D) and twice (B, T, K, D)
        dropout = self.dropout if self.training else 0.0
        # a kernel that knows no documents does not take the argument, so it cannot ignore them
        y = self.attend(q, k, v, dropout) if mask is None else self.attend(q, k, v, dropout, mask)
        return self.out(y.reshape(x.shape))


ACTIVATIONS = {"gelu": lambda x: F.gelu(x, approximate="tanh"), "silu": F.silu}


class FeedForward(nn.Module):
    """down(act(up(x))); swiglu: down(act(gate(x)) * up(x)) (Shazeer 2020), gate and up in one matmul."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.gated = config.ffn_type == "swiglu"
        self.activation = ACTIVATIONS[config.activation]
        self.up = Linear(config.n_embd, config.d_ff * (2 if self.gated else 1), bias=config.bias)
        self.down = Linear(config.d_ff, config.n_embd, bias=config.bias)

    def forward(self, x, amax=None):
        swish = self.gated and self.activation is F.silu
        if swish and self.up.float8 is not None and self.up.bias is None:
            return Float8SwiGLU.apply(x, amax, *self.up.float8_arguments, *self.down.float8_arguments)
        x = self.up(x, amax)  # (B, T, F), or (B, T, 2F): gate, then up
        if not self.gated:
            return self.down(self.activation(x))
        if swish:
            return self.down(swiglu(x))
        gate, up = x.chunk(2, dim=-1)
        return self.down(self.activation(gate) * up)


class Block(nn.Module):
    """Pre-norm residual block. The stream comes and goes as (x, delta), what the last layer wants added to x
    not yet added, so that adding and normalising are one pass."""

    def __init__(self, config: ModelConfig, attend: Attend):
        super().__init__()
        norm = NORMS[config.normalization]
        self.attn_norm, self.attn = norm(config.n_embd, config), Attention(config, attend)
        self.ffn_norm, self.ffn = norm(config.n_embd, config), FeedForward(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x, delta, rotary, mask=None):
        x, normed, amax = self.attn_norm.add(x, delta)
        delta = self.dropout(self.attn(normed, amax, rotary, mask))
        x, normed, amax = self.ffn_norm.add(x, delta)
        return x, self.dropout(self.ffn(normed, amax))


class Head(nn.Module):
    """Final norm, output projection and loss. One module, so that the logits, the largest tensor of the step,
    live only inside it; loss_chunks splits the tokens, so that only a part of them lives at a time."""

    loss_chunks = 1

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.norm = NORMS[config.normalization](config.n_embd, config)
        self.lm_head = Linear(config.n_embd, config.vocab_size, bias=False)

    def forward(self, x, delta, targets=None):
        _, x, _ = self.norm.add(x, delta)
        if targets is None:
            return self.lm_head(x)  # (B, T, V)
        head, gradient = self.lm_head, torch.is_grad_enabled()
        weight = head.weight.to(x.dtype)
        x, targets = x.flatten(0, 1), targets.flatten()
        return LinearCrossEntropy.apply(
            x, weight, targets, head.weight_grad, head.float8, self.loss_chunks, gradient
        )


# --- the model ---


class Transformer(nn.Module):
    """Decoder-only transformer. forward(ids (B, T), targets (B, T)) is the mean loss, a scalar in fp32;
    without targets, the logits (B, T, V).

    documents, if set, keeps the documents of a window from seeing each other (ops/documents.py).
    Build it on meta, then call init_weights(): see model_builder.build_model.
    """

    documents: Documents | None = None

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

    def forward(self, ids, targets=None):
        T = ids.shape[1]
        if T > self.config.block_size:
            raise ValueError(f"a sequence of {T} tokens is longer than block_size={self.config.block_size}")
        if self.documents is None:
            positions, mask = torch.arange(T, device=ids.device), None
        else:
            positions, mask = self.documents(ids)
        x = self.embed(ids)  # (B, T, C)
        rotary = None
        if self.positions is not None:
            x = x + self.positions(positions)
        else:  # scores depend on differences of positions alone, so these need not begin again
            rotary = (self.rotary_cos[:T], self.rotary_sin[:T])
        x = self.dropout(x.to(self.compute_dtype))
        delta = torch.zeros_like(x)
        for block in self.blocks:
            x, delta = block(x, delta, rotary, mask)
        return self.head(x, delta, targets)

    def init_weights(self, device: torch.device | str, seed: int) -> Transformer:
        """Allocates on device and draws the weights: N(0, 0.02), residual projections N(0, 0.02 / sqrt(2L))
        (Radford et al. 2019, sec. 2.3), norms 1, biases 0.

        Each tensor's draw depends on (seed, its name) alone, so every rank and strategy starts alike.
        """
        self.to_empty(device=device)
        self._tie()  # to_empty gives shared parameters separate storage
        if self.positions is None:
            self._set_rotary(device)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 1:
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
        config = self.config
        cos, sin = rotary_angles(config.block_size, config.head_dim, config.rope_theta, device)  # (T, D/2)
        self.register_buffer("rotary_cos", cos, persistent=False)
        self.register_buffer("rotary_sin", sin, persistent=False)


def _name_seed(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=7).digest(), "little")
