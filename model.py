"""One decoder that is GPT-2, LLaMA, Qwen2 or Qwen3 by its ModelConfig: plain nn.Modules, no communication, no
FLOP formula. Activations have the compute dtype, and weights are cast to it where they are not stored in it,
so no autocast runs in the step. In which form an operation runs (Triton kernel, fp8) is decided in ops/.

    B batch · T sequence · C model width · H query heads · K key/value heads · D head width · A = H D
    F feed-forward width · V vocabulary
    amax: the largest magnitude of an activation, for fp8 matmuls; None if nobody knows it (ops/float8.py)
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable

import torch
import torch.nn as nn
import torch.nn.functional as F

from model_config import ModelConfig
from ops.cross_entropy import linear_cross_entropy
from ops.documents import Documents
from ops.embedding import Embedding
from ops.float8 import amax_of
from ops.gelu import gelu
from ops.heads import Rotary, keeps_copies, project_heads, split_heads
from ops.linear import Linear
from ops.norm import Delta, Norm, add_norm, no_delta, normalize
from ops.quack import fused_feed_forward
from ops.remade import Remake, again, linear_of_again, linear_of_norm, linear_of_swiglu
from ops.swiglu import pairs, swiglu_feed_forward
from rope_scaling import RopeScaling

# Radford et al. 2018, sec. 4.1; also initializer_range of the published LLaMA and Qwen3 configs
INIT_STD = 0.02

# attend(q, k, v, dropout_p): q (B, T, H, D), k and v (B, T, K, D) -> (B, T, H, D), causal; kernels that know
# documents take their mask as a fifth argument
Attend = Callable[..., torch.Tensor]
Mask = object | None  # what Documents.mask makes; only the attention kernel that asked for it looks inside
Device = torch.device | str | None


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

    centered = False
    bias: nn.Parameter | None

    def __init__(self, width: int, config: ModelConfig):
        super().__init__()
        self.eps = config.norm_eps
        self.weight = nn.Parameter(torch.empty(width))
        biased = self.centered and config.bias
        self.register_parameter("bias", nn.Parameter(torch.empty(width)) if biased else None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return normalize(x, self.settings())

    def add(self, x: torch.Tensor, delta: Delta) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """x + delta, its norm, and the norm's amax, in one pass."""
        return add_norm(x, delta, self.settings())

    def settings(self) -> Norm:
        return Norm(self.weight, self.bias, self.eps, self.centered)


class LayerNorm(RMSNorm):
    """(x - mean) / sqrt(var + eps) * weight + bias, statistics in fp32. Ba et al. 2016; bias optional."""

    centered = True


NORMS = {"rmsnorm": RMSNorm, "layernorm": LayerNorm}


def rotary_angles(
    length: int, head_dim: int, theta: float, device: Device = None, scaling: RopeScaling | None = None
) -> Rotary:
    """Angles of positions 0 to length - 1 (Su et al. 2021, sec. 3.2.2), scaled as rope_scaling.py says."""
    frequencies = theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim)
    if scaling is not None:
        multipliers = scaling.multipliers(head_dim, theta)
        frequencies *= torch.tensor(multipliers, dtype=torch.float32, device=device)
    angles = torch.outer(torch.arange(length, dtype=torch.float32, device=device), frequencies)
    if scaling is None:
        return Rotary(angles.cos(), angles.sin())
    return Rotary(angles.cos() * scaling.attention_scale, angles.sin() * scaling.attention_scale)


class Attention(nn.Module):
    """Causal self-attention with grouped key/value heads (Ainslie et al. 2023); K = H is multi-head."""

    def __init__(self, config: ModelConfig, attend: Attend):
        super().__init__()
        self.n_head, self.n_kv_head = config.n_head, config.n_kv_head
        self.dropout, self.attend = config.dropout, attend
        self.gradient_amax = config.dropout == 0  # else it is not the gradient of what is added
        qkv_width = (config.n_head + 2 * config.n_kv_head) * config.head_dim
        # one matmul: q, then k, then v
        self.qkv = Linear(config.n_embd, qkv_width, bias=config.bias or config.qkv_bias)
        self.out = Linear(config.attention_width, config.n_embd, bias=config.bias)
        self.q_norm = RMSNorm(config.head_dim, config) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config) if config.qk_norm else None

    def forward(
        self,
        x: torch.Tensor,
        amax: torch.Tensor | None,
        rotary: Rotary | None,
        mask: Mask = None,
        remake: Remake | None = None,
    ) -> Delta:
        heads = self.n_head, self.n_kv_head, rotary, self.q_norm, self.k_norm
        # not with a mask: the kernel of flex attention cannot be kept while q and k are made again
        copies = mask is None and keeps_copies(x, rotary, self.q_norm)
        from_qkv = remake is not None and (copies or remake.attention)
        if remake is None or (self.qkv.low_precision is not None and not from_qkv):
            return self._project(self._attend(*project_heads(x, amax, self.qkv, *heads), mask))

        def attended(qkv: torch.Tensor) -> torch.Tensor:
            return self._attend(*split_heads(qkv, *heads), mask)

        qkv = linear_of_norm(self.qkv, x, amax, remake)
        if not from_qkv:
            return self._project(attended(qkv))
        how = {"keep_rng": self.training and self.dropout > 0, "flex": mask is not None}
        if remake.attention and self.out.low_precision is None:  # then out's input is made again, too
            return linear_of_again(self.out, attended, qkv, **how), None
        return self._project(again(attended, qkv, keep_products=not remake.attention, **how))

    def _attend(self, q, k, v, mask: Mask) -> torch.Tensor:
        # a kernel that knows no documents does not take the argument, so it cannot ignore them
        arguments = (self.dropout if self.training else 0.0, *(() if mask is None else (mask,)))
        return self.attend(q, k, v, *arguments).flatten(2)  # (B, T, H, D) -> (B, T, A)

    def _project(self, y: torch.Tensor) -> Delta:
        return self.out.delta(y, amax_of(y) if self.out.has_one_scale else None, self.gradient_amax)


ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"gelu": gelu, "silu": F.silu}


