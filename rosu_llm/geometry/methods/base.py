"""What a method is: which gradients it needs, where it perturbs, how it combines them.

A rule sees names and inner products only. The step engine runs the passes a rule asks for and hands it their Gram
matrix; the rule answers with coefficients. A new method is one file here, which declares its options and their
defaults, and one line in :mod:`rosu_llm.geometry.methods.registry`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields
from math import isfinite
from typing import Any, ClassVar

from ...errors import ConfigError, unknown
from ..gram import Gram
from ..projection import Stabilizer
from ..subspace import Protection, Subspace
from ..vector import Vector


@dataclass(frozen=True)
class Inner:
    """The answer to the inner problem: where the retain loss is evaluated.

    Attributes:
        delta: the perturbation δ; empty where the rule falls back to plain retain descent.
        direction_norm: norm of the unnormalised direction (‖q_τ‖ for ROSU, ‖f‖ for the standard one).
        alpha: ρ over that norm, the weight of the Jacobian correction; 0 at a fallback.
        fallback: the direction was too small to be trusted; no perturbation, no amplification.
        precise: δ is a small difference of large gradients; form it in float64.
        optimizer_input: what to hand to the optimizer in place of δ, where its preconditioner turns that into δ.
    """

    delta: Vector
    direction_norm: float
    alpha: float
    fallback: bool = False
    precise: bool = False
    optimizer_input: Vector | None = None

    @staticmethod
    def fall_back(direction_norm: float) -> Inner:
        """No perturbation: the step is plain retain descent."""
        return Inner(Vector(), direction_norm, alpha=0.0, fallback=True)


def option(default: Any, description: str, *, exclusive: bool = True) -> Any:
    """A field of a rule that users can set; its name, default and description are those of the setting.

    ``exclusive``: another value than the default is refused for methods that do not have it, since it would silently do
    nothing there.
    """
    return field(default=default, metadata={"help": description, "exclusive": exclusive})


class BaseRule(ABC):
    """A method of the family, as coefficients over captured gradients; a subclass overrides what differs."""

    #: Losses whose gradient at w is needed, in the order they run.
    passes: ClassVar[tuple[str, ...]] = ("forget", "retain")
    #: Losses that the method is defined with, by part; others are those of the settings.
    losses: ClassVar[Mapping[str, str]] = {}
    #: Whether a step takes the gradient of one part only, which :meth:`parts_in` names.
    alternates: ClassVar[bool] = False
    #: Whether steps only collect squared gradients, and the last one changes the weights by them.
    sweeps: ClassVar[bool] = False
    #: Whether a further pass at w+δ follows, and whose loss it takes.
    perturbs: ClassVar[bool] = False
    surrogate: ClassVar[str] = "retain"
    #: ``euclidean``, or ``adam``: the Gram matrix then comes with its ``dual``, once the optimizer has state.
    metric: str = "euclidean"

    def __post_init__(self) -> None:
        """Check the options; subclasses add their own checks."""
        return

    @classmethod
    def build(cls, **options: Any) -> BaseRule:
        """The rule for these options; a method whose options select between classes overrides this."""
        return cls(**options)

    @classmethod
    def options(cls) -> dict[str, Field[Any]]:
        """The settings that the rule declares, by name."""
        return {f.name: f for f in fields(cls) if "exclusive" in f.metadata}  # type: ignore[arg-type]

    def parts_in(self, epoch: int) -> tuple[str, ...]:
        """Those of ``passes`` that a step in this epoch takes, counted from 0."""
        return self.passes

    @property
    def pulls(self) -> bool:
        """Whether the weights are also moved along βδ (the paper's amplification)."""
        return False

    @property
    def samples(self) -> int:
        """How many per-sample retain gradients are wanted besides (``r1``, ``r2``, …); windows may hold fewer."""
        return 0

    @property
    def remembers(self) -> float | None:
        """How much of an average of retain gradients (``m``) each step keeps; None for rules that have none."""
        return None

    @property
    def refreshes(self) -> int:
        """Steps between gradients of the whole retain data that are kept (``m``); 0 for rules that take none."""
        return 0

    @property
    def stored(self) -> int:
        """How many retain gradients (``m1``, ``m2``, …) are stored before the first step."""
        return 0

    @property
    def needs_hessian(self) -> bool:
        """Whether Hessian-vector products are needed."""
        return False

    @property
    def stabilizer(self) -> Stabilizer | None:
        """τ of the projection onto the mean retain gradient, for rules that have one."""
        return None

    def protected(self, gram: Gram) -> Subspace | None:
        """The span of the retain gradients that are protected, for rules with ``samples``."""
        return None

    def precondition(self, gram: Gram) -> Vector | None:
        """The vector q whose D⁻¹q is to be captured before :meth:`inner`. Asked only where D is known."""
        return None

    def inner(self, gram: Gram, rho: float) -> Inner:
        """δ from the Gram matrix of the gradients at w. Called only if ``perturbs``."""
        raise TypeError(f"{type(self).__name__} has no surrogate point")

    def hessian_directions(self, gram: Gram, inner: Inner) -> Mapping[str, Vector]:
        """Loss → the vector to multiply by its Hessian at w, after all passes. Called only if ``needs_hessian``."""
        return {}

    @abstractmethod
    def outer(self, gram: Gram, inner: Inner | None) -> Vector:
        """The descent gradient v, from the Gram matrix of all captured gradients."""


@dataclass(frozen=True, kw_only=True)
class Surrogate(BaseRule):
    """A rule with a perturbation, which is not trusted where its direction is too short."""

    eps_q: float = option(1e-6, "‖q‖ at or below which a step is plain retain descent.")

    perturbs = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.eps_q >= 0.0 and isfinite(self.eps_q)):
            raise ConfigError(f"eps_q={self.eps_q!r} is no threshold for a norm: give a number ≥ 0, e.g. 1e-6.")


