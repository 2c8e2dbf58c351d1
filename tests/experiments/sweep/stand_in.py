"""A task without a model: figures are functions of the settings, and every call is remembered."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import optuna

from rosu_llm.evaluation.aggregates import harmonic_mean
from rosu_llm.experiments.sweep.sampler import make_pruner, make_sampler
from rosu_llm.experiments.sweep.search import Sweep, run_sweep
from rosu_llm.experiments.sweep.space import Space, read_space
from rosu_llm.experiments.sweep.study import agree, open_study
from rosu_llm.experiments.sweep.task import SCORES, Run

STEPS = 4


class Trainer:
    """Four steps that only tell the callbacks."""

    processing_class = None

    def __init__(self, folder: Path, during: Callable[[int], None]) -> None:
        self.args = SimpleNamespace(output_dir=str(folder))
        self.callbacks: list[Any] = []
        self.steps = 0
        self._during = during

    def add_callback(self, callback: Any) -> None:
        self.callbacks.append(callback)

    def remove_callback(self, callback: Any) -> None: ...

    def train(self) -> None:
        control = SimpleNamespace(should_training_stop=False)
        while self.steps < STEPS and not control.should_training_stop:
            self.steps += 1
            self._during(self.steps)
            for callback in self.callbacks:
                callback.on_step_end(None, SimpleNamespace(global_step=self.steps, max_steps=STEPS), control)

    def save_model(self) -> None:
        folder = Path(self.args.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text("{}")

    def create_model_card(self) -> None: ...

    def is_world_process_zero(self) -> bool:
        return False


class StandIn:
    """Mem = 1 − ρ, Util = ρ, Priv = ρ: Agg_MU is best at ρ = 0.5, Agg at a larger one."""

    name = "stand-in"
    definition = "Agg_MU = HM(1 − ρ, ρ)"
    glance_definition = "a guess"
    notes = ("invented",)
    headings: Mapping[str, str] = {name: name for name in SCORES}
    base: Mapping[str, Any] = {"method": "rosu", "learning_rate": 1e-3}

    def __init__(self, figures: Callable[[Mapping[str, Any]], dict[str, float]] | None = None) -> None:
        self.figures = figures or (lambda values: {"mem": 1 - values["rho"], "util": values["rho"]})
        self.glance: Callable[[Mapping[str, Any], int], float] = lambda values, step: 0.5
        self.during: Callable[[int], None] = lambda step: None
        self.trainers: list[Trainer] = []
        self.referred = 0

    def evaluation(self) -> dict[str, Any]:
        return {"task": self.name}

    def refer(self, steps: Any) -> dict[str, dict[str, float]]:
        self.referred += 1
        return {"initial": {"mem": 0.0, "util": 1.0}}

    def scores(self, figures: Mapping[str, float], references: Mapping[str, Any]) -> dict[str, float | None]:
        assert references["initial"] == {"mem": 0.0, "util": 1.0}
        mem, util = figures["mem"], figures["util"]
        priv = util**2
        values = (harmonic_mean((mem, util)), mem, util, priv, harmonic_mean((mem, util, priv)))
        return dict(zip(SCORES, values, strict=True))

    def start(self, values: Mapping[str, Any], references: Any, folder: Path, steps: Any) -> Run:
        trainer = Trainer(folder, self.during)
        self.trainers.append(trainer)
        return Run(trainer, lambda: self.figures(values), lambda: self.glance(values, trainer.steps))


class Silent:
    """A watcher that remembers the ends of trials."""

    def __init__(self) -> None:
        self.ends: list[Any] = []

    def started(self, number: int, settings: Mapping[str, Any]) -> None: ...

    def steps(self, done: int, total: int) -> None: ...

    def finished(self, trial: Any) -> None:
        self.ends.append(trial.state.name)


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
    watcher: Silent | None = None,
) -> tuple[optuna.Study, str | None]:
    """Open the study in ``out`` and run it to ``trials``."""
    study = open_study(None, "s", out, create=True)
    conditions = {"space": space.as_dict(), "evaluation": task.evaluation()}
    agree(study, conditions)
    study.pruner = make_pruner(pruner, (0.25, 0.5, 0.75))
    fractions = () if pruner == "none" else (0.25, 0.5, 0.75)
    sweep = Sweep(study, task, space, conditions, out, trials, fractions=fractions, keep=keep)
    return study, run_sweep(sweep, make_sampler(sampler, space, seed), watcher or Silent())


def states(study: optuna.Study) -> list[str]:
    return [trial.state.name for trial in study.get_trials(deepcopy=False)]


def rhos(study: optuna.Study) -> list[float]:
    """ρ of the finished trials, in order."""
    done = ("COMPLETE", "PRUNED")
    return [trial.params["rho"] for trial in study.get_trials(deepcopy=False) if trial.state.name in done]
