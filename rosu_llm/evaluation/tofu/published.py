"""Published models: 150 that others trained with OpenUnlearning on TOFU forget10, and their two references.

Every component of the scores is in the file, measured by a third party (``published/README.md`` says by whom). The
scores are formed from the components by our own definitions, so that a run of one's own can stand among them.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from ...errors import ConfigError
from .methods import best_by_agg_mu
from .results import Result
from .summary import TofuSummary, harmonic_mean

FILE = "tofu_llama-3.2-1b_forget10.csv"
SPLIT, MODEL = "forget10", "Llama-3.2-1B"
#: How their attack scores were made of AUCs.
TRANSFORM = "privleak"

#: Column → the columns whose harmonic mean it is.
PARTS: Mapping[str, tuple[str, ...]] = {
    "mem": ("one_minus_es", "one_minus_em", "one_minus_paraprob", "one_minus_truth"),
    "privacy_mia": ("s_loss", "s_zlib", "s_mink", "s_minkpp"),
    "model_utility": tuple(
        f"{data}_{part}" for data in ("retain", "ra", "wf") for part in ("q_prob", "q_rouge", "truth_ratio")
    ),
    "utility": ("model_utility", "fluency"),
}
#: As papers write the names of the file.
NAMES = {
    "altpo": "AltPO",
    "graddiff": "GradDiff",
    "idkdpo": "IdkDPO",
    "idknll": "IdkNLL",
    "npo": "NPO",
    "rmu": "RMU",
    "simnpo": "SimNPO",
    "undial": "UNDIAL",
    "full": "Initial",
    "retain": "Retain",
}


@dataclass(frozen=True)
class PublishedModel:
    """A model of the file.

    Attributes:
        name: as in the file; it tells the settings.
        method: as papers write it.
        reference: the initial or the retain model.
        summary: its five scores; Util is relative to the initial model.
        figures: all numbers of its row.
    """

    name: str
    method: str
    reference: bool
    summary: TofuSummary
    figures: Mapping[str, float]


@cache
def published_models() -> tuple[PublishedModel, ...]:
    """All of the file, the references first."""
    text = (files("rosu_llm.evaluation.tofu") / "published" / FILE).read_text(encoding="utf-8")
    rows = list(csv.DictReader(io.StringIO(text, newline="")))
    initial = next(row for row in rows if row["method"] == "full")
    scale = _mean(_numbers(initial), "utility")
    return tuple(_model(row, scale) for row in rows)


def _model(row: Mapping[str, str], scale: float) -> PublishedModel:
    figures = _numbers(row)
    mem, priv, raw = (_mean(figures, column) for column in ("mem", "privacy_mia", "utility"))
    util = raw / scale
    summary = TofuSummary(mem, priv, util, raw, harmonic_mean((mem, priv, util)), harmonic_mean((mem, util)))
    return PublishedModel(row["model"], NAMES[row["method"]], row["is_reference"] == "True", summary, figures)


def _numbers(row: Mapping[str, str]) -> dict[str, float]:
    texts = {key: value for key, value in row.items() if key not in ("model", "method", "epoch", "is_reference")}
    return {key: float(value) for key, value in texts.items() if value}


def _mean(figures: Mapping[str, float], column: str) -> float:
    """A column from its parts."""
    return harmonic_mean(_mean(figures, part) if part in PARTS else figures[part] for part in PARTS[column])


def best_published(models: Sequence[PublishedModel]) -> dict[str, PublishedModel]:
    """Of each method the model with the highest Agg_MU."""
    found = [model for model in models if not model.reference]
    best = best_by_agg_mu([model.method for model in found], [model.summary.agg_mu for model in found])
    return {method: found[at] for method, at in best.items()}


def fits(result: Result) -> bool:
    """Whether a result is of the split and model that the file is about."""
    return result.split == SPLIT and (result.model or "").startswith(MODEL)


def check_fits(results: Sequence[Result]) -> None:
    """Raise for results of another split or model, which do not belong among the published ones."""
    for result in results:
        if not fits(result):
            raise ConfigError(
                f"--published has models of {MODEL} on {SPLIT}, and {result.path} is of "
                f"{result.model or 'a model that is not recorded'} on {result.split or 'a split that is not recorded'}"
                ": nothing of it compares. Leave --published out."
            )
