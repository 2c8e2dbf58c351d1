"""The runs named on the command line, told apart by label."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ...errors import DataError
from ...evaluation.collection import unique_labels
from ...evaluation.results import Result
from .demo_run import is_demo, read_demo
from .run import REPORTS, SWEEP, Run, read_run, read_sweep

_MADE_BY_RUNS = ("rosu_run.json", "trainer_state.json", "README.md", "config.json", "adapter_config.json", ".hydra")


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """Every run at ``paths``, in order; each folder once."""
    folders = list(dict.fromkeys(path.absolute() for path in paths))
    for folder in folders:
        _check(folder)
    plain = [folder for folder in folders if not is_demo(folder)]
    probes = [Result(folder / "evals" / "TOFU_EVAL.json", {}, {}, None, False) for folder in plain]
    names = dict(zip(plain, unique_labels(probes), strict=True))
    runs: list[Run] = []
    for folder in folders:
        if folder not in names:
            runs += read_demo(folder)
        else:
            read = read_sweep if (folder / REPORTS[SWEEP]).is_file() else read_run
            runs.append(read(folder, names[folder]))
    labels = [run.label for run in runs]
    return [
        run if labels.count(run.label) == 1 else replace(run, label=f"{run.folder.name}: {run.label}") for run in runs
    ]


def _check(folder: Path) -> None:
    if not folder.is_dir():
        raise DataError(f"{folder} is not a folder. Give output folders of rosu train, rosu demo or OpenUnlearning.")
    known = (*_MADE_BY_RUNS, *REPORTS.values())
    found = is_demo(folder) or any((folder / name).exists() for name in known)
    if not found and not any(folder.glob("evals*")) and not any(folder.glob("checkpoint-*")):
        raise DataError(
            f"{folder} holds nothing of a run (no rosu_run.json, trainer_state.json, evals, …). Give the run's folder."
        )
