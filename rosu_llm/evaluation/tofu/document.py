"""The files of one TOFU evaluation, kept so that they survive a killed run.

``TOFU_EVAL.json`` (per question) and ``TOFU_SUMMARY.json`` (means only) have OpenUnlearning's layout. Our own
``rosu_eval.json`` beside them says which model, data and settings they are of; results of anything else are refused.
All files are rewritten whole after every finished pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict, cast

from ...errors import ConfigError
from ...files import changed_conditions, check_writable, read_json, write_json

FILES = ("TOFU_EVAL.json", "TOFU_SUMMARY.json")
SIDECAR = "rosu_eval.json"
REFERENCES = "references"  # folder below ``--out`` for results of reference models, which are no runs
SCHEMA = "rosu/tofu-eval/1"

#: One metric of TOFU_EVAL.json: ``agg_value`` and, for measured metrics, ``value_by_index``.
Entry = dict[str, Any]


class TofuConditions(TypedDict):
    """Everything that determines the figures: an evaluation is resumed only under equal conditions."""

    dtype: str
    model: str
    forget_split: str
    limit: int | None
    held_out_questions: int | None
    data: dict[str, str]  # file of questions → digest of its rows
    chat_format: dict[str, Any]
    max_length: int
    max_new_tokens: int


class TofuSidecar(TypedDict, total=False):
    """``rosu_eval.json``; empty beside results that something else wrote."""

    schema: str
    name: str
    family: str | None  # OpenUnlearning's name of the model
    architecture: str
    retain: str  # results that forget quality and privleak were compared with
    device: str
    attn_implementation: str | None
    versions: dict[str, str]
    fluency_model: str
    conditions: TofuConditions
    training: dict[str, Any]  # settings that made a model which is not kept
    weights: dict[str, str]  # file → digest, of a model that was loaded from a folder
    seconds: dict[str, float]  # pass → seconds over all processes


class TofuStore:
    """The results in one folder.

    Args:
        metrics: those that belong into the summary.
        sidecar: names and versions, for the record, and the conditions, which earlier results must share.
        overwrite: drop what is there.
        files: names of the results and their means; another benchmark has its own.
    """

    def __init__(
        self,
        folder: Path,
        metrics: Sequence[str],
        sidecar: TofuSidecar,
        *,
        overwrite: bool = False,
        files: tuple[str, str] = FILES,
    ) -> None:
        self.folder, self.metrics, self.files = folder, set(metrics), files
        self.entries: dict[str, Entry] = {}
        self.sidecar: TofuSidecar = {"schema": SCHEMA, **sidecar, "seconds": {}}
        self._replaces = overwrite  # whether the folder may hold results of something else
        check_writable(folder, f"The folder for results, {str(folder)!r} (--out; of a reference model its own),")
        if (folder / files[0]).is_file() and not overwrite:
            self._resume()

    def _resume(self) -> None:
        """Take over the results of an earlier run, unless they are of something else."""
        path, remedy = self.folder / SIDECAR, "Pass --overwrite, or another --out."
        if not path.is_file():
            raise ConfigError(
                f"{self.folder / self.files[0]} was not written by rosu (there is no {SIDECAR}). {remedy}"
            )
        earlier = cast(TofuSidecar, read_json(path))
        then, now = earlier.get("conditions", {}), self.sidecar["conditions"]
        files, then_files = now["data"], then.get("data", {})
        both = files.keys() & then_files.keys()  # a file that only one of the two runs read is no conflict
        before = {**{key: then.get(key) for key in now}, "data": {name: then_files[name] for name in both}}
        if changed := changed_conditions(before, {**now, "data": {name: files[name] for name in both}}):
            raise ConfigError(f"{self.folder} holds results of another evaluation: {'; '.join(changed)}. {remedy}")
        now["data"] = {**then_files, **files}
        self.sidecar = {**earlier, **self.sidecar, "seconds": earlier.get("seconds", {})}
        self.entries = read_json(self.folder / self.files[0])
        if (self.folder / self.files[1]).is_file():
            self.metrics |= read_json(self.folder / self.files[1]).keys()

    def put(self, entries: Mapping[str, Entry], part: str, seconds: float) -> None:
        """Add the metrics of a finished pass and write everything."""
        self.entries.update(entries)
        self.sidecar["seconds"][part] = round(seconds, 2)
        self.write()

    def write(self) -> dict[str, float]:
        """Write all files, each whole or as it was; returns the summary."""
        values = {name: self.entries[name]["agg_value"] for name in sorted(self.metrics) if name in self.entries}
        summary = {name: value for name, value in values.items() if value is not None}
        self.folder.mkdir(parents=True, exist_ok=True)
        if self._replaces:  # else old results would pass for this model's once the new sidecar is written
            for name in self.files:
                (self.folder / name).unlink(missing_ok=True)
            self._replaces = False
        write_json(self.folder / SIDECAR, self.sidecar)  # first: results without it belong to no model
        write_json(self.folder / self.files[0], dict(sorted(self.entries.items())))
        write_json(self.folder / self.files[1], summary)
        return summary