@dataclass(frozen=True, kw_only=True)
class Weighted(BaseRule):
    """A rule with a weight for each gradient, λ_f and λ_r."""

    forget_weight: float = option(1.0, "λ_f of graddiff, pcgrad, blur, sam_npo, torchjd.")
    retain_weight: float = option(1.0, "λ_r of the same.")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("forget_weight", "retain_weight"):
            if not getattr(self, name) >= 0.0:
                raise ConfigError(f"{name}={getattr(self, name)!r} must be a number ≥ 0.")


@dataclass(frozen=True, kw_only=True)
class Protecting(BaseRule):
    """A rule that protects the gradients of k sampled retain examples."""

    #: k where ``protect_rank`` is not given.
    default_rank: ClassVar[int] = 8

    protect_rank: int | None = option(
        None,
        "Protected retain directions: 1 is the mean (rosu's default), k ≥ 2 are k sampled examples.",
    )
    include_mean: bool = option(False, "Protect the mean retain gradient besides the sampled ones.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.rank, int) or self.rank < 1:
            raise ConfigError(f"protect_rank={self.rank!r} is no number of retain directions: give a whole number ≥ 1.")

    @property
    def rank(self) -> int:
        """k."""
        return self.default_rank if self.protect_rank is None else self.protect_rank

    @property
    def protection(self) -> Protection:
        """Which retain gradients span the protected subspace."""
        return Protection(self.rank, self.include_mean)

    @property
    def samples(self) -> int:
        return self.protection.samples

    def protected(self, gram: Gram) -> Subspace:
        return self.protection.span(gram.dual or gram)


METRICS = ("euclidean", "adam")


@dataclass(frozen=True, kw_only=True)
class InMetric(BaseRule):
    """A rule that projects in the Euclidean metric or in the optimizer's."""

    metric: str = option(
        "euclidean",
        "Metric in which rosu and gu project: euclidean, or adam (the optimizer's).",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.metric not in METRICS:
            raise unknown("metric", self.metric, METRICS)
