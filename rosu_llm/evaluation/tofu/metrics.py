"""The metrics by OpenUnlearning's names: what each is measured on, how its figures per question become one; settings.

A metric's entry has the layout of OpenUnlearning's result file: ``agg_value`` beside ``value_by_index``. Measured
metrics are computed from the model's outputs (``passes.py``), derived ones here from other entries.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...data.tofu import DEFAULT_SOURCE
from ...errors import ConfigError, unknown
from .document import Entry
from .generation import CLASSIFIER
from .summary import FLUENCY, MODEL_UTILITY, TRUTH_RATIO

TINY = 1e-10  # OpenUnlearning's guard, for equal numbers
REFERENCE_AUC = 0.5  # assumed where no retain model is given

logger = logging.getLogger(__name__)


class AnswerField(NamedTuple):
    """Which answers of which questions: a data set and the field of its rows."""

    dataset: str
    field: str


PROBABILITIES = {
    "forget_Q_A_Prob": AnswerField("forget", "answer"),
    "forget_Q_A_PARA_Prob": AnswerField("forget", "paraphrased_answer"),
    "forget_Q_A_PERT_Prob": AnswerField("forget", "perturbed_answer"),
    "retain_Q_A_Prob": AnswerField("retain", "answer"),
    "retain_Q_A_PARA_Prob": AnswerField("retain", "paraphrased_answer"),
    "retain_Q_A_PERT_Prob": AnswerField("retain", "perturbed_answer"),
    "ra_Q_A_Prob": AnswerField("ra", "answer"),
    "ra_Q_A_PERT_Prob": AnswerField("ra", "perturbed_answer"),
    "wf_Q_A_Prob": AnswerField("wf", "answer"),
    "wf_Q_A_PERT_Prob": AnswerField("wf", "perturbed_answer"),
}
MEMORISED = ("extraction_strength", "exact_memorization")
ATTACKS = ("mia_loss", "mia_zlib", "mia_min_k", "mia_min_k_plus_plus")
GENERATED = {"forget_Q_A_ROUGE": "forget", "retain_Q_A_ROUGE": "retain", "ra_Q_A_ROUGE": "ra", "wf_Q_A_ROUGE": "wf"}


@dataclass(frozen=True)
class Derived:
    """A metric computed from the entries of others, in this order, and the retain model's entry ``reference``."""

    needs: tuple[str, ...]
    make: Callable[[Sequence[Entry], Entry | None], Entry]
    reference: str | None = None


def entry(by_index: Mapping[int, Mapping[str, Any]], key: str) -> Entry:
    """Figures per question, with the mean of those called ``key``, of each question's answers first.

    Questions without a value do not count.
    """
    known = [np.mean(figures[key]) for figures in by_index.values() if figures[key] is not None]
    values = {str(at): figures for at, figures in by_index.items()}
    return {"agg_value": float(np.mean(known)) if known else None, "value_by_index": values}


def score_entry(scores: Iterable[float | None]) -> Entry:
    """The entry of one score per question."""
    return entry({at: {"score": score} for at, score in enumerate(scores)}, "score")


def attack_entry(forget: Sequence[float], holdout: Sequence[float]) -> Entry:
    """Area under the ROC curve of scores that are low for members: 1 if the forget set is memorised."""
    from sklearn.metrics import roc_auc_score

    labels = [0] * len(forget) + [1] * len(holdout)
    auc = float(roc_auc_score(labels, [*forget, *holdout]))
    return {"forget": score_entry(forget), "holdout": score_entry(holdout), "auc": auc, "agg_value": auc}


def _truth_ratio(name: str) -> Callable[[Sequence[Entry], Entry | None], Entry]:
    """R = exp(−mean loss of the false answers) / p(true); for ``prob_mean`` p(true) / (p(true) + p(false))."""

    def make(entries: Sequence[Entry], _: Entry | None) -> Entry:
        true, false = (np.exp(-losses) for losses in _paired(entries, "avg_loss", np.mean))
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
    true, false = _paired(entries, "prob", np.sum)
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
    ours, theirs = ([each["score"] for each in one["value_by_index"].values()] for one in (entries[0], retain))
    return {"agg_value": float(ks_2samp(ours, theirs).pvalue)}


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
    """The metrics together with those they are computed from."""
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
    wanted = needed(metrics)
    found = {which.dataset for name, which in PROBABILITIES.items() if name in wanted}
    found |= {dataset for name, dataset in GENERATED.items() if name in wanted}
    if wanted & {*MEMORISED, *ATTACKS}:
        found |= {"forget", "holdout"} if wanted & set(ATTACKS) else {"forget"}
    return found


def _paired(entries: Sequence[Entry], key: str, several: Callable[..., Any]) -> Iterator[NDArray[np.float64]]:
    """Each entry's values in the first entry's order of questions; ``several`` joins those of a question's answers."""
    order = list(entries[0]["value_by_index"])
    for each in entries:
        yield np.array([several(each["value_by_index"][at][key]) for at in order], dtype=np.float64)


@dataclass(frozen=True, kw_only=True)
class TofuSettings:
    """Settings of one evaluation; the defaults are OpenUnlearning's where they change numbers.

    Attributes:
        data: hub id or folder of TOFU.
        chat_format: see :func:`rosu_llm.data.chat_format.find_format`.
        batch_size: samples at once and per process, at most; further limited by
        batch_tokens: tokens at once, with padding and with what is generated.
        limit: first rows of each data set only, for a trial.
        held_out_questions: how many of the first held-out questions training looked at: no attack uses them.
        max_new_tokens: how long a generated answer may become.
        max_length: where formats without a chat template cut.
        fluency_model: hub id or folder of the classifier; None leaves fluency out.
        metrics: names out of ``METRICS``.
    """

    data: str = DEFAULT_SOURCE
    forget_split: str = "forget10"
    chat_format: str | None = None
    batch_size: int = 64
    batch_tokens: int = 8192
    limit: int | None = None
    held_out_questions: int | None = None
    max_new_tokens: int = 200
    max_length: int = 512
    fluency_model: str | None = CLASSIFIER
    metrics: tuple[str, ...] = METRICS

    def __post_init__(self) -> None:
        for name in ("batch_size", "batch_tokens", "max_new_tokens", "max_length", "limit", "held_out_questions"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ConfigError(f"--{name.replace('_', '-')} {value} must be at least 1.")
        needed(self.metrics)
