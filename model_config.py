"""The shape of a model: one frozen, self-checking ModelConfig describes GPT-2, LLaMA 2/3, Qwen2 and Qwen3
alike, and a preset per family supplies whatever a run does not state. Imports no torch, so that a mistake in
a config file is reported at once."""

from __future__ import annotations

import dataclasses
import difflib
from dataclasses import dataclass
from typing import Any

import rope_scaling
from rope_scaling import RopeScaling

CHOICES = {
    "normalization": ("layernorm", "rmsnorm"),
    "activation": ("gelu", "silu"),  # gelu is the tanh approximation, as in GPT-2
    "position_encoding": ("learned", "rope"),
    "ffn_type": ("mlp", "swiglu"),
}

# Greatest sizes: of each, some times what the largest known models have. They keep every tensor and every
# count of the model within 64 bits, and the time in which it is built within a minute.
MOST = {
    "n_layer": 2**10,
    "n_head": 2**12,
    "n_embd": 2**20,
    "n_kv_head": 2**12,
    "head_dim": 2**20,  # and n_head x head_dim
    "d_ff": 2**22,
    "vocab_size": 2**24,
    "block_size": 2**24,  # n_head x block_size^2 scores in float32 are counted
}

SWIGLU_MULTIPLE = 256  # LLaMA's rounding of 8/3 x width; keeps the FFN matmuls on tensor-core tiles


@dataclass(frozen=True)
class ModelConfig:
    """The shape of one decoder. Defaults are GPT-2's style at nanoGPT's 124M size.

    Raises ValueError when the fields do not describe a model that can be built.
    """

    arch: str = "gpt2"  # the preset it came from; a label, nothing branches on it
    n_layer: int = 12
    n_head: int = 12  # query heads
    n_embd: int = 768  # model width
    # None is replaced as soon as the other fields are there, so nobody else sees it.
    n_kv_head: int = None  # type: ignore[assignment]  # key/value heads; None means n_head (no grouping)
    head_dim: int = None  # type: ignore[assignment]  # width of a head; None: n_embd / n_head
    d_ff: int = None  # type: ignore[assignment]  # feed-forward width; None: default_ffn_width()
    vocab_size: int = 50304  # GPT-2's 50,257 padded to a multiple of 64
    block_size: int = 1024  # longest sequence, tokens
    normalization: str = "layernorm"
    norm_eps: float = 1e-5
    activation: str = "gelu"
    position_encoding: str = "learned"
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None  # for longer sequences; also given as a dict
    ffn_type: str = "mlp"
    bias: bool = False  # on every Linear but the output head, and on LayerNorm
    qkv_bias: bool = False  # on the projections to q, k and v alone, as in Qwen2
    dropout: float = 0.0
    weight_tying: bool = True  # the output head shares the token embedding
    qk_norm: bool = False  # RMSNorm on each query and key head, as in Qwen3

    def __post_init__(self):
        if self.n_kv_head is None:
            object.__setattr__(self, "n_kv_head", self.n_head)
        if self.d_ff is None:
            object.__setattr__(self, "d_ff", default_ffn_width(self.n_embd, self.ffn_type))
        if self.head_dim is None:
            object.__setattr__(self, "head_dim", self._equal_share())
        if not isinstance(self.rope_scaling, RopeScaling | None):
            object.__setattr__(self, "rope_scaling", rope_scaling.parse(self.rope_scaling))
        self._check()

    def _equal_share(self) -> int:
        """The head width at which the heads together are as wide as the model."""
        if self.n_head < 1:
            return 1  # _check refuses n_head
        if self.n_embd % self.n_head:
            raise ValueError(
                f"n_embd={self.n_embd} is not divisible by n_head={self.n_head}; "
                "the width is shared equally by the heads, so change one of them, or state head_dim"
            )
        return max(self.n_embd // self.n_head, 1)

    def _check(self):
        for name, most in MOST.items():
            if not 1 <= getattr(self, name) <= most:
                raise ValueError(f"{config_key(name)}={getattr(self, name)} must be from 1 to {most:,}")
        for name, allowed in CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f"{name}={getattr(self, name)!r} is not one of {', '.join(map(repr, allowed))}"
                )
        if self.attention_width > MOST["head_dim"]:
            raise ValueError(
                f"n_head={self.n_head} heads of head_dim={self.head_dim} are {self.attention_width:,} wide "
                f"together; at most {MOST['head_dim']:,} is allowed"
            )
        if self.n_head % self.n_kv_head:
            raise ValueError(
                f"n_head={self.n_head} is not divisible by num_key_value_heads={self.n_kv_head}; "
                "each key/value head serves the same number of query heads"
            )
        for name in ("rope_theta", "norm_eps"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)} must be above 0")
        self._check_rope()
        if self.bias and self.qkv_bias:
            raise ValueError(
                "bias=True and qkv_bias=True: bias has one on every Linear, q, k and v included; "
                "set one of them to False"
            )
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout={self.dropout} is not in [0, 1)")

    def _check_rope(self):
        if self.position_encoding != "rope":
            if self.rope_scaling is not None:
                raise ValueError(
                    f"rope_scaling needs rotary positions, got position_encoding={self.position_encoding!r}; "
                    "set position_encoding='rope', or rope_scaling=None"
                )
            return
        if self.head_dim % 2:
            raise ValueError(f"rope needs an even head width, got head_dim={self.head_dim}")
        if self.rope_scaling is None:
            return
        if not self.rope_theta > 1:
            raise ValueError(f"rope_scaling needs a rope_theta above 1, got {self.rope_theta:g}")
        self.rope_scaling.multipliers(self.head_dim, self.rope_theta)  # raises where it cannot be

    @property
    def attention_width(self) -> int:
        """Columns of all query heads together: A in the FLOP formulas."""
        return self.n_head * self.head_dim

    @property
    def block_matrices(self) -> int:
        """Elements of a block's matrices together."""
        attention = 2 * (self.attention_width + self.n_kv_head * self.head_dim)
        return self.n_embd * (attention + self.d_ff * (3 if self.ffn_type == "swiglu" else 2))

    @property
    def gqa_group_size(self) -> int:
        """Query heads per key/value head: G in the FLOP formulas."""
        return self.n_head // self.n_kv_head

    def to_dict(self) -> dict:
        """Plain values; ModelConfig(**them) is equal to this one."""
        scaling = None if self.rope_scaling is None else self.rope_scaling.to_dict()
        return {**dataclasses.asdict(self), "rope_scaling": scaling}


