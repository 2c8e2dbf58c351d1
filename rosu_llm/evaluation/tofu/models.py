"""``rosu eval tofu``: a model, and the reference models it is compared with, one after the other."""

from __future__ import annotations

import gc
import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from ...data.chat_format import find_format
from ...errors import ConfigError, DataError
from ...presentation.tofu_evaluation import report
from ..aggregates import auc_transform
from ..collection import find_reference
from ..results import FILES, read_result
from .loading import ADAPTER, Loading, Source, find_source, load, load_tokenizer
from .processes import from_first
from .questions import load_questions
from .run import TofuSettings, evaluate_tofu


@dataclass(frozen=True, kw_only=True)
class Request:
    """What to evaluate.

    Attributes:
        retain, target: the model never trained on the forget set, and the one before unlearning: a model (evaluated
            as well, its results kept) or results of one.
        out: folder for the results; by default ``evals`` in the model's own.
        transform: how an attack's AUC becomes a score.
        processes: how many processes must take part, where that was asked for.
    """

    model: str
    settings: TofuSettings
    loading: Loading
    out: Path | None = None
    retain: str | None = None
    target: str | None = None
    transform: str = "range"
    overwrite: bool = False
    processes: int | None = None


def run(request: Request) -> str:
    """Evaluate all of them; the tables as text."""
    _check_processes(request)
    auc_transform(request.transform)
    device = _device()
    split = request.settings.forget_split
    source = from_first(lambda: find_source(request.model))
    references = {
        role: from_first(partial(_find_reference, text, split))
        for role, text in (("retain", request.retain), ("target", request.target))
        if text is not None
    }
    for each in (source, *references.values()):  # before the first of them is loaded
        if isinstance(each, Source):
            find_format(request.settings.chat_format, load_tokenizer(each, request.loading), each.name)
        else:
            from_first(partial(_check_questions, each, request.settings))
    paths: dict[str, Path] = {}
    for role, reference in references.items():
        if isinstance(reference, Source):
            folder = _own_folder(reference.name, request.settings)
            _evaluate(reference, request, device, folder, paths.get("retain"))
            paths[role] = folder / FILES[0]
        else:
            paths[role] = reference
    out = request.out or default_out(request.model)
    _evaluate(source, request, device, out, paths.get("retain"))
    return from_first(
        lambda: report(out, retain=paths.get("retain"), target=paths.get("target"), transform=request.transform)
    )


def _evaluate(source: Source, request: Request, device: torch.device, out: Path, retain: Path | None) -> None:
    model, tokenizer = load(source, request.loading, device)
    evaluate_tofu(model, tokenizer, request.settings, out, retain=retain, overwrite=request.overwrite, name=source.name)
    del model
    gc.collect()  # before the next one needs the memory
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _find_reference(text: str, split: str) -> Source | Path:
    """Results when ``text`` is a file or a folder with some, else a model."""
    path = Path(text).expanduser()
    if path.is_file() or (path.is_dir() and not _is_model(path)):
        result = read_result(find_reference(path, split))  # now rather than after hours
        if result.split not in (None, split):
            raise DataError(f"{result.path} is of {result.split}, not of {split}: give results of the same split.")
        return result.path
    return find_source(text)


def _check_questions(results: Path, settings: TofuSettings) -> None:
    found = read_result(results).questions
    asked = len(load_questions(settings.data, settings.forget_split, ["forget"], settings.limit).rows["forget"])
    if found not in (None, asked):
        raise DataError(
            f"{results} is of {found} forget questions, and {asked} are asked here: give results of the same split and "
            "--limit."
        )


def default_out(model: str) -> Path:
    """``evals`` in a model's own folder; for models of the hub a folder here."""
    folder = Path(model).expanduser()
    return folder / "evals" if folder.is_dir() else Path("rosu-eval") / model.split("/")[-1]


def _own_folder(model: str, settings: TofuSettings) -> Path:
    """Where a reference model's results are kept: one folder for each split, trials apart."""
    out = default_out(model)
    trial = "" if settings.limit is None else f"_limit{settings.limit}"
    return out.with_name(f"{out.name}_{settings.forget_split}{trial}")


def _is_model(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("config.json", ADAPTER))


def _device() -> torch.device:
    """Join the other processes, if there are any, and take this one's device."""
    from accelerate import PartialState

    alone = os.environ.get("WORLD_SIZE", "1") == "1"
    # without GPUs accelerate must be told, else every process believes it is alone
    state = PartialState() if alone or torch.cuda.is_available() else PartialState(cpu=True)
    return torch.device(state.device)


def _check_processes(request: Request) -> None:
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if request.processes is not None and request.processes != started:
        raise ConfigError(
            f"--num-processes {request.processes} was asked for, but {started} started. Launch with "
            f"'torchrun --nproc_per_node {request.processes} -m rosu_llm eval tofu …' instead."
        )
    for variable, layout in (("ACCELERATE_USE_FSDP", "FSDP"), ("ACCELERATE_USE_DEEPSPEED", "DeepSpeed")):
        if os.environ.get(variable, "false").lower() in ("1", "true"):
            raise ConfigError(f"Evaluation keeps the whole model on every process, not {layout}'s shards: use ddp.")