class FeedForward(nn.Module):
    """down(act(up(x))); swiglu: down(act(gate(x)) * up(x)) (Shazeer 2020), gate and up in one matmul, whose
    rows are gate 0, up 0, gate 1, up 1, ..."""

    backend = "torch"  # or 'quack', if training/optimization/ffn_backend.py sets it

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.gated = config.ffn_type == "swiglu"
        self.swiglu = self.gated and config.activation == "silu"
        self.activation = ACTIVATIONS[config.activation]
        self.gradient_amax = config.dropout == 0  # else it is not the gradient of what is added
        self.up = Linear(config.n_embd, config.d_ff * (2 if self.gated else 1), bias=config.bias)
        self.down = Linear(config.d_ff, config.n_embd, bias=config.bias)

    def forward(self, x, amax: torch.Tensor | None = None, remake: Remake | None = None) -> Delta:
        if remake is not None and self.up.low_precision is None:
            return self._remaking(linear_of_norm(self.up, x, amax, remake)), None
        if self.backend == "quack":
            return fused_feed_forward(x, self.up, self.down, "swiglu" if self.gated else "gelu")
        if self.swiglu:
            return swiglu_feed_forward(x, amax, self.up, self.down, self.gradient_amax)
        return self.down.delta(self._activate(self.up(x, amax)), None, self.gradient_amax)

    def _activate(self, x: torch.Tensor) -> torch.Tensor:
        """x (B, T, F), or (B, T, 2F): pairs of gate and up -> (B, T, F)."""
        if not self.gated:
            return self.activation(x)
        gate, up = pairs(x)
        return self.activation(gate) * up

    def _remaking(self, x: torch.Tensor) -> torch.Tensor:
        """down of the activated x, which is not kept."""
        if self.swiglu:
            return linear_of_swiglu(self.down, x)
        return again(lambda x: self.down(self._activate(x)), x, keep_rng=False, keep_products=True)


class Block(nn.Module):
    """Pre-norm residual block. The stream comes and goes as (x, delta), what the last layer wants added to x
    not yet added, so that adding and normalizing are one pass."""

    remakes = "nothing"  # or 'memory_bound' or 'attention', as training/optimization/compile.py sets it

    def __init__(self, config: ModelConfig, attend: Attend):
        super().__init__()
        norm = NORMS[config.normalization]
        self.attn_norm, self.attn = norm(config.n_embd, config), Attention(config, attend)
        self.ffn_norm, self.ffn = norm(config.n_embd, config), FeedForward(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self, x: torch.Tensor, delta: Delta, rotary: Rotary | None, mask: Mask = None
    ) -> tuple[torch.Tensor, Delta]:
        x, normed, amax = self.attn_norm.add(x, delta)
        delta = self._drop(self.attn(normed, amax, rotary, mask, self._remake(x, self.attn_norm)))
        x, normed, amax = self.ffn_norm.add(x, delta)
        return x, self._drop(self.ffn(normed, amax, self._remake(x, self.ffn_norm)))

    def _remake(self, total: torch.Tensor, norm: RMSNorm) -> Remake | None:
        remakes = self.remakes != "nothing" and torch.is_grad_enabled()
        return Remake(total, norm.settings(), self.remakes == "attention") if remakes else None

    def _drop(self, delta: Delta) -> Delta:
        value, gradient_amax = delta
        return self.dropout(value), gradient_amax


class Head(nn.Module):
    """Final norm, output projection and loss. One module, so that the logits, the largest tensor of the step,
    live only inside it; loss_chunks splits the tokens, so that only a part of them lives at a time."""

    loss_chunks = 1

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.norm = NORMS[config.normalization](config.n_embd, config)
        self.lm_head = Linear(config.n_embd, config.vocab_size, bias=False)

    def forward(
        self,
        x: torch.Tensor,
        delta: Delta,
        targets: torch.Tensor | None = None,
        gradient_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        _, x, _ = self.norm.add(x, delta)
        if targets is None:
            return self.lm_head(x)  # (B, T, V)
        return linear_cross_entropy(x, self.lm_head, targets, self.loss_chunks, gradient_scale)


# --- the model ---


class Transformer(nn.Module):
    """Decoder-only transformer. forward(ids (B, T), targets (B, T)) is the mean loss, a scalar in fp32;
    without targets, the logits (B, T, V). gradient_scale: see ops/cross_entropy.py.

    documents, if set, keeps the documents of a window from seeing each other (ops/documents.py).
    Build it on meta, then call init_weights(): see model_builder.build_model.
    """

    documents: Documents | None = None
    rotary_cos: torch.Tensor  # buffers, without learned positions
    rotary_sin: torch.Tensor

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
        self,
        ids: torch.Tensor,
        targets: torch.Tensor | None = None,
        gradient_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        T = ids.shape[1]
        if T > self.config.block_size:
            raise ValueError(f"a sequence of {T} tokens is longer than block_size={self.config.block_size}")
        if self.documents is None:
            positions, mask = torch.arange(T, device=ids.device), None
        else:
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
        rotary = rotary_angles(
            config.block_size, config.head_dim, config.rope_theta, device, config.rope_scaling
        )
        self.register_buffer("rotary_cos", rotary.cos, persistent=False)
        self.register_buffer("rotary_sin", rotary.sin, persistent=False)


def _name_seed(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=7).digest(), "little")
