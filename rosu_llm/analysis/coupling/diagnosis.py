"""The result of a diagnosis: statistics over pairs, as one document that tables, plots and reports read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...training.config import MethodArguments
from .advice import advise
from .pair import PairRecord, crossing, curvature_bounds, guaranteed_radius, retain_gaps, second_order
from .parts import PartStatistics

if TYPE_CHECKING:
    from .windows import Plan

SCHEMA = "rosu/diagnosis/1"

_QUANTILES = {"min": 0.0, "q05": 0.05, "q25": 0.25, "median": 0.5, "q75": 0.75, "q95": 0.95, "max": 1.0}
_BINS = 20


def describe(values: Sequence[float | None]) -> dict[str, float | None]:
    """Mean, standard deviation (n − 1) and quantiles of what is finite; None where nothing is."""
    known = np.array([v for v in values if v is not None and isfinite(v)])
    if known.size == 0:
        return dict.fromkeys(("mean", "std", *_QUANTILES))
    spread = float(known.std(ddof=1)) if known.size > 1 else None
    quantiles = dict(zip(_QUANTILES, np.quantile(known, list(_QUANTILES.values())).tolist(), strict=True))
    return {"mean": float(known.mean()), "std": spread, **quantiles}


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
        parts: running statistics by layer and kind.
    """

    plan: Plan
    settings: MethodArguments
    setup: dict[str, Any]
    records: list[PairRecord]
    skipped: list[dict[str, Any]]
    parts: PartStatistics

    @property
    def advice(self) -> str:
        """One sentence."""
        return str(self.document["advice"]["text"])

    @cached_property
    def document(self) -> dict[str, Any]:
        """All figures, as they are written to ``diagnosis.json`` (schema ``rosu/diagnosis/1``)."""
        found: dict[str, Any] = {
            "schema": SCHEMA,
            "settings": self._settings(),
            "setup": self.setup,
            "pairs_used": len(self.records),
            "skipped": self.skipped,
            "coupling": self._coupling(),
            **{name: grouping.rows() for name, grouping in self.parts.groupings.items()},
            "segments": self._segments(),
            "at_rho": [self._at(rho) for rho in self.plan.reported],
            "curvature": self._curvature(),
            "radius": self._radius(),
            "per_pair": [self._pair(record) for record in self.records],
        }
        regime, text = advise(found)
        return {**found, "advice": {"regime": regime, "text": text}}

    def save(self, folder: str | Path) -> list[Path]:
        """Write diagnosis.json, diagnosis.md and, with matplotlib, three figures; returns what was written."""
        from ...presentation.coupling import write_diagnosis

        return write_diagnosis(self.document, Path(folder))

    def show(self) -> None:
        """Print the tables and the advice."""
        from ...presentation.coupling_tables import print_diagnosis

        print_diagnosis(self.document)

    # -- the parts of the document --------------------------------------------------------------

    def _settings(self) -> dict[str, Any]:
        plan, settings = self.plan, self.settings
        asked = ("pairs", "forget_batch_size", "retain_batch_size", "points", "seed")
        method = ("forget_loss", "retain_loss", "reduction", "tau", "tau_mode", "eps_q")
        return {
            **{name: getattr(plan, name) for name in asked},
            "rhos": plan.reported,
            "rho": plan.chosen,
            **{name: getattr(settings, name) for name in method},
        }

    def _coupling(self) -> dict[str, Any]:
        names = ("cosine", "sine", "forget_norm", "retain_norm", "retain_square", "q_norm")
        cosines = [record.cosine for record in self.records]
        counts, edges = np.histogram(cosines, bins=_BINS, range=(-1.0, 1.0))
        return {
            **{name: describe([getattr(record, name) for record in self.records]) for name in names},
            "tau_residue": describe([record.residue for record in self.records]),
            "forget_loss": describe([record.forget_loss for record in self.records]),
            "retain_loss": describe([record.retain_loss for record in self.records]),
            "histogram": {"edges": edges.tolist(), "counts": counts.tolist()},
            "positive_share": float(np.mean([cosine > 0.0 for cosine in cosines])),
            "fallbacks": sum(record.fallback for record in self.records),
        }

    @property
    def _complete(self) -> list[PairRecord]:
        """Pairs on which both perturbations exist."""
        return [record for record in self.records if record.rays() is not None]

    def _segments(self) -> dict[str, Any]:
        rhos = self.plan.measured
        result: dict[str, Any] = {"rho": [0.0, *rhos]}
        for name in ("standard", "neutral"):
            rays = [getattr(record, name) for record in self._complete]
            curve: dict[str, Any] = {}
            for loss, key in (("retain", "retain_change"), ("forget", "forget_gain")):
                columns = [[0.0] * len(rays), *zip(*(getattr(ray, loss) for ray in rays), strict=True)]
                found = [describe(list(column)) for column in columns]
                slope = _mean([getattr(ray, f"{loss}_slope") for ray in rays])
                curve[key] = [x["mean"] for x in found]
                curve[f"{key}_std"] = [x["std"] for x in found]
                curve[f"{loss}_first_order"] = [None if slope is None else slope * rho for rho in (0.0, *rhos)]
            result[name] = curve if rays else {key: [] for key in curve}
        return result

    def _at(self, rho: float) -> dict[str, Any]:
        at = self.plan.measured.index(rho)
        records = self._complete
        effects: dict[str, Any] = {}
        for name in ("standard", "neutral"):
            rays = [getattr(record, name) for record in records]
            effects[name] = {}
            for loss, key in (("retain", "retain_change"), ("forget", "forget_gain")):
                changes = [getattr(ray, loss)[at] for ray in rays]
                slopes = [getattr(ray, f"{loss}_slope") for ray in rays]
                rest = [second_order([c], s, [rho])[0] for c, s in zip(changes, slopes, strict=True)]
                effects[name][f"{loss}_first_order"] = _mean([rho * slope for slope in slopes])
                effects[name][key] = _mean(changes)
                effects[name][f"{loss}_second_order"] = _mean(rest)
        gaps = [retain_gaps(record)[at] for record in records]
        bounds = [curvature_bounds(record, self.plan.measured)[at] for record in records]
        holds = [r.retain_norm * r.cosine > bound * rho for r, bound in zip(records, bounds, strict=True)]
        return {
            "rho": rho,
            **effects,
            "retain_gap": describe(gaps),
            "condition_share": _mean([float(x) for x in holds]),
            "advantage_share": _mean([float(gap > 0.0) for gap in gaps]),
        }

    def _curvature(self) -> dict[str, Any]:
        rays = [rays for record in self.records if (rays := record.rays()) is not None]
        return {
            "standard": describe([standard.curvature for standard, _ in rays]),
            "neutral": describe([neutral.curvature for _, neutral in rays]),
            "bound": describe([curvature_bounds(record, self.plan.measured)[-1] for record in self._complete]),
            "realized": describe([min(standard.realized, neutral.realized) for standard, neutral in rays]),
        }

    def _radius(self) -> dict[str, Any]:
        rhos = self.plan.measured
        positive = [record for record in self._complete if record.cosine > 0.0]
        crossings = [_crossing(record, rhos) for record in positive]
        gaps = [retain_gaps(record) for record in self._complete]
        slopes = [_gap_slope(record) for record in self._complete]
        mean_gap = np.mean(gaps, axis=0).tolist() if gaps else []
        return {
            "guaranteed": describe([guaranteed_radius(record, rhos) for record in positive]),
            "crossing": describe(crossings),
            "crossed_share": _mean([float(c is not None) for c in crossings]),
            "max_rho": rhos[-1],
            "mean_crossing": crossing(mean_gap, float(np.mean(slopes)), rhos) if gaps else None,
        }

    def _pair(self, record: PairRecord) -> dict[str, Any]:
        rhos, rays = self.plan.measured, record.rays()
        radius = guaranteed_radius(record, rhos)
        plain = ("pair", "cosine", "sine", "forget_norm", "retain_norm", "retain_square", "q_norm", "residue")
        return {
            **{name: getattr(record, name) for name in (*plain, "forget_loss", "retain_loss", "fallback")},
            "curvature_standard": rays[0].curvature if rays else None,
            "curvature_neutral": rays[1].curvature if rays else None,
            "curvature_bound": curvature_bounds(record, rhos)[-1] if rays else None,
            "guaranteed_rho": radius if radius is not None and isfinite(radius) else None,
            "crossing_rho": _crossing(record, rhos),
        }


def _gap_slope(record: PairRecord) -> float:
    rays = record.rays()
    return 0.0 if rays is None else rays[0].retain_slope - rays[1].retain_slope


def _crossing(record: PairRecord, rhos: Sequence[float]) -> float | None:
    """Where the pair's advantage ends in fact; None where it does not, or where cos θ ≤ 0 gives none to lose."""
    return crossing(retain_gaps(record), _gap_slope(record), rhos) if record.cosine > 0.0 else None
