"""What every audit of an unlearned model is asked, where its cells go, and what its document begins with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

from ... import __version__
from ...compat import installed_versions
from ...errors import ConfigError
from ...evaluation.tofu.run import Loading
from .models import FLAGS, UNLEARNED, AuditedModels
from .store import AuditStore

#: Is told what is counted, how many are done, and of how many.
Progress = Callable[[str, int, int], None]


class AuditDocument(TypedDict):
    """What the documents of all audits hold.

    Attributes:
        models: role → folder or hub id.
        weights: role → digests.
        conditions: all else that determines the figures.
        notes: what is missing, and what it would add.
    """

    schema: str
    models: dict[str, str]
    weights: dict[str, Any]
    conditions: dict[str, Any]
    notes: list[str]
    versions: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class AuditRequest:
    """Which models to attack, and where results go.

    Attributes:
        controls: folder for the controls' cells, shared with audits of other models; None keeps them in ``out``.
        loading: how models are loaded.
        overwrite: begin anew where ``out`` holds cells of other conditions; what is shared stays.
    """

    models: AuditedModels
    out: Path
    controls: Path | None = None
    loading: Loading
    overwrite: bool = False

    def check_place(self) -> None:
        """Raise where results would be written into the folder of a model that is audited."""
        for flag, place in (("--out", self.out), ("--controls", self.controls)):
            for role, model in self.models.by_role.items():
                for each in (model, model.base):
                    if place is None or each is None or not each.local:
                        continue
                    folder = Path(each.source).expanduser().resolve()
                    if place.resolve() == folder or folder in place.resolve().parents:
                        raise ConfigError(
                            f"{flag} {place} is in the folder of {FLAGS[role]}, which an audit does not write to: give "
                            f"another one, e.g. {flag} audits."
                        )
        if self.controls is None:
            return
        if set(self.models.by_role) == {UNLEARNED}:
            raise ConfigError(f"--controls {self.controls} has nothing to keep: give --retain, --target or both.")
        if self.controls.resolve() == self.out.resolve():
            raise ConfigError(f"--controls and --out are both {self.out}: give two folders, or leave --controls out.")

    def stores(self, *asked: tuple[str, Mapping[str, Any]]) -> list[dict[str, AuditStore]]:
        """For each folder of cells and its conditions: role → where its cells are.

        All in ``out``, or those of the controls in ``controls``. Nothing is changed unless all of them are usable.
        """
        weights = self.models.weights
        others = {role: value for role, value in weights.items() if role != UNLEARNED}
        found = []
        for cells, conditions in asked:
            own = AuditStore(self.out / cells, {"weights": weights, **conditions}, overwrite=self.overwrite)
            stores = dict.fromkeys(weights, own)
            if self.controls is not None:
                shared = AuditStore(self.controls / cells, {"weights": others, **conditions}, flag="--controls")
                stores |= dict.fromkeys(others, shared)
            found.append(stores)
        for stores in found:
            for store in dict.fromkeys(stores.values()):
                store.claim()
        return found

    def document(
        self, schema: str, conditions: Mapping[str, Any], gains: Mapping[str, str], *packages: str
    ) -> AuditDocument:
        """The beginning of a document; ``gains`` says what a control would add that was not given."""
        return {
            "schema": schema,
            "models": self.models.names,
            "weights": self.models.weights,
            "conditions": dict(conditions),
            "notes": self.models.absent(gains),
            "versions": {"rosu-llm": __version__, **installed_versions("torch", "transformers", *packages)},
        }
