"""Several results: find them below folders, and their references beside them; check that they are comparable."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...errors import DataError
from ...files import read_json
from .document import FILES, REFERENCES, Entry
from .metrics import DERIVED
from .questions import TofuQuestions
from .results import Result, check_current, read_result

#: What results in one table must share: attribute of ``Result`` → its name in messages.
_SHARED = dict(split="forget split", model="model", architecture="architecture", questions="number of forget questions")

logger = logging.getLogger(__name__)


def find_results(path: Path, *, every_checkpoint: bool = False) -> list[Path]:
    """The result files at ``path``: itself, or of each run below it the final one (else its last checkpoint's).

    Of the two files that lie side by side, the one with figures per question is taken. ``src/eval.py`` writes to
    ``saves/eval/RUN`` unless told otherwise, so a run ``saves/unlearn/RUN`` is also looked for there.
    """
    if path.is_file():
        fuller = path.with_name(FILES[0])
        return [fuller if path.name in FILES and fuller.is_file() else path]
    if not path.is_dir():
        raise DataError(f"{path} does not exist. Give run folders such as saves/unlearn/RUN, or result files.")
    found = {file.parent for name in FILES for file in path.rglob(name)}
    found = {folder for folder in found if REFERENCES not in folder.relative_to(path).parts}
    runs = {folder for folder in (path, *path.iterdir()) if folder.absolute().parent.name == "unlearn"}
    beside = {run: run.absolute().parents[1] / "eval" / run.absolute().name for run in runs if run.is_dir()}
    found |= {there for there in beside.values() if any((there / name).is_file() for name in FILES)}
    if not found:
        raise _nothing_there(path)
    places: dict[tuple[Path, str], dict[float, Path]] = {}
    for folder in sorted(found):
        file = next(folder / name for name in FILES if (folder / name).is_file())
        probe = Result(file)
        step = math.inf if probe.checkpoint is None else probe.checkpoint
        kind = "evals" if probe.run != folder.absolute() and folder.name == probe.run.name else folder.name
        steps = places.setdefault((probe.run, kind), {})
        if step not in steps or folder.name.startswith("evals"):  # before saves/eval/RUN
            steps[step] = file
    chosen: list[Path] = []
    for steps in places.values():
        chosen += [steps[step] for step in sorted(steps)] if every_checkpoint else [steps[max(steps)]]
    return chosen


def _nothing_there(path: Path) -> DataError:
    others = sorted({file.name.removesuffix("_EVAL.json") for file in path.rglob("*_EVAL.json")})
    if others:
        return DataError(
            f"{path} holds results of {', '.join(others)}; Mem, Priv and Util are scores of TOFU, and this table is "
            "TOFU's. Read the other benchmark's *_SUMMARY.json."
        )
    return DataError(
        f"{path} holds no {' or '.join(FILES)}: evaluate its model with OpenUnlearning's src/eval.py, for a run with "
        "experiment=eval/tofu/rosu task_name=RUN."
    )


#: Whether a reference's results are of the same choice of questions.
Fits = Callable[[Result], bool]


def without(held_out_questions: int | None) -> Fits:
    """Those whose attacks left out as many held-out questions."""
    return lambda result: result.set_aside == (held_out_questions or 0)


def with_non_members_of(runs: Sequence[Result]) -> Fits:
    """Those whose attacks had as many non-members as those of the runs, or left out as many where one does not tell."""
    counts = {count for run in runs for count in run.non_members.values()}
    aside = {run.set_aside for run in runs}

    def fits(result: Result) -> bool:
        own = {*result.non_members.values()}
        return bool(own & counts) if own and counts else result.set_aside in aside

    return fits


def find_reference(path: Path, split: str | None, fits: Fits) -> Path:
    """The result of a reference model at ``path``; if there are several, the one for ``split`` that fits."""
    files = find_results(path)
    if len(files) == 1:
        return files[0]
    fitting = [read_result(file) for file in files if Result(file).split == split]
    merits = [(fits(result), len(result.figures)) for result in fitting]
    best = [result for result, merit in zip(fitting, merits, strict=True) if merit == max(merits)]
    if len(best) != 1:
        raise DataError(
            f"{path} holds {len(files)} results, and {len(best) or 'none'} of them fit {split or 'the runs'}: "
            f"name one, such as {best[0].path if best else files[0]}."
        )
    return best[0].path


def references_beside(results: Sequence[Result]) -> tuple[Path | None, Path | None]:
    """Where OpenUnlearning keeps the results of the retain and the initial model of these runs; None if not there."""
    first = next((result for result in results if result.run.parent.name == "unlearn"), None)
    share = re.fullmatch(r"forget(\d\d)", first.split or "") if first else None
    if first is None or first.model is None or share is None:
        return None, None
    names = (f"retain{100 - int(share[1]):02d}", "full")
    places = [first.run.parents[1] / "eval" / f"tofu_{first.model}_{name}" for name in names]
    found = [place if any(file for name in FILES for file in place.rglob(name)) else None for place in places]
    return found[0], found[1]


def check_comparable(results: Sequence[Result]) -> None:
    """Raise unless all results have the same split, model and number of forget questions, where these are known."""
    for name, what in _SHARED.items():
        seen: dict[object, list[str]] = {}
        for result in results:
            if (value := getattr(result, name)) is not None:
                seen.setdefault(value, []).append(str(result.path))
        if len(seen) > 1:
            parts = [
                f"{value} in {paths[0]}" + (f" and {len(paths) - 1} more" if len(paths) > 1 else "")
                for value, paths in seen.items()
            ]
            raise DataError(
                f"These evaluations do not belong in one table: the {what} is {', but '.join(parts)}. "
                f"Give results of one {what} only, references included."
            )


def unique_labels(results: Iterable[Result]) -> list[str]:
    """One label per result; those that would be equal get their parent folder, then a number."""
    results = list(results)
    labels = [result.label for result in results]
    longer = [f"{result.run.parent.name}/{label}" for result, label in zip(results, labels, strict=True)]
    labels = [long if labels.count(label) > 1 else label for label, long in zip(labels, longer, strict=True)]
    return [
        f"{label} ({labels[: at + 1].count(label)})" if labels.count(label) > 1 else label
        for at, label in enumerate(labels)
    ]


def read_retain(
    source: Path | Mapping[str, Any] | None, metrics: Iterable[str], forget_split: str, questions: TofuQuestions
) -> dict[str, Entry]:
    """The entries that these metrics need; empty without a source.

    ``source`` is a result file, a folder with one, or the content of one; ``questions`` are those the model is asked.
    """
    if source is None:
        return {}
    asked, others = (len(questions.rows.get(name, ())) for name in ("forget", "holdout"))
    if isinstance(source, Mapping):
        name, content = "the retain model's results", dict(source)
    else:
        path = find_reference(source, forget_split, lambda result: others in result.non_members.values())
        name, content = str(path), read_json(path)
        check_reference(check_current(Result(path)), forget_split, questions)
    wanted = sorted({key for metric in metrics if metric in DERIVED and (key := DERIVED[metric].reference)})
    found = {key: content[key] for key in wanted if isinstance(content.get(key), dict)}
    if wanted and not found:
        raise DataError(
            f"{name} has none of {', '.join(wanted)} with values per question: give the TOFU_EVAL.json of the retain "
            "model (TOFU_SUMMARY.json has means only)."
        )
    for key in wanted:
        if key not in found:
            logger.warning("%s has no %s: what is made from it stays as without --retain.", name, key)
    for key, each in found.items():
        theirs = len((each.get("holdout") or {}).get("value_by_index", {})) or others
        if others and theirs != others:
            raise DataError(
                f"{name} is of other questions: {key} has {theirs} held-out ones, and {others} are asked here. Give "
                "the retain model's results with the same --held-out-questions (eval.tofu.held_out_questions)."
            )
        by_index = (each.get("forget") or each).get("value_by_index", {})
        if len(by_index) != asked:
            raise DataError(
                f"{name} is of other questions: {key} has {len(by_index)} of them, {forget_split} here has "
                f"{asked}. Give the retain model's results on the same split and --limit."
            )
        values = [each.get("agg_value"), *(one.get("score") for one in by_index.values())]
        if not all(isinstance(value, int | float) and math.isfinite(value) for value in values):
            raise DataError(f"{name}: {key} has values that are no numbers. Evaluate the retain model again.")
    return found


def check_reference(result: Result, forget_split: str, questions: TofuQuestions) -> None:
    """Raise for a reference model's results on another split or other questions, as far as they tell."""
    if result.split not in (None, forget_split):
        raise DataError(f"{result.path} is of {result.split}, not of {forget_split}: give results of the same split.")
    theirs = result.sidecar.get("conditions", {}).get("data", {})
    for config in questions.digests.keys() & theirs.keys():
        if questions.digests[config] != theirs[config]:
            raise DataError(
                f"{result.path} was made with other rows of {config}: evaluate the reference model on the same data "
                "and with the same --limit and --held-out-questions."
            )
    asked = len(questions.rows.get("forget", ()))
    if result.questions not in (None, asked):
        raise DataError(
            f"{result.path} is of {result.questions} forget questions, and {asked} are asked here: give results of the "
            "same split and --limit."
        )
