"""Invented results, to see what a table looks like before there are any."""

from __future__ import annotations

from pathlib import Path

from ..evaluation.results import Result
from ..evaluation.tofu.summary import INPUTS

# In the order of INPUTS: extraction, exact memorisation, paraphrase, truth ratio, four attacks, utility, fluency.
_FIGURES = {
    "full": (0.71, 0.98, 0.85, 0.66, 0.99, 0.99, 0.99, 0.99, 0.60, 0.87),
    "retain90": (0.06, 0.58, 0.11, 0.40, 0.39, 0.33, 0.39, 0.47, 0.59, 0.88),
    "ROSU_rho0.2_lr1e-5": (0.09, 0.62, 0.21, 0.44, 0.55, 0.48, 0.54, 0.58, 0.57, 0.80),
    "ROSU_rho0.4_lr1e-5": (0.06, 0.57, 0.14, 0.40, 0.44, 0.37, 0.44, 0.50, 0.56, 0.78),
    "GradDiff_lr1e-5": (0.00, 0.02, 0.00, 0.01, 0.00, 0.00, 0.00, 0.00, 0.45, 0.20),
}


def example() -> tuple[list[Result], Result | None, Result | None]:
    """Runs, retain model and initial model, all invented."""
    results = {}
    for name, values in _FIGURES.items():
        path = Path("saves/unlearn") / f"tofu_invented_forget10_{name}" / "evals" / "TOFU_EVAL.json"
        results[name] = Result(path, dict(zip(INPUTS, values, strict=True)), {}, None, False)
    target, retain = results.pop("full"), results.pop("retain90")
    return list(results.values()), retain, target
