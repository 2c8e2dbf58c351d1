"""``rosu eval muse``: evaluate a model and the reference models it is compared with, one after the other."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from pathlib import Path

import torch

from ...compat import empty_device_cache
from ...data.chat_format import find_format
from ...files import weight_digests
from ..model_identity import Model, find_model, is_model
from ..processes import check_processes, from_first, joined_device
from ..tofu.run import Loading, load, load_tokenizer
from .evaluate import FILES, MuseSettings, evaluate_muse, read_reference


@dataclass(frozen=True, kw_only=True)
class MuseRequest:
    """What to evaluate; a reference is a model, which is evaluated as well, or results of one."""

    model: str
    settings: MuseSettings
    loading: Loading
    out: Path | None = None  # by default ``evals_muse`` in the model's own folder
    retain: str | None = None
    target: str | None = None
    overwrite: bool = False
    processes: int | None = None


@dataclass(frozen=True)
class MuseOutput:
    """Folders of results."""

    out: Path
    retain: Path | None = None
    target: Path | None = None


def run(request: MuseRequest) -> MuseOutput:
    """Evaluate the references that are models, then the model; what can be refused is refused before the first."""
    check_processes(request.processes, "eval muse")
    device = joined_device()
    model = from_first(lambda: find_model(request.model, adapters=True))
    found = {"retain": _find(request.retain), "target": _find(request.target)}
    for each in (model, *found.values()):
        if isinstance(each, Model):
            find_format(request.settings.chat_format, load_tokenizer(each, request.loading), each.source)
        elif each is not None:
            from_first(lambda path=each: read_reference(path))  # type: ignore[misc]
    split = request.settings.split.lower()
    out = request.out or _default(model, split)
    places: dict[str, Path | None] = {}
    for role, reference in found.items():
        place = reference if isinstance(reference, Path) else None
        if isinstance(reference, Model):
            place = out / "references" / reference.label
            _evaluate(reference, request, device, place, places.get("retain"))
        places[role] = place
    _evaluate(model, request, device, out, places.get("retain"))
    return MuseOutput(out, places["retain"], places["target"])


def _evaluate(which: Model, request: MuseRequest, device: torch.device, out: Path, retain: Path | None) -> None:
    model, tokenizer = load(which, request.loading, device)
    evaluate_muse(
        model,
        tokenizer,
        request.settings,
        out,
        retain=retain,
        overwrite=request.overwrite,
        name=which.source,
        weights=from_first(lambda: weight_digests(Path(which.source))) if which.local else None,
    )
    del model
    gc.collect()
    empty_device_cache()


def _find(text: str | None) -> Model | Path | None:
    """Results if ``text`` is a file or a folder with some, else a model."""
    if text is None:
        return None
    path = Path(text).expanduser()
    if path.is_file() or (path.is_dir() and not is_model(path) and (path / FILES[0]).is_file()):
        return path
    return from_first(lambda: find_model(text, adapters=True))


def _default(model: Model, split: str) -> Path:
    folder = Path(model.source).expanduser()
    return folder / f"evals_muse_{split}" if model.local else Path("rosu-eval") / f"{model.label}_muse_{split}"
