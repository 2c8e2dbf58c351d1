"""Which method made a run, told from what Hydra recorded; and the run by which each method is shown.

A method is shown by its run with the highest Agg_MU = HM(Mem, Util). Privacy scores need a model that never saw the
forget set. Outside a benchmark nobody has one, so a selection by privacy would not be available to a user.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from ...errors import DataError
from .results import Result

# A trailing _lr1e-5, _rho0.4, _alpha2 …: what sweeps append to a method's name.
_SETTING = re.compile(r"[_-][A-Za-z]+[_=]?\d+(\.\d+)?(e[+-]?\d+)?$")

#: Trainer and kind of forget answers → the name that papers use.
_KNOWN = {
    ("DPO", "with idk"): "IdkDPO",
    ("DPO", "with alternates"): "AltPO",
    ("GradDiff", "idk only"): "IdkNLL",
    ("GradDiff", "alternates only"): "AltNLL",
}


def method_of(label: str) -> str:
    """``ROSU_rho0.4_lr1e-5`` → ``ROSU``, for runs without a record of their trainer."""
    label = label.split("/", 1)[0]
    while (shorter := _SETTING.sub("", label)) not in (label, ""):
        label = shorter
    return label


def methods_of(results: Sequence[Result], labels: Sequence[str]) -> list[str]:
    """The method of each run: trainer, forget answers and loss, depth; the experiment where nothing else tells.

    Runs without a record are named by their label.
    """
    names = [_recorded(result) or _labelled(result, label) for result, label in zip(results, labels, strict=True)]
    experiments = [result.training.choice("experiment") for result in results]
    ambiguous = {name for name in names if len({e for n, e in zip(names, experiments, strict=True) if n == name}) > 1}
    return [
        f"{name} [{experiment or 'no experiment'}]" if name in ambiguous else name
        for name, experiment in zip(names, experiments, strict=True)
    ]


def _labelled(result: Result, label: str) -> str:
    return method_of(label) + (f" ({result.depth})" if result.depth else "")


def _recorded(result: Result) -> str | None:
    trainer = result.trainer
    if trainer is None:
        return None
    answers = _forget_answers(result)
    name = _KNOWN.get((trainer, answers))
    parts = [] if name or not answers else [answers]
    rule, loss = (result.training.get(f"trainer.method_args.{key}") for key in ("method", "forget_loss"))
    if isinstance(rule, str) and trainer.startswith("ROSU") and rule != "rosu":
        parts.append(f"method={rule}")
    if isinstance(loss, str) and loss.lower() not in ("nll", "representation") and loss.lower() not in trainer.lower():
        parts.append(loss)
    if result.depth:
        parts.append(result.depth)
    return (name or trainer) + (f" ({', '.join(parts)})" if parts else "")


def _forget_answers(result: Result) -> str:
    """``with idk``, ``idk only``, the same of alternates, or nothing for the data set's own answers."""
    data = result.training.get("data.forget")
    for name, part in data.items() if isinstance(data, Mapping) else ():
        handler = result.training.get(f"data.forget.{name}.handler")
        kind = {"QAwithIdkDataset": "idk", "QAwithAlternateDataset": "alternates"}.get(str(handler))
        if kind and isinstance(part, Mapping):
            only = result.training.get(f"data.forget.{name}.args.return_original") is False
            return f"{kind} only" if only else f"with {kind}"
    return ""


def best_by_agg_mu(methods: Sequence[str], agg_mu: Sequence[float | None]) -> dict[str, int]:
    """For each method, the position of its best run; the first one when several are equal, or when none has Agg_MU."""
    best: dict[str, int] = {}
    for at, (method, value) in enumerate(zip(methods, agg_mu, strict=True)):
        shown = agg_mu[best[method]] if method in best else None
        if method not in best or (value is not None and (shown is None or value > shown)):
            best[method] = at
    return best


def check_selectable(method: str, value: float | None) -> None:
    """Raise for a selected run that has no Agg_MU."""
    if value is None:
        raise DataError(
            f"No run of {method} can be selected: Agg_MU is missing. Evaluate with experiment=eval/tofu/rosu, or show "
            "all runs without selecting."
        )


def describe(
    best: Mapping[str, int], methods: Sequence[str], labels: Sequence[str], agg_mu: Sequence[float | None]
) -> str:
    """The sentence under a table of selected runs."""
    parts = [f"{method}: {labels[at]} (of {methods.count(method)})" for method, at in best.items()]
    without = [method for method, at in best.items() if agg_mu[at] is None]
    text = "Selected by the highest Agg_MU; no privacy figure was used. " + "; ".join(parts) + "."
    if not without:
        return text
    return f"{text} Not selected but the first run, as none has Agg_MU: {', '.join(without)}."
