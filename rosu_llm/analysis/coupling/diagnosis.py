"""The result of a diagnosis: statistics over pairs, as one document."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import isfinite
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np

from .advice import advise
from .parts import ModelParts
from .record import FIGURES, PairRecord, Ray, crossing

if TYPE_CHECKING:
    from ...training.config import MethodArguments
    from .full_batch import CurvePoint, FullBatch
    from .pairs import CouplingPlan

SCHEMA = "rosu/diagnosis/1"

_QUANTILES = {"min": 0.0, "q05": 0.05, "q25": 0.25, "median": 0.5, "q75": 0.75, "q95": 0.95, "max": 1.0}
_BINS = 20
#: What the measured change of each loss is called.
_CHANGES = {"retain": "retain_change", "forget": "forget_gain"}
_PLAN = ("pairs", "forget_batch_size", "retain_batch_size", "points", "full_batch", "seed")
_WHOLE = ("coupling", "by_kind", "segments", "at_rho", "curvature", "radius")
_METHOD = ("forget_loss", "retain_loss", "reduction", "tau", "tau_mode", "eps_q")


class CouplingDocument(TypedDict):
    """``diagnosis.json``; statistics over pairs are those of :func:`describe`.

    Attributes:
        settings: what was asked for; ``rho`` is the radius the advice is about, ``rhos`` all with a row of their own.
        setup: what was measured; ``held_bytes`` is the most that gradients and weight backups took at once.
        skipped: pairs left out, and why.
        coupling: gradients and losses at the weights as they are. ``tau_residue`` is τ/(‖r‖²+τ), ``histogram`` counts
            pairs by cos θ in equal bins from −1 to 1.
        by_part, by_kind, by_layer: means over pairs. ``contribution`` is ⟨f, r⟩ of the part over ‖f‖‖r‖ of the model,
            ``forget_share`` its part of ‖f‖².
        segments: mean changes of both losses along both perturbations, at every measured radius from 0.
        at_rho: the same at each reported radius, measured = first order + second order. ``retain_gap`` is
            L_r(w+δ_std) − L_r(w+δ_rosu), ``condition_share`` counts pairs with cos θ > M_r ρ/‖r‖, ``advantage_share``
            those with a positive gap.
        curvature: uᵀ∇²L_r u along both directions, M_r, and the share of the perturbation that survived rounding.
        radius: up to which ρ the retain-neutral perturbation is ahead, over pairs with cos θ > 0.
        full_batch: the same of all samples at once (``coupling``, ``at_rho``, ``curvature``, ``radius``), and
            ``curve``, cos θ and the alignment of retain batches with all retain samples by batch size; None where it
            was not asked for.
        advice: the regime's name, and one sentence; of the full batch where there is one.
    """

    schema: str
    settings: dict[str, Any]
    setup: dict[str, Any]
    pairs_used: int
    skipped: list[dict[str, Any]]
    coupling: dict[str, Any]
    by_part: list[dict[str, Any]]
    by_kind: list[dict[str, Any]]
    by_layer: list[dict[str, Any]]
    segments: dict[str, Any]
    at_rho: list[dict[str, Any]]
    curvature: dict[str, dict[str, float | None]]
    radius: dict[str, Any]
    per_pair: list[dict[str, Any]]
    full_batch: dict[str, Any] | None
    advice: dict[str, str]


def describe(values: Sequence[float | None]) -> dict[str, float | None]:
    """Mean, standard deviation (n − 1) and quantiles of the finite values; None without any."""
    known = np.array([v for v in values if v is not None and isfinite(v)])
    if known.size == 0:
        return dict.fromkeys(("mean", "std", *_QUANTILES))
    quantiles = dict(zip(_QUANTILES, np.quantile(known, list(_QUANTILES.values())).tolist(), strict=True))
    return {"mean": float(known.mean()), "std": float(known.std(ddof=1)) if known.size > 1 else None, **quantiles}


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if len(values) else None


@dataclass(frozen=True)
class Diagnosis:
    """What was measured, pair by pair, and everything that follows from it.

    Attributes:
        plan: what was asked for.
        settings: losses, τ and ε_q.
        setup: model, data, layout.
        records: one per measured pair.
        skipped: pairs left out, and why.
        parts: layers and kinds of the model's parameters.
        whole: all samples at once, and by batch size.
    """

    plan: CouplingPlan
    settings: MethodArguments
    setup: dict[str, Any]
    records: list[PairRecord]
    skipped: list[dict[str, Any]]
    parts: ModelParts
    whole: FullBatch | None = None

    @property
    def advice(self) -> str:
        """One sentence."""
        return self.document["advice"]["text"]

    @cached_property
    def document(self) -> CouplingDocument:
        """All figures, as they are written to ``diagnosis.json``."""
        plan, products = self.plan, [record.products for record in self.records]
        document: CouplingDocument = {
            "schema": SCHEMA,
            "settings": {
                **{name: getattr(plan, name) for name in _PLAN},
                "rhos": plan.reported,
                "rho": plan.chosen,
                **{name: getattr(self.settings, name) for name in _METHOD},
            },
            "setup": self.setup,
            "pairs_used": len(self.records),
            "skipped": self.skipped,
            "coupling": self._coupling(),
            "by_part": self.parts.coupling(products, "part"),
            "by_kind": self.parts.coupling(products, "kind"),
            "by_layer": self.parts.coupling(products, "layer"),
            "segments": {
                "rho": [0.0, *plan.measured],
                **{name: self._curves(rays) for name, rays in self._rays.items()},
            },
            "at_rho": [self._at(rho) for rho in plan.reported],
            "curvature": {
                **{name: describe([ray.curvature for ray in rays]) for name, rays in self._rays.items()},
                "bound": describe([record.curvature_bounds[-1] for record in self._complete]),
                "realized": describe([min(a.realized, b.realized) for a, b in zip(*self._rays.values(), strict=True)]),
            },
            "radius": self._radius(),
            "per_pair": [_pair(record) for record in self.records],
            "full_batch": None,
            "advice": {},
        }
        judged = document
        if self.whole is not None:  # described by the same figures, as of one pair
            plan = replace(plan, points=0)
            judged = Diagnosis(plan, self.settings, self.setup, [self.whole.record], [], self.parts).document
            curve = [_point(point) for point in self.whole.curve]
            document["full_batch"] = {**{name: judged[name] for name in _WHOLE}, "curve": curve}  # type: ignore[literal-required]
        document["advice"] = dict(zip(("regime", "text"), advise(judged), strict=True))
        return document

    def _coupling(self) -> dict[str, Any]:
        figures = {name: describe([getattr(record, name) for record in self.records]) for name in FIGURES}
        cosines = [record.cosine for record in self.records]
        counts, edges = np.histogram(cosines, bins=_BINS, range=(-1.0, 1.0))
        return {
            **{"tau_residue" if name == "residue" else name: found for name, found in figures.items()},
            "histogram": {"edges": edges.tolist(), "counts": counts.tolist()},
            "positive_share": float(np.mean([cosine > 0.0 for cosine in cosines])),
            "fallbacks": sum(record.fallback for record in self.records),
        }

    @cached_property
    def _complete(self) -> list[PairRecord]:
        """Pairs on which both perturbations exist."""
        return [record for record in self.records if record.rays is not None]

    @cached_property
    def _rays(self) -> dict[str, list[Ray]]:
        """The two rays of those pairs."""
        found = [record.rays for record in self.records if record.rays is not None]
        return {"standard": [standard for standard, _ in found], "neutral": [neutral for _, neutral in found]}

    def _curves(self, rays: Sequence[Ray]) -> dict[str, list[float | None]]:
        """Mean, standard deviation and first-order mean of both losses at ρ = 0 and at each measured radius."""
        curves: dict[str, list[float | None]] = {}
        for loss, change in _CHANGES.items():
            columns = zip(*((0.0, *getattr(ray, loss)) for ray in rays), strict=True)
            found = [describe(column) for column in columns]
            slope = _mean([getattr(ray, f"{loss}_slope") for ray in rays])
            curves[change] = [x["mean"] for x in found]
            curves[f"{change}_std"] = [x["std"] for x in found]
            curves[f"{loss}_first_order"] = [] if slope is None else [slope * rho for rho in (0.0, *self.plan.measured)]
        return curves

    def _at(self, rho: float) -> dict[str, Any]:
        at = self.plan.measured.index(rho)
        gaps = [record.gaps[at] for record in self._complete]
        holds = [r.retain_norm * r.cosine > r.curvature_bounds[at] * rho for r in self._complete]
        return {
            "rho": rho,
            **{name: _effect(rays, at, rho) for name, rays in self._rays.items()},
            "retain_gap": describe(gaps),
            "condition_share": _mean(holds),
            "advantage_share": _mean([gap > 0.0 for gap in gaps]),
        }

    def _radius(self) -> dict[str, Any]:
        rhos = self.plan.measured
        positive = [record for record in self._complete if record.cosine > 0.0]
        crossings = [record.crossing for record in positive]
        gaps = np.mean([record.gaps for record in self._complete], axis=0).tolist() if self._complete else []
        slope = _mean([record.gap_slope for record in self._complete])
        return {
            "guaranteed": describe([record.guaranteed_radius for record in positive]),
            "crossing": describe(crossings),
            "crossed_share": _mean([c is not None for c in crossings]),
            "max_rho": rhos[-1],
            "mean_crossing": None if slope is None else crossing(gaps, slope, rhos),
        }


def _point(point: CurvePoint) -> dict[str, Any]:
    sizes = {f"{part}_batch_size": getattr(point, f"{part}_batch_size") for part in ("forget", "retain")}
    return {
        **sizes,
        "pairs": len(point.cosines),
        "cosine": describe(point.cosines),
        "retain_alignment": describe(point.alignments),
    }


def _pair(record: PairRecord) -> dict[str, Any]:
    rays, radius = record.rays, record.guaranteed_radius
    return {
        "pair": record.pair,
        **{name: getattr(record, name) for name in FIGURES},
        "fallback": record.fallback,
        "curvature_standard": rays[0].curvature if rays else None,
        "curvature_neutral": rays[1].curvature if rays else None,
        "curvature_bound": record.curvature_bounds[-1] if rays else None,
        "guaranteed_rho": radius if radius is not None and isfinite(radius) else None,
        "crossing_rho": record.crossing,
    }


def _effect(rays: Sequence[Ray], at: int, rho: float) -> dict[str, float | None]:
    """Mean effects of one perturbation of radius ``rho``, the measured radius number ``at``."""
    effect: dict[str, float | None] = {}
    for loss, change in _CHANGES.items():
        first = [rho * getattr(ray, f"{loss}_slope") for ray in rays]
        changes = [getattr(ray, loss)[at] for ray in rays]
        effect[f"{loss}_first_order"] = _mean(first)
        effect[change] = _mean(changes)
        effect[f"{loss}_second_order"] = _mean([measured - x for measured, x in zip(changes, first, strict=True)])
    return effect