def default_ffn_width(n_embd: int, ffn_type: str) -> int:
    """4 x width for an MLP; for SwiGLU 8/3 x width rounded up (Touvron et al. 2023, sec. 2.2)."""
    if ffn_type != "swiglu":
        return 4 * n_embd
    return -(-8 * n_embd // (3 * SWIGLU_MULTIPLE)) * SWIGLU_MULTIPLE


_LLAMA: dict[str, Any] = dict(
    normalization="rmsnorm",
    activation="silu",
    position_encoding="rope",
    ffn_type="swiglu",
    weight_tying=False,
)

# A preset is a family's style and vocabulary; sizes come from the config file.
PRESETS: dict[str, dict[str, Any]] = {
    "gpt2": dict(vocab_size=50304),
    "llama": dict(_LLAMA, vocab_size=32000, rope_theta=1e4),
    "llama3": dict(_LLAMA, vocab_size=128256, rope_theta=5e5),
    "qwen2": dict(_LLAMA, vocab_size=151936, rope_theta=1e6, norm_eps=1e-6, qkv_bias=True),
    "qwen3": dict(_LLAMA, vocab_size=151936, rope_theta=1e6, norm_eps=1e-6, qk_norm=True),
}


def model_config(preset: str, **overrides) -> ModelConfig:
    """The preset's ModelConfig with every override that is not None put on top. Raises ValueError."""
    if preset not in PRESETS:
        near = difflib.get_close_matches(preset, PRESETS, n=1, cutoff=0.4)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"arch_preset={preset!r} is not one of {', '.join(PRESETS)}{hint}")
    given = {name: value for name, value in overrides.items() if value is not None}
    return ModelConfig(arch=preset, **{**PRESETS[preset], **given})


def config_key(field: str) -> str:
    """The configuration key that a user typed for this field."""
    return {"n_kv_head": "num_key_value_heads"}.get(field, field)
