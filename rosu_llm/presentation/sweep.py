"""What is written of a search: trials, table, frontier, and the recipe of the best trial."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from ..experiments.sweep.task import SELECTED_BY
from ..files import write_atomically, write_json
from .ablation import SUFFIXES
from .plots import PlotsUnavailableError
from .sweep_plots import frontier_plot
from .tables import Table, render

DIGITS = 3


def write(content: Mapping[str, Any], table: Table, out: Path) -> tuple[list[Path], str | None]:
    """Write everything; returns the files, and why there is no plot if so."""
    written = [write_json(out / "trials.json", content)]
    for form, suffix in SUFFIXES.items():
        written.append(out / f"table.{suffix}")
        write_atomically(written[-1], render(table, form, digits=DIGITS))
    if content["best"] is None:
        return written, None
    written.append(out / "best.yaml")
    write_atomically(written[-1], best_recipe(content, out))
    try:
        frontier_plot(content, out / "frontier.png")
    except PlotsUnavailableError as error:
        return written, str(error)
    return [*written, out / "frontier.png"], None


def best_recipe(content: Mapping[str, Any], out: Path) -> str:
    """The recipe with the best trial's settings, for ``rosu train --config``."""
    best = content["trials"][content["best"]]
    scores = ", ".join(f"{name} {best['scores'][name]:.4f}" for name in (SELECTED_BY, "Mem", "Util"))
    lines = [
        f"# Trial {best['number']} of study {content['study']}, the best of its trials by {SELECTED_BY}: {scores}."
    ]
    if "model_name_or_path" not in content["recipe"]:
        lines.append("# Found on the embedded people: add model_name_or_path, forget_data and retain_data of your own.")
    values = {**content["recipe"], **best["settings"], "seed": content["seed"], "output_dir": str(out / "best")}
    return "\n".join([*lines, yaml.safe_dump(values, sort_keys=False, allow_unicode=True)])
