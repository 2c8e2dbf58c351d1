"""The metrics by OpenUnlearning's names: what each is measured on, and how its figures per question become one.

A metric's entry has the layout of OpenUnlearning's result file: ``agg_value`` beside ``value_by_index``. Measured
metrics are made from what the model gave (``run.py``); the derived ones here from other entries.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...errors import unknown
from .figures import mean
from .summary import FLUENCY, MODEL_UTILITY, TRUTH_RATIO

Entry = dict[str, Any]
Entries = Mapping[str, Entry]

TINY = 1e-10  # OpenUnlearning's guard, for equal numbers
REFERENCE_AUC = 0.5  # of a retain model that nobody gave

logger = logging.getLogger(__name__)


class Answers(NamedTuple):
    """Which answers of which questions: a data set and the field of its rows."""

    dataset: str
    field: str


PROBABILITIES = {
    "forget_Q_A_Prob": Answers("forget", "answer"),
    "forget_Q_A_PARA_Prob": Answers("forget", "paraphrased_answer"),
    "forget_Q_A_PERT_Prob": Answers("forget", "perturbed_answer"),
    "retain_Q_A_Prob": Answers("retain", "answer"),
    "retain_Q_A_PARA_Prob": Answers("retain", "paraphrased_answer"),
    "retain_Q_A_PERT_Prob": Answers("retain", "perturbed_answer"),
    "ra_Q_A_Prob": Answers("ra", "answer"),
    "ra_Q_A_PERT_Prob": Answers("ra", "perturbed_answer"),
    "wf_Q_A_Prob": Answers("wf", "answer"),
    "wf_Q_A_PERT_Prob": Answers("wf", "perturbed_answer"),
}
MEMORISED = ("extraction_strength", "exact_memorization")
ATTACKS = ("mia_loss", "mia_zlib", "mia_min_k", "mia_min_k_plus_plus")
GENERATED = {"forget_Q_A_ROUGE": "forget", "retain_Q_A_ROUGE": "retain", "ra_Q_A_ROUGE": "ra", "wf_Q_A_ROUGE": "wf"}


@dataclass(frozen=True)
class Derived:
    """A metric made from the entries of others, in this order, and from the ``reference`` entry of the retain model."""

    needs: tuple[str, ...]
    make: Callable[[Sequence[Entry], Entry | None], Entry]
    reference: str | None = None


def entry(by_index: Mapping[int, Mapping[str, Any]], key: str) -> Entry:
    """Figures per question with the mean of those called ``key``."""
    return {"agg_value": mean([figures[key] for figures in by_index.values()]), "value_by_index": _text_keys(by_index)}


def attack_entry(forget: Sequence[float], holdout: Sequence[float]) -> Entry:
    """Area under the ROC curve of scores that are low for members: 1 when the forget set is known by heart."""
    from sklearn.metrics import roc_auc_score

    labels = [0] * len(forget) + [1] * len(holdout)
    auc = float(roc_auc_score(labels, [*forget, *holdout]))
    parts = {
        name: entry({at: {"score": score} for at, score in enumerate(scores)}, "score")
        for name, scores in (("forget", forget), ("holdout", holdout))
    }
    return {**parts, "auc": auc, "agg_value": auc}


def _truth_ratio(name: str) -> Callable[[Sequence[Entry], Entry | None], Entry]:
    """R = exp(−mean loss of the false answers) / p(true); for ``prob_mean`` p(true) / (p(true) + p(false))."""

    def make(entries: Sequence[Entry], _: Entry | None) -> Entry:
        true, false = (np.exp(-_per_question(each, "avg_loss", np.mean)) for each in entries)
        ratios = true / (true + false + TINY) if name == "prob_mean" else false / (true + TINY)
        by_index = {key: {"score": float(r)} for key, r in zip(entries[0]["value_by_index"], ratios, strict=True)}
        return {"agg_value": float(np.mean(_AGGREGATORS[name](ratios))), "value_by_index": by_index}

    return make


_AGGREGATORS: dict[str, Callable[[NDArray[np.float64]], NDArray[np.float64]]] = {
    "closer_to_1_better": lambda ratio: np.minimum(ratio, 1 / (ratio + TINY)),
    "true_better": lambda ratio: np.maximum(0, 1 - ratio),
    "prob_mean": lambda share: share,
}


def _normalised(entries: Sequence[Entry], _: Entry | None) -> Entry:
    """p(true) / (p(true) + Σ p(false))."""
    true, false = (_per_question(each, "prob", np.sum) for each in entries)
    shares = true / (true + false + TINY)
    by_index = {key: {"prob": float(p)} for key, p in zip(entries[0]["value_by_index"], shares, strict=True)}
    return {"agg_value": float(shares.mean()), "value_by_index": by_index}


def _harmonic(entries: Sequence[Entry], _: Entry | None) -> Entry:
    """Harmonic mean; 0 as soon as one value is."""
    from scipy.stats import hmean

    return {"agg_value": float(hmean([each["agg_value"] for each in entries]))}


def _forget_quality(entries: Sequence[Entry], retain: Entry | None) -> Entry:
    """p-value of the Kolmogorov-Smirnov test between the truth ratios of the model and of the retain model."""
    from scipy.stats import ks_2samp

    if retain is None:
        logger.warning("forget_quality needs the retain model's truth ratios (--retain): it stays empty.")
        return {"agg_value": None}
    return {"agg_value": float(ks_2samp(_scores(entries[0]), _scores(retain)).pvalue)}


def _privleak(entries: Sequence[Entry], retain: Entry | None) -> Entry:
    """100 · (r − a) / (1 − r), a the Min-K AUC of the model, r of the retain model."""
    if retain is None:
        logger.warning("privleak without the retain model's Min-K attack (--retain) compares with an AUC of 0.5.")
    other = 1 - (REFERENCE_AUC if retain is None else float(retain["agg_value"]))
    return {"agg_value": (1 - entries[0]["agg_value"] - other) / (other + TINY) * 100}


UTILITY = tuple(
    f"{dataset}_{figure}"
    for dataset in ("retain", "ra", "wf")
    for figure in ("Q_A_Prob" if dataset == "retain" else "Q_A_Prob_normalised", "Q_A_ROUGE", "Truth_Ratio")
)
_FORGET_PAIR = ("forget_Q_A_PARA_Prob", "forget_Q_A_PERT_Prob")
DERIVED = {
    "forget_truth_ratio": Derived(_FORGET_PAIR, _truth_ratio("closer_to_1_better")),
    TRUTH_RATIO: Derived(_FORGET_PAIR, _truth_ratio("prob_mean")),
    "retain_Truth_Ratio": Derived(("retain_Q_A_PARA_Prob", "retain_Q_A_PERT_Prob"), _truth_ratio("true_better")),
    "ra_Truth_Ratio": Derived(("ra_Q_A_Prob", "ra_Q_A_PERT_Prob"), _truth_ratio("true_better")),
    "wf_Truth_Ratio": Derived(("wf_Q_A_Prob", "wf_Q_A_PERT_Prob"), _truth_ratio("true_better")),
    "ra_Q_A_Prob_normalised": Derived(("ra_Q_A_Prob", "ra_Q_A_PERT_Prob"), _normalised),
    "wf_Q_A_Prob_normalised": Derived(("wf_Q_A_Prob", "wf_Q_A_PERT_Prob"), _normalised),
    MODEL_UTILITY: Derived(UTILITY, _harmonic),
    "forget_quality": Derived(("forget_truth_ratio",), _forget_quality, "forget_truth_ratio"),
    "privleak": Derived(("mia_min_k",), _privleak, "mia_min_k"),
}
COMPARED = tuple(name for name, derived in DERIVED.items() if derived.reference)  # with the retain model
METRICS = (*PROBABILITIES, *MEMORISED, *ATTACKS, *GENERATED, *DERIVED, FLUENCY)


def needed(metrics: Iterable[str]) -> set[str]:
    """The metrics together with those they are made from."""
    found: set[str] = set()
    waiting = list(metrics)
    while waiting:
        name = waiting.pop()
        if name not in METRICS:
            raise unknown("TOFU metric", name, METRICS)
        if name not in found:
            found.add(name)
            waiting += DERIVED[name].needs if name in DERIVED else ("forget_Q_A_ROUGE",) if name == FLUENCY else ()
    return found


def datasets_of(metrics: Iterable[str]) -> set[str]:
    """The data sets whose questions these metrics are measured on."""
    found: set[str] = set()
    for name in needed(metrics):
        if name in PROBABILITIES:
            found.add(PROBABILITIES[name].dataset)
        elif name in MEMORISED or name in ATTACKS:
            found |= {"forget", "holdout"} if name in ATTACKS else {"forget"}
        elif name in GENERATED:
            found.add(GENERATED[name])
    return found


def _per_question(each: Entry, key: str, several: Callable[..., Any]) -> NDArray[np.float64]:
    return np.array([several(figures[key]) for figures in each["value_by_index"].values()], dtype=np.float64)


def _scores(each: Entry) -> list[float]:
    return [figures["score"] for figures in each["value_by_index"].values()]


def _text_keys(by_index: Mapping[int, Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    return {str(at): figures for at, figures in by_index.items()}
