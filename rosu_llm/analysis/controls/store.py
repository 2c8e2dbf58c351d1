"""The cells of an audit, one small file each: a killed audit goes on with the first cell that is missing.

A cell is written whole, after it was measured. What determines its figures stands in ``conditions.json`` of the same
folder; an audit of another model, data or settings is refused there rather than mixed in.

What the controls' cells hold does not depend on the unlearned model. With ``--controls DIR`` they are kept there, and
the audits of ten unlearned models attack their controls once.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...errors import ConfigError
from ...evaluation.processes import from_first
from ...files import changed_conditions, check_writable, read_json, write_json

CONDITIONS = "conditions.json"


class AuditStore:
    """Cells in ``folder``, by name; with several processes the first one reads and writes for all.

    Cells of other conditions are refused when it is made; only :meth:`claim` changes anything, so that an audit with
    several stores is refused by any of them before another one lost its cells.

    Args:
        conditions: all that determines a cell's figures beside its name.
        overwrite: drop the cells of an audit under other conditions.
        flag: that of the folder, for errors.
    """

    def __init__(
        self, folder: Path, conditions: Mapping[str, Any], *, overwrite: bool = False, flag: str = "--out"
    ) -> None:
        self.folder, self._conditions, self._overwrite = folder, dict(conditions), overwrite
        from_first(lambda: self._check(flag))

    def _check(self, flag: str) -> None:
        check_writable(self.folder, f"The folder for results, {str(self.folder)!r} ({flag}),")
        path = self.folder / CONDITIONS
        if path.is_file() and not self._overwrite:
            changed = changed_conditions(read_json(path), self._conditions)
            if changed:
                way = "Pass --overwrite, or another --out." if flag == "--out" else f"Give another {flag}."
                raise ConfigError(f"{self.folder} holds cells of another audit: {'; '.join(changed)}. {way}")

    def claim(self) -> None:
        """Note the conditions, and drop the cells there are if they are to be overwritten."""
        from_first(self._claim)

    def _claim(self) -> None:
        if self._overwrite and (self.folder / CONDITIONS).is_file():
            # Aside first: a kill while files disappear must not leave old cells under new conditions.
            aside = self.folder.with_name(f".{self.folder.name}.old")
            shutil.rmtree(aside, ignore_errors=True)
            self.folder.rename(aside)
            shutil.rmtree(aside)
        write_json(self.folder / CONDITIONS, self._conditions)

    def get(self, name: str) -> dict[str, Any] | None:
        """The cell, if it was measured already."""
        path = self.folder / f"{name}.json"
        return from_first(lambda: read_json(path) if path.is_file() else None)

    def put(self, name: str, cell: Mapping[str, Any]) -> None:
        """Keep a measured cell."""
        from_first(lambda: write_json(self.folder / f"{name}.json", cell))
