"""The models of an audit: the unlearned one, and its controls.

A model that never saw the data also learns it when shown it, loses precision when rounded, and guesses when asked often
enough. So every figure of an audit stands beside the same figure of the *retain* model, and the distance to the
*initial* model (before unlearning) tells how much there was to bring back. Both are optional; what is missing without
them is said.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import ConfigError, RosuError
from ...evaluation.model_identity import ADAPTER, Model, find_model
from ...files import read_json, weight_digests

UNLEARNED, RETAIN, INITIAL = "unlearned", "retain", "initial"
FLAGS = {UNLEARNED: "MODEL", RETAIN: "--retain", INITIAL: "--target"}


@dataclass(frozen=True)
class AuditedModels:
    """Role → model, the unlearned one first; roles whose model was not given are absent."""

    by_role: Mapping[str, Model]

    @property
    def weights(self) -> dict[str, Any]:
        """Role → which weights these are, to the byte; other files of a model's folder come and go."""
        return {role: _weights(model) for role, model in self.by_role.items()}

    @property
    def names(self) -> dict[str, str]:
        """Role → folder or hub id, as the user wrote it."""
        return {role: model.name for role, model in self.by_role.items()}

    def absent(self, gains: Mapping[str, str]) -> list[str]:
        """A sentence for every control that was not given, with what it would add."""
        return [
            f"Without {FLAGS[role]} there is no {role} model to compare with: it would add {gain}."
            for role, gain in gains.items()
            if role not in self.by_role
        ]


def find_models(unlearned: str, retain: str | None = None, initial: str | None = None) -> AuditedModels:
    """The models of these names, checked without loading them."""
    given = {UNLEARNED: unlearned, RETAIN: retain, INITIAL: initial}
    found = {role: _find(name, FLAGS[role]) for role, name in given.items() if name is not None}
    return AuditedModels(found)


def _weights(model: Model) -> Any:
    own = weight_digests(Path(model.source).expanduser()) if model.local else f"{model.source}@{model.revision}"
    return own if model.base is None else {"adapter": own, "base": _weights(model.base)}


def _find(name: str, flag: str) -> Model:
    try:
        model = find_model(name, adapters=True)
    except RosuError as error:
        if (Path(name).expanduser() / ADAPTER).is_file():
            raise ConfigError(
                f"{flag} {name!r} is an adapter, which is nothing without its base model, and that was not found: "
                f"{error} Put the base where {ADAPTER} says, or give a merged model."
            ) from error
        raise
    for each in (model, model.base):
        if each is not None and (method := _quantised(each)):
            raise ConfigError(
                f"{flag} {name!r} is stored quantised ({method}): its weights are rounded already, so there is "
                "nothing exact to round or to fine-tune. Give the model as it was before quantisation."
            )
    return model


def _quantised(model: Model) -> str | None:
    """How the weights are quantised, if they are."""
    path = Path(model.source).expanduser() / "config.json"
    if not model.local:
        from huggingface_hub import hf_hub_download

        path = Path(hf_hub_download(model.source, "config.json", revision=model.revision))
    if not path.is_file():  # an adapter's folder
        return None
    settings: Any = read_json(path).get("quantization_config")
    if not settings:
        return None
    return str(settings.get("quant_method", "unknown method")) if isinstance(settings, dict) else "unknown method"
