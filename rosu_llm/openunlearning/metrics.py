"""Mem, Priv, Util, Agg and Agg_MU as metrics of OpenUnlearning, so that its own result files contain them.

Its evaluator computes the components (``pre_compute``) and reads the reference models' files (``reference_logs``); the
formulas are those of :mod:`rosu_llm.evaluation.tofu.summary`. A score that lacks an input is an empty result, which
OpenUnlearning leaves out of its summary and, unlike null, computes again the next time.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping
from typing import Any

from ..errors import ConfigError
from ..evaluation.tofu.summary import TofuSummary, harmonic_mean, summarise

logger = logging.getLogger(__name__)

Metric = Callable[..., dict[str, Any]]


def mem(model: Any, **kwargs: Any) -> dict[str, Any]:
    """Mem from its four components."""
    return _column("Mem", summarise(_figures(kwargs["pre_compute"])))


def priv(model: Any, **kwargs: Any) -> dict[str, Any]:
    """Priv from the four attacks on this model and on the references."""
    transform = str(kwargs["auc_transform"])
    summary = summarise(
        _figures(kwargs["pre_compute"]),
        retain=_reference(kwargs, "retain_model_logs"),
        target=_reference(kwargs, "target_model_logs"),
        transform=transform,
    )
    result = _column("Priv", summary)
    return {**result, "auc_transform": transform, "closeness": dict(summary.closeness)} if result else {}


def util(model: Any, **kwargs: Any) -> dict[str, Any]:
    """Util, relative to the initial model when its results are given."""
    target = _reference(kwargs, "target_model_logs")
    result = _column("Util", summarise(_figures(kwargs["pre_compute"]), target=target))
    return {**result, "relative_to_initial_model": target is not None} if result else {}


def agg(model: Any, **kwargs: Any) -> dict[str, Any]:
    """The harmonic mean of the scores it is given."""
    scores = _figures(kwargs["pre_compute"])
    lacking = [name for name in kwargs["pre_compute"] if name not in scores]
    if lacking:
        logger.warning("No aggregate: %s could not be computed.", ", ".join(lacking))
        return {}
    return {"agg_value": harmonic_mean(scores.values())}


METRICS: Mapping[str, Metric] = {"rosu_mem": mem, "rosu_priv": priv, "rosu_util": util, "rosu_agg": agg}


def register_metrics() -> list[str]:
    """Add ours to OpenUnlearning's registry, if that is loaded; safe to call again. Returns the registered handlers."""
    registry = getattr(sys.modules.get("evals.metrics"), "METRICS_REGISTRY", None)
    if not isinstance(registry, dict):
        return []
    wrap = sys.modules["evals.metrics.base"].unlearning_metric
    for name, function in METRICS.items():
        existing = registry.get(name)
        if existing is None:
            registry[name] = wrap(name=name)(function)
        elif getattr(existing, "_metric_fn", None) is not function:
            raise ConfigError(f"OpenUnlearning already has a metric {name!r}, and it is not ours: rename that one.")
    return list(METRICS)


def _figures(results: Mapping[str, Any]) -> dict[str, float]:
    """metric → value of those that have one."""
    values = {name: (result or {}).get("agg_value") for name, result in results.items()}
    return {name: float(value) for name, value in values.items() if value is not None}


def _reference(kwargs: Mapping[str, Any], name: str) -> dict[str, float] | None:
    logs = kwargs.get("reference_logs", {}).get(name)
    return None if logs is None else _figures(logs)


def _column(name: str, summary: TofuSummary) -> dict[str, Any]:
    value = summary.columns()[name]
    if value is None:
        logger.warning("No %s: it needs %s.", name, ", ".join(summary.missing[name]))
        return {}
    return {"agg_value": value}
