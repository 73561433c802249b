"""How rotary frequencies change for sequences longer than those that a model was first trained on: linear,
Llama 3.1's, YaRN. Plain numbers, no tensors; a type of scaling is one class here and nothing elsewhere.

A configuration writes a scaling as a dict, with the names that Hugging Face's config.json has:

    rope_scaling = {"rope_type": "linear", "factor": 2.0}
    --rope_scaling='{"rope_type": "linear", "factor": 2.0}'

    D head width · theta base of the frequencies · pair i of D/2 turns by theta^(-2i/D) at each position
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

from common.text import shown

GREATEST = 1e18  # of any number here; a product of two is still a number in float32
LONGEST = 2**24  # tokens, the limit of block_size


@dataclass(frozen=True, kw_only=True)
class RopeScaling(ABC):
    """What all types have. A field without a default must be stated. Raises ValueError.

    multipliers(D, theta) gives D/2 factors, by which the frequencies are multiplied; theta is above 1.
    attention_scale is what cos and sin are multiplied by, which multiplies the scores by its square.
    """

    rope_type: str = ""  # each class sets its own; no argument
    factor: float  # how many times longer the sequences become

    def __post_init__(self):
        for field in dataclasses.fields(self):
            self._check_number(field)
        if not self.factor >= 1:
            raise ValueError(f"rope_scaling: factor={self.factor} must be at least 1; 1 changes nothing")

    def _check_number(self, field: dataclasses.Field) -> None:
        value = getattr(self, field.name)
        if field.name == "rope_type" or value is None and field.default is None:
            return
        whole = field.type == "int"
        if type(value) is not int and (whole or type(value) is not float):
            expected = "a whole number" if whole else "a number"
            raise ValueError(f"rope_scaling: {field.name}={shown(value)} is not {expected}")
        most = LONGEST if whole else GREATEST
        if not 0 < value <= most:  # also catches NaN
            raise ValueError(
                f"rope_scaling: {field.name}={shown(value)} must be above 0 and at most {most:,.0f}"
            )
        if not whole:
            object.__setattr__(self, field.name, float(value))  # 8 and 8.0 are one scaling

    def to_dict(self) -> dict[str, str | float]:
        """What parse() reads; without the fields that are not set."""
        return {name: value for name, value in dataclasses.asdict(self).items() if value is not None}

    @property
    def attention_scale(self) -> float:
        return 1.0

    @abstractmethod
    def multipliers(self, head_dim: int, theta: float) -> list[float]: ...


@dataclass(frozen=True, kw_only=True)
class LinearScaling(RopeScaling):
    """Every frequency divided by factor: positions are squeezed into the old range. Chen et al. 2023."""

    rope_type: str = dataclasses.field(default="linear", init=False)

    def multipliers(self, head_dim: int, theta: float) -> list[float]:
        return [1 / self.factor] * (head_dim // 2)


@dataclass(frozen=True, kw_only=True)
class Llama3Scaling(RopeScaling):
    """Llama 3.1's: pairs that turn at least high_freq_factor times within the original length stay, those
    that turn at most low_freq_factor times are divided by factor, and the frequencies between are a mean of
    both, weighted by the number of turns."""

    rope_type: str = dataclasses.field(default="llama3", init=False)
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int  # tokens

    def __post_init__(self):
        super().__post_init__()
        if not self.low_freq_factor < self.high_freq_factor:
            raise ValueError(
                f"rope_scaling: low_freq_factor={self.low_freq_factor:g} must be below "
                f"high_freq_factor={self.high_freq_factor:g}; Llama 3.1 has 1 and 4"
            )

    def multipliers(self, head_dim: int, theta: float) -> list[float]:
        low, high = self.low_freq_factor, self.high_freq_factor
        original = self.original_max_position_embeddings
        turns = [original * frequency / (2 * math.pi) for frequency in _frequencies(head_dim, theta)]
        kept = [min(max((turn - low) / (high - low), 0), 1) for turn in turns]
        return [keep + (1 - keep) / self.factor for keep in kept]


@dataclass(frozen=True, kw_only=True)
class YarnScaling(RopeScaling):
    """YaRN (Peng et al. 2023, sec. 3.2 to 3.4): pairs that turn more than beta_fast times within the original
    length stay, those that turn less than beta_slow times are divided by factor, with a linear ramp over the
    pairs between them. The bounds of the ramp are rounded outward to whole pairs, as published models do.

    attention_factor: attention_scale itself; without it, 0.1 ln(factor) + 1.
    """

    rope_type: str = dataclasses.field(default="yarn", init=False)
    original_max_position_embeddings: int  # tokens
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None

    def __post_init__(self):
        super().__post_init__()
        if not self.beta_slow < self.beta_fast:
            raise ValueError(
                f"rope_scaling: beta_slow={self.beta_slow:g} must be below beta_fast={self.beta_fast:g}; "
                "the defaults are 1 and 32"
            )
        if self.original_max_position_embeddings <= 2 * math.pi * self.beta_slow:
            raise ValueError(
                f"rope_scaling: no pair turns beta_slow={self.beta_slow:g} times within "
                f"original_max_position_embeddings={self.original_max_position_embeddings} tokens; state the "
                "length that the model was trained on"
            )

    @property
    def attention_scale(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        return 0.1 * math.log(self.factor) + 1

    def multipliers(self, head_dim: int, theta: float) -> list[float]:
        first = max(math.floor(self._pair_that_turns(self.beta_fast, head_dim, theta)), 0)
        last = min(math.ceil(self._pair_that_turns(self.beta_slow, head_dim, theta)), head_dim - 1)
        if first > last:
            raise ValueError(
                f"rope_scaling: with rope_theta={theta:g} every pair turns more than "
                f"beta_fast={self.beta_fast:g} times within {self.original_max_position_embeddings} tokens, "
                "so YaRN has none to stretch; set rope_scaling=None, or the rope_theta of the first training"
            )
        width = last - first or 0.001  # a step instead of a ramp
        stretched = [min(max((i - first) / width, 0), 1) for i in range(head_dim // 2)]
        return [1 - share + share / self.factor for share in stretched]

    def _pair_that_turns(self, times: float, head_dim: int, theta: float) -> float:
        """The pair i, not rounded, that turns so many times within the original length."""
        length = self.original_max_position_embeddings
        return head_dim * math.log(length / (2 * math.pi * times)) / (2 * math.log(theta))


TYPES: dict[str, type[RopeScaling]] = {
    "linear": LinearScaling,
    "llama3": Llama3Scaling,
    "yarn": YarnScaling,
}


def parse(values: object) -> RopeScaling:
    """The scaling that a dict describes; a value None is one that is not stated. Raises ValueError."""
    if not isinstance(values, dict):
        raise ValueError(
            f"rope_scaling={shown(values)} is not a dict such as {{'rope_type': 'linear', 'factor': 2.0}}"
        )
    given = {name: value for name, value in values.items() if value is not None}
    kind = given.pop("rope_type", None)
    if not isinstance(kind, str) or kind not in TYPES:
        got = "has no rope_type" if kind is None else f"has rope_type={shown(kind)}"
        raise ValueError(f"rope_scaling {got}; it is one of {', '.join(map(repr, TYPES))}")
    fields = {f.name: f for f in dataclasses.fields(TYPES[kind]) if f.init}
    for name in given:
        if name not in fields:
            near = difflib.get_close_matches(str(name)[:40], fields, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(fields)}"
            raise ValueError(f"rope_scaling of type {kind!r} has no field {shown(name)}; {hint}")
    missing = [name for name, f in fields.items() if f.default is dataclasses.MISSING and name not in given]
    if missing:
        raise ValueError(f"rope_scaling of type {kind!r} needs {', '.join(missing)}")
    return TYPES[kind](**given)


def _frequencies(head_dim: int, theta: float) -> list[float]:
    return [theta ** (-i / head_dim) for i in range(0, head_dim, 2)]
