"""A task and its scoring without a model: figures are functions of the settings, and every call is remembered."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import optuna

from rosu_llm.evaluation.tofu.summary import harmonic_mean
from rosu_llm.experiments.attempt import Started
from rosu_llm.experiments.sweep.sampler import make_pruner, make_sampler
from rosu_llm.experiments.sweep.scoring import SCORES
from rosu_llm.experiments.sweep.search import Sweep, run_sweep
from rosu_llm.experiments.sweep.space import Space, read_space
from rosu_llm.experiments.sweep.study import open_study, pin_conditions
from tests.experiments.stand_in import Silent, Trainer


class StandIn:
    """Mem = 1 − ρ, Util = ρ, Priv = ρ: Agg_MU is best at ρ = 0.5, Agg at a larger one."""

    name = "stand-in"
    definition = "Agg_MU = HM(1 − ρ, ρ)"
    glance_definition = "a guess"
    notes = ("invented",)
    headings: Mapping[str, str] = {name: name for name in SCORES}
    base: Mapping[str, Any] = {"method": "rosu", "learning_rate": 1e-3}
    columns: Mapping[str, str] = {"mem": "Mem", "util": "Util"}
    plotted = ("mem", "util")
    digits = 3
    references: Mapping[str, str] = {"before": "before"}

    def __init__(self, figures: Callable[[Mapping[str, Any]], dict[str, float]] | None = None) -> None:
        self.figures = figures or (lambda values: {"mem": 1 - values["rho"], "util": values["rho"]})
        self.glance: Callable[[Mapping[str, Any], int], float] = lambda values, step: 0.5
        self.during: Callable[[int], None] = lambda step: None
        self.trainers: list[Trainer] = []
        self.referred = 0

    def identity(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        return {"task": self.name}

    def reference_seeds(self, seeds: Sequence[int]) -> list[int]:
        return list(seeds)

    def reference_settings(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        return {}

    def refer(self, name: str, seed: int, steps: Any) -> Started:
        self.referred += 1
        return Started(None, lambda: {"mem": 0.0, "util": 1.0})

    def scores(self, figures: Mapping[str, float], references: Mapping[str, Any]) -> dict[str, float | None]:
        assert references["initial"] == {"mem": 0.0, "util": 1.0}
        mem, util = figures["mem"], figures["util"]
        priv = util**2
        values = (harmonic_mean((mem, util)), mem, util, priv, harmonic_mean((mem, util, priv)))
        return dict(zip(SCORES, values, strict=True))

    def start(self, values: Mapping[str, Any], seed: int, folder: Path, steps: Any) -> Started:
        trainer = Trainer(folder, self.during)
        self.trainers.append(trainer)
        return Started(trainer, lambda: self.figures(values), lambda: self.glance(values, trainer.steps))


SPACE: Space = read_space(None, ["rho=0.05..0.95"], StandIn.base)


def search(
    out: Path,
    task: StandIn,
    trials: int,
    *,
    sampler: str = "random",
    pruner: str = "none",
    keep: str = "best",
    space: Space = SPACE,
    seed: int = 0,
    observer: Silent | None = None,
) -> tuple[optuna.Study, str | None]:
    """Open the study in ``out`` and run it to ``trials``."""
    study = open_study(None, "s", out, create=True)
    conditions = {"space": space.as_dict(), "evaluation": task.identity({})}
    pin_conditions(study, conditions)
    study.pruner = make_pruner(pruner, (0.25, 0.5, 0.75))
    fractions = () if pruner == "none" else (0.25, 0.5, 0.75)
    sweep = Sweep(study, task, task, seed, space, conditions, out, trials, fractions=fractions, keep=keep)
    return study, run_sweep(sweep, make_sampler(sampler, space, seed), observer or Silent())


def states(study: optuna.Study) -> list[str]:
    return [trial.state.name for trial in study.get_trials(deepcopy=False)]


def rhos(study: optuna.Study) -> list[float]:
    """ρ of the finished trials, in order."""
    done = ("COMPLETE", "PRUNED")
    return [trial.params["rho"] for trial in study.get_trials(deepcopy=False) if trial.state.name in done]
