"""A task described by a configuration of ``rosu train``: its model, its data, next-token or representation level."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..data.sources import local_file
from ..errors import DataError
from ..evaluation.memorisation import membership_auc, score
from ..recipes.loading import Loaded
from ..recipes.prepare import load, prepare
from ..recipes.settings import RunArguments, build
from .settings import FORCED
from .task import Measure, Steps, unlearn

_LANGUAGE = {
    "forget_prob": "forget prob",
    "forget_em": "forget EM",
    "retain_prob": "retain prob",
    "retain_em": "retain EM",
}
_HELD_OUT = {"holdout_em": "holdout EM", "mia_auc": "MIA AUC"}
_REPRESENTATION = {"loss_forget": "forget loss", "loss_retain": "retain loss"}


class ConfigTask:
    """Model, forget and retain data as ``rosu train`` loads them.

    Next-token runs are measured by what the model still answers (and by the loss attack, where there is held-out
    data); representation-level runs by both losses at the end, averaged over the last tenth of the steps because the
    noise differs from step to step.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        recipe = build({**values, **FORCED, "output_dir": "unused"})
        arguments, config = recipe
        arguments.check_run()
        self.base = dict(values)
        self.notes: tuple[str, ...] = ()
        if recipe.representation_level:
            self.columns: Mapping[str, str] = _REPRESENTATION
            self.digits = 5  # losses of activations have no natural scale; those of retain data start at zero
            self.references: Mapping[str, str] = {}
            self.plotted: tuple[str, ...] = tuple(_REPRESENTATION)
            return
        self.digits = 3
        self.columns = {**_LANGUAGE, **(_HELD_OUT if arguments.holdout_data else {})}
        self.references = {"before": "before"}
        self.plotted = ("retain_em", "forget_em", *(["mia_auc"] if arguments.holdout_data else []))
        if arguments.holdout_data and config.calibrate == "holdout":
            self.notes = ("The attack's non-members are those that calibrate: holdout has seen the loss of.",)

    def identity(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        names = ("model_name_or_path", "forget_data", "retain_data", "holdout_data")
        return {"task": "config", **{name: _contents(settings.get(name)) for name in names}}

    def reference_seeds(self, seeds: Sequence[int]) -> list[int]:
        return [0]  # the model as it was loaded has no seed

    def reference_settings(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        names = {f.name for f in dataclasses.fields(RunArguments)}
        return {k: v for k, v in settings.items() if k in names and not k.startswith(("lora_", "retain_per_"))}

    def refer(self, name: str, seed: int, steps: Steps) -> dict[str, float]:
        recipe = build({**self.base, **FORCED, "calibrate": "off", "output_dir": "unused"})
        loaded, config = load(recipe), recipe.config
        return _measure(loaded.model.to(config.device), loaded, config.per_device_eval_batch_size)

    def run(self, values: Mapping[str, Any], seed: int, folder: Path, *, keep: bool, steps: Steps) -> dict[str, float]:
        trainer, measure = self.prepare(values, seed, folder, steps)
        unlearn(trainer, keep=keep, steps=steps)
        return measure()

    def prepare(self, values: Mapping[str, Any], seed: int, folder: Path, steps: Steps) -> tuple[Any, Measure]:
        """The trainer of a cell before its first step, and what measures its model."""
        prepared = prepare(build({**values, **FORCED, "seed": seed, "output_dir": str(folder)}))
        trainer, size = prepared.trainer, prepared.recipe.config.per_device_eval_batch_size
        if prepared.recipe.representation_level:
            return trainer, lambda: _final_losses(trainer.state.log_history)
        return trainer, lambda: _measure(trainer.model, prepared.loaded, size)


def _measure(model: Any, loaded: Loaded, batch_size: int) -> dict[str, float]:
    pad = loaded.tokenizer.pad_token_id
    forget, retain, holdout = (
        None if part is None else score(model, part, pad_token_id=pad, batch_size=batch_size)
        for part in (loaded.forget, loaded.retain, loaded.holdout)
    )
    assert forget is not None
    assert retain is not None
    result = {
        "forget_prob": forget.probability,
        "forget_em": forget.exact_match,
        "retain_prob": retain.probability,
        "retain_em": retain.exact_match,
        "forget_loss": float(forget.nll.mean()),
        "retain_loss": float(retain.nll.mean()),
    }
    if holdout is not None:
        result |= {
            "holdout_em": holdout.exact_match,
            "holdout_loss": float(holdout.nll.mean()),
            "mia_auc": membership_auc(forget.nll, holdout.nll),
        }
    return result


def _final_losses(history: list[dict[str, float]]) -> dict[str, float]:
    entries = [entry for entry in history if "loss/retain" in entry]
    if not entries:
        raise DataError("No step was taken, so there is no loss to report: raise max_steps or num_train_epochs.")
    last = entries[-max(1, len(entries) // 10) :]
    result = {}
    for part in ("forget", "retain"):
        values = [entry[f"loss/{part}"] for entry in last if f"loss/{part}" in entry]
        if values:  # retain-only descent computes no forget loss
            result[f"loss_{part}"] = sum(values) / len(values)
    return result


def _contents(source: Any) -> Any:
    """A name, with what is behind it where that is local: digests of data files, sizes and times of a model's."""
    if isinstance(source, list):
        return [_contents(part) for part in source]
    if not isinstance(source, str):
        return source
    path = Path(source).expanduser()
    if not path.is_dir():
        path = local_file(source) or path
    if path.is_file():
        return [source, hashlib.sha256(path.read_bytes()).hexdigest()]
    if path.is_dir():
        files = sorted((p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in path.iterdir() if p.is_file())
        return [source, hashlib.sha256(json.dumps(files).encode()).hexdigest()]
    return source
