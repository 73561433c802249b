"""The scaling law: the loss of a model of N parameters after D tokens.

    L(N, D) = E + A / N^alpha + B / D^beta          Hoffmann et al. 2022, equation 10

N is the number of all parameters, embeddings included, as there (appendix F) and in the published plans.
Without the two embeddings, the predicted losses of those plans are 0.014 to 0.046 higher.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Law:
    E: float  # nats per token that no model can avoid
    A: float
    B: float
    alpha: float
    beta: float
    source: str = ""
    caveat: str = ""
    # least and most of the runs that the constants were fitted to
    parameters: tuple[float, float] = (0.0, float("inf"))
    tokens: tuple[float, float] = (0.0, float("inf"))

    def loss(self, parameters: float, tokens: float) -> float:
        """Nats per token."""
        return self.E + self.A / parameters**self.alpha + self.B / tokens**self.beta

    def __str__(self) -> str:
        return f"L = {self.E:.4g} + {self.A:.4g} / N^{self.alpha:.4g} + {self.B:.4g} / D^{self.beta:.4g}"

    def beyond(self, parameters: float, tokens: float) -> list[str]:
        """What of a plan lies outside of the runs that the constants were fitted to, one line each."""
        amounts = (("parameters", parameters, self.parameters), ("tokens", tokens, self.tokens))
        return [
            f"extrapolated: {value:.3g} {name}; the law was fitted to {least:.3g} to {most:.3g}"
            for name, value, (least, most) in amounts
            if not least <= value <= most
        ]


# Section 3.3 and appendix D.3: more than 400 models of 70 M to 16 B parameters on 5 to 500 B tokens.
HOFFMANN = Law(
    E=1.69,
    A=406.4,
    B=410.7,
    alpha=0.34,
    beta=0.28,
    source="Hoffmann et al. 2022, approach 3",
    caveat="fitted to MassiveText with a tokenizer of 32,000 entries: the loss per token differs with other "
    "data and tokenizers; compare plans of one family, or state the constants of your own runs (--law)",
    parameters=(70e6, 16e9),
    tokens=(5e9, 500e9),
)
