"""MUSE's figures of a model beside those of the retain and the initial model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..evaluation.muse.evaluate import DOCUMENT, FILES
from ..evaluation.muse.run import MuseOutput
from ..files import read_json
from .blocks import Row, Section, Table, TableCell, Text
from .writers.markdown import section as markdown

#: Metric → heading; memorisation and attacks behind them.
_COLUMNS = {
    "forget_verbmem_ROUGE": "VerbMem ↓",
    "forget_knowmem_ROUGE": "KnowMem ↓",
    "retain_knowmem_ROUGE": "KnowMem, retain ↑",
    "privleak": "PrivLeak → 0",
    "extraction_strength": "ES ↓",
    "exact_memorization": "EM ↓",
    "mia_min_k": "Min-K AUC",
    "mia_min_k_plus_plus": "Min-K++ AUC",
    "mia_loss": "LOSS AUC",
    "mia_zlib": "ZLib AUC",
}
_NOTE = (
    "ROUGE-L F1 of continued passages (VerbMem) and of answers (KnowMem); PrivLeak = 100·(r − a)/(1 − r) with a the "
    "Min-K AUC of the model and r of the retain model (0.5 where it is not given)."
)


def muse_section(document: Mapping[str, Any], references: Mapping[str, Mapping[str, float]] | None = None) -> Section:
    """One table: the references, then the model."""
    rows = {**(references or {}), Path(str(document["name"])).name: document["figures"]}
    keys = [key for key in _COLUMNS if any(key in figures for figures in rows.values())]
    made = tuple(
        Row(name, tuple(TableCell(figures.get(key)) for key in keys), reference=name in (references or {}))
        for name, figures in rows.items()
    )
    columns = tuple(_COLUMNS[key] for key in keys)
    table = Table(columns, made, heading="model", caption=f"MUSE {document['split']}", digits=3, notes=(_NOTE,))
    limit = document["conditions"].get("limit")
    trial = [Text(f"A trial: the first {limit} rows of each set.")] if limit else []
    return Section("muse", f"MUSE {document['split']}", [*trial, table])


def muse_page(output: MuseOutput) -> str:
    """The section of what an evaluation left, as markdown."""
    names = {"initial": output.target, "retain": output.retain}
    references = {name: _figures(path) for name, path in names.items() if path is not None}
    return markdown(muse_section(read_json(output.out / DOCUMENT), references)) + f"\nwrote {output.out / FILES[0]}\n"


def _figures(path: Path) -> dict[str, float]:
    """The aggregates of a result file, ours or OpenUnlearning's."""
    content = read_json(path / FILES[0] if path.is_dir() else path)
    values = {name: found.get("agg_value") for name, found in content.items() if isinstance(found, dict)}
    return {name: float(value) for name, value in values.items() if isinstance(value, int | float)}
