"""A comparison of methods that is fair: the same search for each, then seeds that the search has not seen.

Every contestant tries the same learning rates and lengths, as often as all others, each with values of its own
settings; the trial with the highest Agg_MU on the searched seed is run on fresh seeds. What counts there is the
distance to the model that never learned the forget data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any, TypedDict

import numpy as np

from ..errors import ConfigError, DataError, unknown
from ..training.presets import BOUND, PRESETS
from .ablate.cells import Selector, plan, run_cells, selector
from .ablate.grid import Grid, Variant
from .attempt import AttemptObserver, Figures, Record, Task
from .sweep.scoring import REFERENCE_NAMES, SELECTED_BY, Scores, Scoring, answers_scoring

SEARCH = "search"
#: The figures whose differences to the retrained model, added up, are the distance to it.
DISTANCE = ("forget_em", "mia_auc", "retain_prob", "holdout_em")
#: The paper's radii, and two around them.
_RADII = (0.05, 0.1, 0.2, 0.4, 0.8)


@dataclass(frozen=True)
class Contestant:
    """A method: fixed settings, and its own settings to search, each with the values to choose from."""

    label: str
    settings: Mapping[str, Any]
    knobs: Mapping[str, Sequence[Any]] = field(default_factory=dict)


_ROSU = {"method": "rosu", "amplify": "matched"}
_PULL = {"rho": (*_RADII, "auto"), "kappa": (0.25, 0.5, 1.0)}
_WEIGHT = {"retain_weight": (1.0, 2.0, 5.0)}

_REVERSED = {**BOUND, "forget_level": "token", "forget_beyond": "reverse"}

_METHODS: dict[str, Contestant] = {
    "rosu_paper": Contestant("ROSU, paper", PRESETS["paper"], {"rho": _RADII}),
    "rosu": Contestant("ROSU, matched pull", _ROSU, _PULL),
    "minmax": Contestant("min–max, paper's pull", {"method": "minmax", "amplify": "optimizer"}, {"rho": _RADII}),
    "no_projection": Contestant("ROSU without projection", {**_ROSU, "method": "minmax"}, _PULL),
    "uam": Contestant("UAM", {"method": "uam"}, {"rho": (*_RADII, 1.0)}),
    "uam_reflected": Contestant("UAM, reflected", {"method": "uam_reflected"}, {"rho": (*_RADII, 1.0)}),
    "graddiff": Contestant("GradDiff", {"method": "graddiff"}, _WEIGHT),
    "npo": Contestant("NPO", {"method": "graddiff", "forget_loss": "npo"}, {"npo_beta": (0.05, 0.1, 0.5), **_WEIGHT}),
    "simnpo": Contestant(
        "SimNPO", {"method": "graddiff", "forget_loss": "simnpo"}, {"simnpo_beta": (2.5, 3.5, 4.5), **_WEIGHT}
    ),
    "pcgrad": Contestant("PCGrad", {"method": "pcgrad"}, _WEIGHT),
    "orthograd": Contestant("OrthoGrad", {"method": "orthograd"}, {"orthograd_alpha": (0.3, 0.5, 0.7)}),
    "gu": Contestant("GU", {"method": "gu"}, {"metric": ("euclidean", "adam")}),
}
CONTESTANTS: dict[str, Contestant] = {
    name + suffix: Contestant(one.label + words, {**one.settings, **settings}, one.knobs)
    for name, one in _METHODS.items()
    for suffix, words, settings in (
        ("", "", {}),
        ("_bounded", ", bounded*", BOUND),
        ("_returned", ", returned*", {**BOUND, "forget_beyond": "return"}),
        ("_reversed", ", reversed*", _REVERSED),
        ("_odds", ", odds, reversed*", {**_REVERSED, "forget_loss": "odds"}),
    )
    if not (suffix == "_odds" and "forget_loss" in one.settings)  # NPO and SimNPO have their own
}
#: The preset of that name.
CONTESTANTS["rosu_paper_bounded"] = replace(CONTESTANTS["rosu_paper_bounded"], label="ROSU, recommended*")
#: Those that need nothing but forget, retain and held-out samples.
BENCHMARKED = tuple(CONTESTANTS)


def _published(label: str, loss: str, knobs: Mapping[str, Sequence[Any]]) -> Contestant:
    """A loss beside the retain loss, with the values that were searched when it was published."""
    return Contestant(label, {"method": "graddiff", "forget_loss": loss}, knobs)


_BETA = {"dpo_beta": (0.05, 0.1, 0.5), **_WEIGHT}
CONTESTANTS |= {
    "idk_nll": _published("IdkNLL", "idk_nll", _WEIGHT),
    "idk_dpo": _published("IdkDPO", "idk_dpo", _BETA),
    "altpo": _published("AltPO", "altpo", _BETA),
    "undial": _published("UNDIAL", "undial", {"undial_beta": (3.0, 10.0, 30.0), "retain_weight": (0.0, 1.0, 2.0, 5.0)}),
    "simnpo_published": _published(
        "SimNPO",
        "simnpo",
        {"simnpo_beta": (3.5, 4.5), "simnpo_delta": (0.0, 1.0), "forget_weight": (0.125, 0.25)},
    ),
    # all parameters, the activations of one layer at the answers' tokens; which layer belongs to the model
    "rmu": Contestant(
        "RMU",
        {
            "method": "graddiff",
            "forget_loss": "rmu",
            "retain_loss": "representation",
            "reduction": "rmu",
            "answers_only": True,
            "trainable_parameters": None,
        },
        {"steering": (2.0, 10.0), **_WEIGHT},
    ),
    "wga": _published("WGA", "wga", {"wga_beta": (0.5, 1.0, 2.0), **_WEIGHT}),
    "satimp": _published(
        "SatImp", "satimp", {"satimp_beta1": (5.0,), "satimp_beta2": (1.0,), "forget_weight": (0.1, 1.0), **_WEIGHT}
    ),
}


class ContestEntry(TypedDict):
    """One contestant: every trial of its search, the settings that were selected, and what fresh seeds gave.

    A trial holds ``settings``, ``scores`` and ``error``; an entry of ``per_seed`` the ``seed``, ``figures``,
    ``scores`` and ``distance``, or the ``error``.
    """

    name: str
    label: str
    trials: list[dict[str, Any]]
    selected: dict[str, Any]
    per_seed: list[dict[str, Any]]


class ContestDocument(TypedDict):
    """Everything that a comparison found; ``references`` holds the figures of both models by seed, and their scores."""

    task: dict[str, Any]
    common: dict[str, Any]
    search_seed: int
    seeds: list[int]
    definition: str
    references: dict[str, dict[str, dict[str, float]]]
    reference_scores: dict[str, dict[str, Scores]]
    entries: list[ContestEntry]


@dataclass(frozen=True)
class Contest:
    """What is compared and how.

    Attributes:
        common: settings that all contestants search, with the values to choose from.
        trials: settings that each tries on the seed ``search_seed``.
        seeds: those that are reported.
        own: further settings of single contestants, such as a file that only they read.
        values: setting → what contestants that search it try on this task, in place of their usual values.
    """

    names: Sequence[str]
    common: Mapping[str, Sequence[Any]]
    trials: int
    search_seed: int
    seeds: Sequence[int]
    own: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    values: Mapping[str, Sequence[Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in self.names:
            if name not in CONTESTANTS:
                raise unknown("contestant", name, CONTESTANTS)
        if self.search_seed in self.seeds:
            raise ConfigError(
                f"Seed {self.search_seed} is searched and reported: settings would be judged by what they were chosen "
                "on. Give others with --seeds."
            )
        if not 1 <= self.trials <= len(shared_draws(self.common, None)):
            raise ConfigError(
                f"{self.trials} trials cannot be {'taken' if self.trials < 1 else 'different'}: there are "
                f"{len(shared_draws(self.common, None))} combinations of {' and '.join(self.common)}."
            )


def shared_draws(common: Mapping[str, Sequence[Any]], count: int | None) -> list[dict[str, Any]]:
    """The first ``count`` combinations of common settings in an order that is the same for every contestant."""
    combinations = [dict(zip(common, values, strict=True)) for values in product(*common.values())]
    return [combinations[i] for i in np.random.default_rng(0).permutation(len(combinations))[:count]]


def search_variants(name: str, contest: Contest) -> list[Variant]:
    """The trials of a contestant: shared draws of the common settings, each with values of its own ones.

    A setting's values come in an order that depends on its name alone, none again before all were tried: contestants
    that choose a radius from the same values try the same one beside the same learning rate, and a bounded contestant
    tries what the unbounded one does.
    """
    one = CONTESTANTS[name]
    knobs = {key: _shuffled(key, contest.values.get(key, values)) for key, values in one.knobs.items()}
    variants = []
    for number, common in enumerate(shared_draws(contest.common, contest.trials)):
        own = {key: values[number % len(values)] for key, values in knobs.items()}
        fixed = {**one.settings, **contest.own.get(name, {})}
        variants.append(Variant(f"{one.label} #{number}", {**fixed, **common, **own}))
    return variants


def _shuffled(key: str, values: Sequence[Any]) -> list[Any]:
    return [values[i] for i in np.random.default_rng(list(key.encode())).permutation(len(values))]


def run_contest(
    task: Task, contest: Contest, out: Path, observer: AttemptObserver, scoring: Scoring | None = None
) -> ContestDocument:
    """Search, select, and run what was selected; whatever is in ``out/cells`` already is not run again.

    ``scoring`` is that of the task's figures, if they are not of answers under teacher forcing.
    """
    scoring = scoring or answers_scoring(task)
    searched = {name: search_variants(name, contest) for name in contest.names}
    grid = Grid(SEARCH, "Search", tuple(variant for own in searched.values() for variant in own))
    cells, rows = plan(task, [grid], [contest.search_seed])
    select = selector(rows, run_cells(cells, task, out, observer))
    seen = _references(task, select, [contest.search_seed])

    trials: dict[str, list[dict[str, Any]]] = {}
    for name, variants in searched.items():
        trials[name] = []
        for variant in variants:
            (record,) = select(SEARCH, variant.label).values()
            scores = None if record.error else scoring.scores(record.metrics, seen[record.seed])
            trials[name].append({"settings": dict(variant.settings), "scores": scores, "error": record.error})
    chosen = {name: _best(name, own) for name, own in trials.items()}

    final = Grid("final", "Fresh seeds", tuple(Variant(name, chosen[name]) for name in contest.names))
    cells, rows = plan(task, [final], contest.seeds)
    select = selector(rows, run_cells(cells, task, out, observer))
    references = _references(task, select, contest.seeds)
    entries: list[ContestEntry] = []
    for name in contest.names:
        per_seed = []
        for seed, record in select("final", name).items():
            known = references[seed]
            per_seed.append(_judged(record, known, None if record.error else scoring.scores(record.metrics, known)))
        label = CONTESTANTS[name].label
        entries.append(
            {"name": name, "label": label, "trials": trials[name], "selected": chosen[name], "per_seed": per_seed}
        )
    return {
        "task": task.identity(dict(task.base)),
        "common": {name: list(values) for name, values in contest.common.items()},
        "search_seed": contest.search_seed,
        "seeds": list(contest.seeds),
        "definition": scoring.definition,
        "reference_scores": {
            str(seed): {name: scoring.scores(own, both) for name, own in both.items()}
            for seed, both in references.items()
        },
        "references": {str(seed): {name: dict(own) for name, own in both.items()} for seed, both in references.items()},
        "entries": entries,
    }


def distance(figures: Figures, gold: Figures) -> float:
    """Σ |difference to the retrained model| over what is forgotten, recognised, kept and left alone."""
    return sum(abs(figures[name] - gold[name]) for name in DISTANCE)


def sign_flip_p(differences: Sequence[float]) -> float:
    """Two-sided p of the exact paired sign-flip test that the mean difference is zero.

    With n seeds it cannot be below 2/2ⁿ: .0625 for five.
    """
    observed = abs(sum(differences))
    sums = [abs(sum(s * d for s, d in zip(signs, differences, strict=True))) for signs in _signs(len(differences))]
    return sum(total >= observed * (1 - 1e-12) for total in sums) / len(sums)


def _signs(count: int) -> list[tuple[int, ...]]:
    return list(product((1, -1), repeat=count))


def ranking(entries: Sequence[ContestEntry]) -> list[ContestEntry]:
    """Entries that finished on all seeds, the closest to the retrained model first."""
    whole = [entry for entry in entries if all(own["error"] is None for own in entry["per_seed"])]
    return sorted(whole, key=lambda entry: mean(own["distance"] for own in entry["per_seed"]))


def paired_differences(one: ContestEntry, other: ContestEntry, figure: str = "distance") -> list[float]:
    """``figure`` of ``other`` minus that of ``one``, seed by seed."""
    values = [{own["seed"]: own[figure] for own in entry["per_seed"]} for entry in (one, other)]
    return [values[1][seed] - value for seed, value in values[0].items()]


def _best(name: str, trials: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    done = [trial for trial in trials if trial["scores"] is not None]
    if not done:
        raise DataError(f"No trial of {CONTESTANTS[name].label} worked; the last one: {trials[-1]['error']}")
    return dict(max(done, key=lambda trial: trial["scores"][SELECTED_BY])["settings"])


def _references(task: Task, select: Selector, seeds: Sequence[int]) -> dict[int, dict[str, Figures]]:
    """Seed → name in a study → figures; a model that has no seed is the same for all of them."""
    found: dict[int, dict[str, Figures]] = {seed: {} for seed in seeds}
    for name, label in task.references.items():
        records = select("", label)
        for seed in seeds:
            record = records.get(seed) or next(iter(records.values()))
            if record.error:
                raise DataError(f"{label}, seed {record.seed}, failed: {record.error}")
            found[seed][REFERENCE_NAMES[name]] = record.metrics
    return found


def _comparable(figures: Figures, known: Mapping[str, Figures]) -> bool:
    """Whether there is a retrained model, and all figures that make up the distance to it."""
    return "retain" in known and all(name in own for name in DISTANCE for own in (figures, known["retain"]))


def _judged(record: Record, known: Mapping[str, Figures], scores: Scores | None) -> dict[str, Any]:
    if scores is None:
        return {"seed": record.seed, "error": record.error}
    return {
        "seed": record.seed,
        "error": None,
        "figures": dict(record.metrics),
        "scores": scores,
        "distance": distance(record.metrics, known["retain"]) if _comparable(record.metrics, known) else None,
    }
