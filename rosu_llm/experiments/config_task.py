"""A task described by a configuration of ``rosu train``, and what makes two configurations the same.

Problem: ``--rho 0.4``, ``rho: 0.4`` in a file and the default are one setting written in three ways; if each had a key
of its own, the row that several grids share would run several times. Solution: values take the type of their field,
the package's own settings are written out with their defaults, and those of ``TrainingArguments`` only where they
differ from theirs (its list of fields changes between versions of transformers).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import TrainingArguments

from ..data.sources import local_file
from ..errors import DataError
from ..evaluation.memorisation import degenerate_share, membership_auc, score
from ..recipes.next_token import chat_format, sample_reader
from ..recipes.prepare import Loaded, load, prepare
from ..recipes.settings import WITHOUT_OUTPUT, Recipe, RunArguments, build, type_values, without_unseen
from ..training.method_checks import NAMES
from .attempt import ANSWER_COLUMNS, Started, Steps

#: Without influence on the figures, or part of the key elsewhere.
_APART = {
    *(*WITHOUT_OUTPUT, "seed", "output_dir", "overwrite"),
    *("save_steps", "save_total_limit", "logging_dir", "run_name"),
}
_REPRESENTATION = {"loss_forget": "forget loss", "loss_retain": "retain loss"}


class ConfigTask:
    """Model, forget and retain data as ``rosu train`` loads them.

    Next-token runs are measured by what the model still answers (and by the loss attack, where there is held-out
    data); representation-level runs by both losses, averaged over the last tenth of the steps because the noise differs
    from step to step.

    Args:
        values: the configuration.
        retain_model: a model that never learned the forget data, to compare with.
        unseen_data: never-trained samples for the attack, in place of ``holdout_data``, whose losses a bounded or
            calibrated run has seen.
    """

    digits = 3
    notes: tuple[str, ...] = ()
    references: Mapping[str, str] = {"before": "before"}

    def __init__(
        self, values: Mapping[str, Any], *, retain_model: str | None = None, unseen_data: str | None = None
    ) -> None:
        recipe = build({**values, **WITHOUT_OUTPUT, "output_dir": "unused"})
        arguments, config = recipe
        arguments.check_run()
        self.base: Mapping[str, Any] = dict(values)
        self._retain_model, self._unseen_data = retain_model, unseen_data
        if retain_model is not None:
            self.references = {"before": "before", "retain_only": "retain-only (gold)"}
        if recipe.representation_level:
            self.columns: Mapping[str, str] = _REPRESENTATION
            self.digits = 5  # losses of activations have no natural scale; those of retain data start at zero
            self.references = {}
            self.plotted: tuple[str, ...] = tuple(_REPRESENTATION)
            return
        unseen = unseen_data or arguments.holdout_data
        self.columns = dict(list(ANSWER_COLUMNS.items())[: None if unseen else -2])
        if retain_model is not None:
            self.columns = {**self.columns, "degenerate": "degenerate"}
        self.plotted = ("retain_em", "forget_em", *(["mia_auc"] if unseen else []))
        seen = [name for name in ("calibrate", "forget_until") if getattr(config, name) == "holdout"]
        if seen and not unseen_data:
            self.notes = (f"The attack's non-members are those that {seen[0]}: holdout has seen the loss of.",)

    def identity(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        always = ("model_name_or_path", "forget_data", "retain_data", "holdout_data")
        contents = {name: _contents(settings.get(name)) for name in always}
        own = {"retain_model": self._retain_model, "unseen_data": self._unseen_data}
        names = ("alternates", "refusals", "base_model", "budget_data", "memory_file")
        own |= {name: settings.get(name) for name in names}
        return {"task": "config", **contents, **{name: _contents(value) for name, value in own.items() if value}}

    def reference_seeds(self, seeds: Sequence[int]) -> list[int]:
        return [0]  # the model as it was loaded has no seed

    def reference_settings(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        names = {f.name for f in dataclasses.fields(RunArguments)}
        return {k: v for k, v in settings.items() if k in names and not k.startswith(("lora_", "retain_per_"))}

    def refer(self, name: str, seed: int, steps: Steps) -> Started:
        own = {"model_name_or_path": self._retain_model} if name == "retain_only" else {}
        recipe = build({**without_unseen(self.base), **own, **WITHOUT_OUTPUT, "output_dir": "unused"})
        loaded = load(recipe)
        model = loaded.model.to(recipe.config.device)
        return Started(None, lambda: self._measure(model, recipe, loaded))

    def start(self, values: Mapping[str, Any], seed: int, folder: Path, steps: Steps) -> Started:
        prepared = prepare(build({**values, **WITHOUT_OUTPUT, "seed": seed, "output_dir": str(folder)}))
        recipe, trainer = prepared.recipe, prepared.trainer
        if recipe.representation_level:
            return Started(trainer, lambda: _final_losses(trainer.state.log_history))
        return Started(trainer, lambda: self._measure(trainer.model, recipe, prepared.loaded))

    def _measure(self, model: Any, recipe: Recipe, loaded: Loaded) -> dict[str, float]:
        unseen, tokenizer, size = loaded.holdout, loaded.tokenizer, recipe.config.per_device_eval_batch_size
        if self._unseen_data is not None:
            form = chat_format(recipe.arguments, tokenizer)
            unseen = sample_reader(recipe.arguments, tokenizer, form)(self._unseen_data)
        forget = getattr(loaded.forget, "samples", loaded.forget)  # without third answers
        parts = {"forget": forget, "retain": loaded.retain, "holdout": unseen}
        scores = {
            name: score(model, part, pad_token_id=tokenizer.pad_token_id, batch_size=size)
            for name, part in parts.items()
            if part is not None
        }
        result: dict[str, float] = {}
        for key, own in scores.items():
            nll = float(own.nll.mean())
            result |= {f"{key}_prob": own.probability, f"{key}_em": own.exact_match, f"{key}_loss": nll}
        if "holdout" in scores:
            result["mia_auc"] = membership_auc(scores["forget"].nll, scores["holdout"].nll)
        if self._retain_model is not None:
            result["degenerate"] = degenerate_share(model, forget, tokenizer)
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


def known_settings(values: Mapping[str, Any]) -> set[str]:
    """Names a grid may vary, for the kind of run that ``values`` describe."""
    chosen, _ = type_values(values)
    return {f.name for cls in (RunArguments, chosen) for f in dataclasses.fields(cls) if f.init}


def complete(values: Mapping[str, Any]) -> dict[str, Any]:
    """The canonical settings; unknown names and values of the wrong type are refused, impossible ones are not."""
    chosen, typed = type_values(values)
    theirs = field_defaults(TrainingArguments)
    ours = {**field_defaults(RunArguments), **field_defaults(chosen)}
    ours = {name: value for name, value in ours.items() if name not in theirs}
    result = dict(ours)
    for name, value in typed.items():
        default = ours.get(name, theirs.get(name))
        if isinstance(default, float) and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)  # YAML reads 1 as an integer
        if name in ours or value != default:
            result[name] = as_number(name, value)
    return {name: value for name, value in sorted(result.items()) if name not in _APART}


def typed_setting(name: str, value: Any, base: Mapping[str, Any]) -> Any:
    """``value`` as the setting ``name`` of a run with the settings ``base`` takes it."""
    typed = type_values({**base, name: value})[1][name]
    return value if name == "method" else as_number(name, typed)  # one named after a loss stays that


def as_number(name: str, value: Any) -> Any:
    """Numbers as numbers, also in the fields that take a name or a number and therefore hold text."""
    try:
        return float(value) if isinstance(value, str) and name in NAMES else value
    except ValueError:
        return value


def field_defaults(cls: type) -> dict[str, Any]:
    """The default of every field of a dataclass that has one."""
    fields = dataclasses.fields(cls)
    made = {f.name: f.default_factory() for f in fields if f.default_factory is not dataclasses.MISSING}
    return {f.name: f.default for f in fields if f.default is not dataclasses.MISSING} | made
