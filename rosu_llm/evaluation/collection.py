"""Several results for one table: found below folders, checked to belong together, told apart by name."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path

from ..errors import DataError
from .results import FILES, Result


def find_results(path: Path, *, every_checkpoint: bool = False) -> list[Path]:
    """The result files at ``path``: itself, or of each run below it the final one (else its last checkpoint's).

    Where both forms lie side by side, the one with answers per question is taken: the other is an excerpt of it.
    """
    if path.is_file():
        fuller = path.with_name(FILES[0])
        return [fuller if path.name in FILES and fuller.is_file() else path]
    if not path.is_dir():
        raise DataError(f"{path} does not exist. Give run folders such as saves/unlearn/RUN, or result files.")
    folders = sorted({file.parent for name in FILES for file in path.rglob(name)})
    if not folders:
        raise DataError(f"{path} holds no {' or '.join(FILES)}: evaluate its model with OpenUnlearning's src/eval.py.")
    places: dict[tuple[Path, str], dict[float, Path]] = {}
    for folder in folders:
        file = next(folder / name for name in FILES if (folder / name).is_file())
        probe = Result(file, {}, {}, None, False)
        step = math.inf if probe.checkpoint is None else probe.checkpoint
        places.setdefault((probe.run, folder.name), {})[step] = file
    chosen: list[Path] = []
    for steps in places.values():
        chosen += [steps[step] for step in sorted(steps)] if every_checkpoint else [steps[max(steps)]]
    return chosen


def find_reference(path: Path, split: str | None) -> Path:
    """The one result of a reference model at ``path``: when it was evaluated for several splits, that of ``split``."""
    files = find_results(path)
    if len(files) > 1:
        fitting = [file for file in files if Result(file, {}, {}, None, False).split == split]
        if len(fitting) != 1:
            raise DataError(
                f"{path} holds {len(files)} results, and {len(fitting) or 'none'} of them fit {split or 'the runs'}: "
                f"name one, such as {files[0]}."
            )
        files = fitting
    return files[0]


def check_comparable(results: Sequence[Result]) -> None:
    """Raise unless all are of one split, one model and one number of forget questions, as far as known."""
    for what, values in (
        ("forget split", [result.split for result in results]),
        ("model", [result.model for result in results]),
        ("architecture", [result.architecture for result in results]),
        ("number of forget questions", [result.questions for result in results]),
    ):
        seen: dict[object, list[Result]] = {}
        for result, value in zip(results, values, strict=True):
            if value is not None:
                seen.setdefault(value, []).append(result)
        if len(seen) > 1:
            parts = [f"{value} in {_names(group)}" for value, group in seen.items()]
            raise DataError(
                f"These evaluations do not belong into one table: the {what} is {', but '.join(parts)}. "
                f"Give results of one {what} only, references included."
            )


def _names(group: Sequence[Result]) -> str:
    return str(group[0].path) + (f" and {len(group) - 1} more" if len(group) > 1 else "")


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
