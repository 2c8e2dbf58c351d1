"""One result of a TOFU evaluation, ours or OpenUnlearning's: its figures, and which run, split and model it is of.

OpenUnlearning writes its files into ``checkpoint-N/evals`` of a run during training, and afterwards where it is told:
``saves/unlearn/RUN/evals`` by its scripts and our experiments, ``saves/eval/NAME`` by default and for reference models.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, cast

from ...errors import DataError
from ..model_identity import of_other_weights
from ..provenance import HydraRecord, read_hydra, read_record
from .document import FILES, SIDECAR, TofuSidecar
from .metrics import DERIVED
from .summary import ATTACKS, INPUTS, TRUTH_RATIO

FORGET_QUALITY = "forget_quality"  # part of no score here, but of OpenUnlearning's leaderboard

_CHECKPOINT = re.compile(r"checkpoint-(\d+)")
_NAME = re.compile(r"^tofu_(?P<model>.+?)_(?:full|retain\d\d|forget\d\d)(?:_|$)")
#: TOFU's held-out questions in the name of a source, and the first and last of the rows that it names.
_HELD_OUT = re.compile(r"(?:^|[:/])holdout(\d\d)(?![^./:\[])")
_ROWS = re.compile(r"\[(\d*):(\d*)\]$")
_OF_TOFU = re.compile(r"^(forget_(Q_A|truth_ratio|quality)|model_utility|(retain|ra|wf)_(Q_A|Truth))")


@dataclass(frozen=True)
class Result:
    """One model's evaluation; with the path of its file alone, it tells its run, split and model without being read."""

    path: Path
    figures: Mapping[str, float] = field(default_factory=dict)  # metric name → value, usable ones only
    unusable: Mapping[str, str] = field(default_factory=dict)  # metric name → why its value cannot be used
    questions: int | None = None  # how many forget questions were asked, where the file tells
    derived_truth_ratio: bool = False  # it was computed from the file's losses rather than read
    non_members: Mapping[str, int] = field(default_factory=dict)  # attack → how many held-out questions it had

    @cached_property
    def sidecar(self) -> TofuSidecar:
        """What ``rosu eval tofu`` recorded; empty when something else evaluated."""
        return cast(TofuSidecar, read_record(self.path.with_name(SIDECAR)))

    @cached_property
    def evaluation(self) -> HydraRecord:
        """OpenUnlearning's record of the evaluation."""
        return read_hydra(self.path.parent)

    @cached_property
    def training(self) -> HydraRecord:
        """OpenUnlearning's record of the run that made the model."""
        return read_hydra(self.run)

    @property
    def run(self) -> Path:
        """The run's folder."""
        folder = Path(os.path.abspath(self.path)).parent
        if folder.name.startswith("evals"):
            folder = folder.parent
        if _CHECKPOINT.fullmatch(folder.name):
            return folder.parent
        trained = folder.parents[1] / "unlearn" / folder.name if folder.parent.name == "eval" else folder
        return trained if trained.is_dir() else folder

    @property
    def checkpoint(self) -> int | None:
        """The step at which it was evaluated, when that was during training."""
        found = _CHECKPOINT.fullmatch(self.path.parent.parent.name)
        return int(found[1]) if found and self.path.parent.name.startswith("evals") else None

    @property
    def split(self) -> str | None:
        """The forget split, as recorded, else as the folder's name says."""
        if split := self.sidecar.get("conditions", {}).get("forget_split"):
            return str(split)
        for record in (self.evaluation, self.training):
            if recorded := record.get("eval.tofu.forget_split") or record.get("forget_split"):
                return str(recorded)
        for folder in (self.path.parent.name, self.run.name):
            if found := re.search(r"forget\d\d", folder):
                return found[0]
            if found := re.search(r"retain(\d\d)", folder):
                return f"forget{100 - int(found[1]):02d}"
        return None

    @property
    def model(self) -> str | None:
        """The model family by the name of its configuration, as recorded, else as the folder's name says."""
        named = _NAME.match(self.run.name)
        recorded = self.sidecar.get("family") or self.evaluation.choice("model") or self.training.choice("model")
        return recorded or (named["model"] if named else None)

    @property
    def architecture(self) -> str | None:
        """Kind and size of the model, where our evaluation recorded them."""
        return self.sidecar.get("architecture")

    @property
    def trainer(self) -> str | None:
        """The trainer's configuration, as recorded."""
        chosen = self.training.choice("trainer") or self.training.get("trainer.handler")
        return str(chosen) if chosen else None

    @cached_property
    def _settings(self) -> Mapping[str, Any]:
        """The settings of a run of ``rosu train``, from the sidecar or the folder of the results or of the model."""
        if known := self.sidecar.get("training"):
            return known
        model = Path(self.sidecar.get("name") or self.run)
        for folder in (self.run, model.parent if _CHECKPOINT.fullmatch(model.name) else model):
            if found := read_record(folder / "rosu_run.json").get("settings"):
                return cast(Mapping[str, Any], found)
        return {}

    @cached_property
    def _stops(self) -> Mapping[str, Any]:
        """How the training knew how far to forget → the target it was given."""
        found = {
            done: self.training.get(f"trainer.method_args.{setting}", self._settings.get(setting))
            for setting, done in (("calibrate", "calibrated"), ("forget_until", "bounded"))
        }
        return {done: value for done, value in found.items() if value not in (None, False, "off", "no")}

    @property
    def depth(self) -> str | None:
        """How the training knew how far to forget; None for the paper's protocol, which has no such thing."""
        kinds = {"holdout": "by held-out data", "base": "by its base model", "alternates": "by wrong answers"}
        said = [f"{done} {kinds.get(value, f'to a loss of {value}')}" for done, value in self._stops.items()]
        return ", ".join(said) or None

    @property
    def reuses_non_members(self) -> bool:
        """Whether its training looked at questions that its attacks take for unseen ones."""
        if "holdout" not in self._stops.values():
            return False
        given = self._settings.get("holdout_data")
        if given is None:  # OpenUnlearning's experiments have one number for training and evaluation
            return self.set_aside < (self.training.get("eval.tofu.held_out_questions") or 1)
        named = _HELD_OUT.search(str(given))
        if named is None:
            return False
        # 40 questions are one percent, and the smaller splits are the beginning of the larger ones
        some = _ROWS.search(str(given))
        start, end = (int(some[1] or 0), some[2]) if some else (0, None)
        end = min(int(end or 40 * int(named[1])), start + (self._settings.get("limit") or 4000))
        return start < 40 * int((self.split or "forget10")[-2:]) and end > self.set_aside

    @property
    def asked(self) -> Mapping[str, Any]:
        """The settings of its evaluation, as recorded."""
        asked = (self.evaluation if self.checkpoint is None else self.training).get("eval.tofu")
        return asked if isinstance(asked, dict) else {}

    @property
    def knows_all_metrics(self) -> bool:
        """Whether its evaluation was asked for all inputs of the summary."""
        return "Mem" in self.asked.get("metrics", ())

    @property
    def set_aside(self) -> int:
        """How many held-out questions its attacks left out because the training looked at them."""
        value = self.asked.get("held_out_questions") or self.sidecar.get("conditions", {}).get("held_out_questions")
        return value if isinstance(value, int) else 0

    @property
    def label(self) -> str:
        """The run's name without what all rows of a table share, and the checkpoint if it is one."""
        name = self.run.name
        name = name.removeprefix(f"tofu_{self.model}_{self.split}_") or name
        return name if self.checkpoint is None else f"{name}/checkpoint-{self.checkpoint}"


