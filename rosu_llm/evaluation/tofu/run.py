"""``rosu eval tofu``: load and evaluate a model and the reference models it is compared with, one after the other."""

from __future__ import annotations

import gc
import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from ...compat import dtype_argument, empty_device_cache, load_causal_model
from ...data.chat_format import find_format
from ...errors import ConfigError
from ...files import weight_digests
from ..model_identity import TOKENIZER_FILES, Model, find_model, is_model
from ..processes import check_processes, from_first, joined_device
from .collection import check_reference, find_reference, without
from .document import FILES, REFERENCES
from .evaluate import evaluate_tofu
from .metrics import TofuSettings
from .questions import load_questions
from .results import check_current, read_result
from .summary import auc_transform


@dataclass(frozen=True, kw_only=True)
class Loading:
    """How weights are loaded: precision (``auto``: as stored), attention, whether code of the model may run."""

    dtype: str = "auto"
    attn_implementation: str | None = None
    trust_remote_code: bool = False


@dataclass(frozen=True, kw_only=True)
class TofuRequest:
    """What to evaluate; a reference is a model, which is evaluated as well and its results kept, or results of one."""

    model: str
    settings: TofuSettings
    loading: Loading
    out: Path | None = None  # folder for the results; by default ``evals`` in the model's own
    retain: str | None = None  # the reference never trained on the forget set
    target: str | None = None  # the reference before unlearning
    transform: str = "range"  # how an attack's AUC becomes a score
    overwrite: bool = False
    processes: int | None = None  # how many must take part, if that was asked for


@dataclass(frozen=True)
class TofuOutput:
    """Where the results are: the folder of the model's, and the files of the references'."""

    out: Path
    retain: Path | None = None
    target: Path | None = None


def run(request: TofuRequest) -> TofuOutput:
    """Evaluate the references that are models, then the model; whatever can be refused is refused before the first."""
    check_processes(request.processes, "eval tofu")
    for variable, layout in (("ACCELERATE_USE_FSDP", "FSDP"), ("ACCELERATE_USE_DEEPSPEED", "DeepSpeed")):
        if os.environ.get(variable, "false").lower() in ("1", "true"):
            raise ConfigError(f"Evaluation keeps the whole model on every process, not {layout}'s shards: use ddp.")
    auc_transform(request.transform)
    device = joined_device()
    settings = request.settings
    model = from_first(lambda: find_model(request.model, adapters=True))
    references = {
        role: from_first(partial(_find_reference, text, settings))
        for role, text in (("retain", request.retain), ("target", request.target))
        if text is not None
    }
    for each in (model, *references.values()):
        if isinstance(each, Model):
            find_format(settings.chat_format, load_tokenizer(each, request.loading), each.source)
        else:
            from_first(partial(_check_results, each, settings))
    results: dict[str, Path] = {}
    for role, reference in references.items():
        if isinstance(reference, Model):
            # one folder per split and choice of rows: in the model's own, or below --out where that is given
            chosen = {"limit": settings.limit, "heldout": settings.held_out_questions}
            rows = "".join(f"_{name}{count}" for name, count in chosen.items() if count is not None)
            given = None if request.out is None else request.out / REFERENCES / reference.label
            place = given or default_out(reference.source)
            folder = place.with_name(f"{place.name}_{settings.forget_split}{rows}")
            _evaluate(reference, request, device, folder, results.get("retain"))
            reference = folder / FILES[0]
        results[role] = reference
    out = request.out or default_out(request.model)
    _evaluate(model, request, device, out, results.get("retain"))
    return TofuOutput(out, **results)


def _evaluate(which: Model, request: TofuRequest, device: torch.device, out: Path, retain: Path | None) -> None:
    model, tokenizer = load(which, request.loading, device)
    evaluate_tofu(
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
    gc.collect()  # free the memory before the next model is loaded
    empty_device_cache()


def _find_reference(text: str, settings: TofuSettings) -> Model | Path:
    """Results if ``text`` is a file or a folder with some, else a model."""
    path = Path(text).expanduser()
    if path.is_file() or (path.is_dir() and not is_model(path)):
        return find_reference(path, settings.forget_split, without(settings.held_out_questions))
    return find_model(text, adapters=True)


def _check_results(path: Path, settings: TofuSettings) -> None:
    check_current(result := read_result(path))
    check_reference(result, settings.forget_split, load_questions(settings, ["forget"]))


def default_out(model: str) -> Path:
    """``evals`` in a model's own folder; for hub models a folder here."""
    folder = Path(model).expanduser()
    return folder / "evals" if folder.is_dir() else Path("rosu-eval") / model.split("/")[-1]


def load_tokenizer(model: Model, how: Loading) -> Any:
    """The model's tokenizer; for an adapter without its own, that of its base."""
    from transformers import AutoTokenizer

    name = model.source
    if model.base is not None and not any((Path(name) / file).is_file() for file in TOKENIZER_FILES):
        name = model.base.source
    return AutoTokenizer.from_pretrained(name, trust_remote_code=how.trust_remote_code)


def load(model: Model, how: Loading, device: torch.device) -> tuple[Any, Any]:
    """The model on ``device`` and its tokenizer."""
    tokenizer = load_tokenizer(model, how)
    try:
        loaded = _load_weights(model, how)
    except (OSError, ValueError, RuntimeError, ImportError, SafetensorError) as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise ConfigError(f"The model {model.source!r} cannot be loaded: {reason[0]}") from error
    return loaded.to(device).eval(), tokenizer


def _load_weights(model: Model, how: Loading) -> Any:
    dtype: Any = how.dtype if how.dtype == "auto" else getattr(torch, how.dtype)
    options = {**dtype_argument(dtype), "trust_remote_code": how.trust_remote_code}
    if how.attn_implementation:
        options["attn_implementation"] = how.attn_implementation
    loaded = load_causal_model((model.base or model).source, **options)
    if model.base is not None:
        try:
            from peft import PeftModel
        except ImportError as error:
            raise ConfigError(f"{model.source!r} is an adapter, which needs PEFT: pip install peft.") from error
        return PeftModel.from_pretrained(loaded, model.source).merge_and_unload()
    return loaded
