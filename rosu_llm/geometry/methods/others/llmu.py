"""LLMU (Yao, Xu, Liu: "Large Language Model Unlearning", 2023, equations 2 to 5).

    v = −ε₁ ∇L(x_f, y_f) + ε₂ ∇L(x_f, y_mismatch) + ε₃ ∇KL(p₀ ‖ p)(x_r)

Three gradients: ascent on the answers to forget, descent on wrong answers to the same questions, and descent on the
divergence from the initial model on data to keep. A wrong answer is that of a retain sample, another one every epoch;
a text without a question is cut in the middle and continued by the second half of a retain text. ε₁ = .5, ε₂ = ε₃ = 1
are the authors' values.

Their code averages losses by sample and then over a batch, draws five wrong answers for each question, and takes the KL
at every position, prompt and padding too. Here each loss is a mean over the answer tokens of the window.
"""

from __future__ import annotations

from dataclasses import dataclass

from ....errors import ConfigError
from ...gram import Gram
from ...vector import F, R, Vector, X
from ..base import BaseRule, Inner, option


@dataclass(frozen=True, kw_only=True)
class LLMU(BaseRule):
    """v = ε₃ r + ε₂ x − ε₁ f, with r of the KL to the initial model and x of mismatched answers."""

    ascent_weight: float = option(0.5, "llmu: ε₁, of ascent on the answers to forget.")
    mismatch_weight: float = option(1.0, "llmu: ε₂, of descent on mismatched answers.")
    normal_weight: float = option(1.0, "llmu: ε₃, of the divergence from the initial model on data to keep.")

    passes = ("forget", "mismatch", "retain")
    losses = {"forget": "nll", "mismatch": "nll", "retain": "kl"}  # noqa: RUF012

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("ascent_weight", "mismatch_weight", "normal_weight"):
            if not getattr(self, name) >= 0.0:
                raise ConfigError(f"{name}={getattr(self, name)!r} must be a number ≥ 0.")

    def outer(self, gram: Gram, inner: Inner | None) -> Vector:
        return self.normal_weight * R + self.mismatch_weight * X - self.ascent_weight * F