def read_result(path: Path) -> Result:
    """Read one file in either form."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not whole JSON ({error}): if its evaluation was interrupted, repeat it.") from None
    if not isinstance(content, dict) or not any(_OF_TOFU.match(key) for key in content):
        raise DataError(
            f"{path} is not a result of OpenUnlearning's TOFU evaluation: none of its metrics is in it. "
            f"Give a {' or '.join(FILES)}, or a folder with one."
        )
    figures: dict[str, float] = {}
    unusable: dict[str, str] = {}
    for name in (*INPUTS, FORGET_QUALITY):
        if name in content:
            entry = content[name]
            value, why = _usable(entry.get("agg_value") if isinstance(entry, dict) else entry, name, path)
            if value is None:
                unusable[name] = why
            else:
                figures[name] = value
    derived = None if TRUTH_RATIO in figures else _usable(_truth_ratio(content), TRUTH_RATIO, path)[0]
    if derived is not None:
        figures[TRUTH_RATIO] = derived
    return Result(path, figures, unusable, _count(content), derived is not None, _non_members(content))


def check_current(result: Result) -> Result:
    """Raise for results of other weights than lie beside them now, so that nobody takes them for this model's."""
    folder = result.path.parent
    folder = folder.parent if folder.name.startswith("evals") else folder
    if why := of_other_weights(result.sidecar.get("weights"), folder):
        raise DataError(f"{result.path} is no result of this model: {why}.")
    return result


def _usable(value: Any, name: str, path: Path) -> tuple[float | None, str]:
    """The value when it is a number in [0, 1] (all inputs are), or why there is none."""
    if value is None:
        return None, "null in the file"
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise DataError(f"{path}: {name} is {value!r}, not a number. Evaluate that metric again.")
    if not math.isfinite(value):
        return None, "not finite in the file"
    if not -1e-6 <= value <= 1 + 1e-6:
        raise DataError(f"{path}: {name} is {value}, outside [0, 1], so it is not TOFU's metric of this name.")
    return min(1.0, max(0.0, float(value))), ""


def _truth_ratio(content: Mapping[str, Any]) -> float | None:
    """Computed from the losses that other metrics left in the file; None for a summary, and without losses."""
    ratio = DERIVED[TRUTH_RATIO]
    with suppress(KeyError, TypeError, ValueError):
        return cast(float, ratio.make([content[need] for need in ratio.needs], None)["agg_value"])
    return None


def _count(content: Mapping[str, Any]) -> int | None:
    """How many forget questions the file has answers for."""
    for name in ("forget_truth_ratio", "forget_Q_A_PARA_Prob", "forget_Q_A_Prob", "extraction_strength"):
        by_index = content[name].get("value_by_index") if isinstance(content.get(name), dict) else None
        if isinstance(by_index, dict) and by_index:
            return len(by_index)
    return None


def _non_members(content: Mapping[str, Any]) -> dict[str, int]:
    """attack → the number of held-out questions it was measured with, where the file tells."""
    found = {}
    for name in ATTACKS.values():
        with suppress(KeyError, TypeError):
            found[name] = len(content[name]["holdout"]["value_by_index"])
    return found
