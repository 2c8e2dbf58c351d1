"""Unlearn one request after another, each from the model before, and look at every set after each.

A request is an ordinary run in a folder of its own, ``OUT/01-name``. It is finished when the run's manifest says so;
a sequence that was stopped goes on with the first that is not, from its newest checkpoint if it has one. More requests
may be added to the end of the list; a finished one that was changed is refused. Figures are of the answers under
teacher forcing (probability and exact match), for every set of the list: those forgotten so far must stay so, those
still to come and the retain set show what utility is left.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypedDict

from ... import __version__
from ...compat import accelerator_kind, empty_device_cache
from ...data.sources import local_file, source_content
from ...errors import ConfigError
from ...evaluation.memorisation import membership_auc, score
from ...evaluation.processes import from_first, world
from ...files import changed_conditions, check_writable, read_json, weight_digests, write_json
from ...recipes.folder import MANIFEST
from ...recipes.next_token import chat_format, sample_reader
from ...recipes.prepare import check_model, load_tokenizer
from ...recipes.run import run
from ...recipes.settings import Recipe, RunArguments, build
from ...training.checkpoints import last_complete
from .requests import HOLDOUT, RETAIN, ForgetRequest

SCHEMA = "rosu/requests/1"
FILE = "requests.json"

logger = logging.getLogger(__name__)


class SequenceRow(TypedDict):
    """One set after so many requests; ``state`` is forgotten, pending, retain or holdout."""

    after: int
    set: str
    state: str
    probability: float
    exact_match: float
    mia_auc: float | None  # against the holdout set, where there is one


class SequenceDocument(TypedDict):
    """``requests.json``."""

    schema: str
    conditions: dict[str, Any]
    requests: list[dict[str, Any]]
    seed: int
    rows: list[SequenceRow]
    version: str


def run_sequence(
    values: Mapping[str, Any],
    requests: Sequence[ForgetRequest],
    train: Callable[[Recipe], Any] = run,
) -> SequenceDocument:
    """All requests in order; returns the document, which is written after each of them.

    ``values`` are the settings that the requests share: ``output_dir`` is the sequence's own.
    """
    shared = _recipe(values, replace(requests[0], settings={}), None, None)  # without the settings of any request
    recipes = {request.name: _recipe(values, request, None, None) for request in requests}
    for recipe in recipes.values():  # whatever can be refused is refused before the first step
        _check(recipe)
    out = Path(shared.config.output_dir).parent
    document = from_first(lambda: _open(values, requests, shared, out))
    model: str = str(shared.arguments.model_name_or_path)
    _look(document, recipes, 0, model, shared, out)
    for number, request in enumerate(requests, 1):
        folder = out / request.folder(number)
        if not from_first(lambda place=folder: _finished(place)):  # type: ignore[misc]
            logger.info("Request %d of %d: %s", number, len(requests), request.forget_data)
            resumes = from_first(lambda place=folder: _resumable(place))  # type: ignore[misc]
            again = {"resume_from_checkpoint": "true"} if resumes else {"overwrite": True}
            trainer = train(_recipe({**values, **again}, request, model, folder))
            del trainer
            gc.collect()
            empty_device_cache()
            from_first(lambda: None)  # nobody reads the model before it is written
        model = str(folder)
        _look(document, recipes, number, model, shared, out)
    return document


def _recipe(values: Mapping[str, Any], request: ForgetRequest, model: str | None, folder: Path | None) -> Recipe:
    out = Path(str(values.get("output_dir") or "outputs"))
    merged = {**values, **request.settings, "forget_data": request.forget_data}
    if model is not None:
        merged["model_name_or_path"] = model
    return build({**merged, "output_dir": str(folder or out / request.folder(1))})


def _check(recipe: Recipe) -> None:
    arguments = recipe.arguments
    arguments.check_run()
    check_model(arguments)
    if recipe.representation_level:
        raise ConfigError(
            "--requests measures answers, and this recipe is at representation level: run its requests one by one."
        )
    if arguments.lora_r is not None:
        raise ConfigError(
            f"--requests starts each request from the model before, and lora_r={arguments.lora_r} leaves an adapter: "
            "train all weights, or merge each adapter and run the requests one by one."
        )
    if isinstance(arguments.forget_data, str):
        local_file(arguments.forget_data)  # raises for a folder without that file


def _finished(folder: Path) -> bool:
    return (folder / MANIFEST).is_file() and bool(read_json(folder / MANIFEST).get("finished"))


def _resumable(folder: Path) -> bool:
    """Whether a checkpoint with steps left is there: one of the last step would be trained past it."""
    checkpoint = last_complete(folder)
    if checkpoint is None:
        return False
    state = read_json(checkpoint / "trainer_state.json")
    return int(state["global_step"]) < int(state["max_steps"])


def _source(source: Any) -> Any:
    return source_content(source) if isinstance(source, str) else source


def _open(values: Mapping[str, Any], requests: Sequence[ForgetRequest], shared: Recipe, out: Path) -> SequenceDocument:
    """The document of an earlier call under the same conditions, or a new one."""
    check_writable(out, f"output_dir={str(out)!r}")
    arguments = shared.arguments
    free = ("output_dir", "overwrite", "resume_from_checkpoint", "forget_data", "model_name_or_path")
    folder = Path(str(arguments.model_name_or_path)).expanduser()
    conditions = {
        "settings": {key: str(value) for key, value in sorted(values.items()) if key not in free},
        "model": weight_digests(folder) if folder.is_dir() else str(arguments.model_name_or_path),
        "retain": _source(arguments.retain_data),
        "holdout": _source(arguments.holdout_data),
    }
    listed: list[dict[str, Any]] = [
        {
            "name": request.name,
            "forget_data": request.forget_data,
            "content": _source(request.forget_data),
            "settings": {key: str(value) for key, value in request.settings.items()},
            "folder": request.folder(number),
        }
        for number, request in enumerate(requests, 1)
    ]
    path = out / FILE
    rows: list[SequenceRow] = []
    if path.is_file():
        earlier = read_json(path)
        changed = changed_conditions(earlier["conditions"], conditions)
        for number, (before, now) in enumerate(zip(earlier["requests"], listed, strict=False), 1):
            if _finished(out / before["folder"]):
                differs = changed_conditions(before, {**now, "forget_data": before["forget_data"]})
                changed += [f"request {number}: {each}" for each in differs]
        if changed:
            raise ConfigError(
                f"output_dir={str(out)!r} holds another sequence: {'; '.join(changed)}. Give another --output-dir; "
                "requests may only be added to the end."
            )
        if _measured(earlier["requests"]) == _measured(listed):
            rows = earlier["rows"]
    document: SequenceDocument = {
        "schema": SCHEMA,
        "conditions": conditions,
        "requests": listed,
        "seed": shared.config.seed,
        "rows": rows,
        "version": __version__,
    }
    write_json(path, document)
    return document


def _measured(listed: Sequence[Mapping[str, Any]]) -> list[Any]:
    """What the figures of every set depend on: a set is read with the settings of its request."""
    return [[each["name"], each["content"], each["settings"]] for each in listed]


def _look(
    document: SequenceDocument, recipes: Mapping[str, Recipe], after: int, model: str, shared: Recipe, out: Path
) -> None:
    """Measure every set at the model after so many requests, unless that was done.

    The set of a request is read with the settings of that request, the retain and the holdout set with those that all
    requests share; so is the model.
    """
    if any(row["after"] == after for row in document["rows"]):
        return
    import torch

    from ...recipes.next_token import load_model

    tokenizer = load_tokenizer(replace(shared.arguments, model_name_or_path=model))
    loaded = load_model(shared.arguments, model)
    loaded.to(torch.device(accelerator_kind() or "cpu"))
    sets: dict[str, tuple[RunArguments, Any]] = {
        **{name: (recipe.arguments, recipe.arguments.forget_data) for name, recipe in recipes.items()},
        RETAIN: (shared.arguments, shared.arguments.retain_data),
        HOLDOUT: (shared.arguments, shared.arguments.holdout_data),
    }
    scores = {}
    for name, (arguments, source) in sets.items():
        if source:
            samples = sample_reader(arguments, tokenizer, chat_format(arguments, tokenizer))(source)
            scores[name] = score(loaded, samples, pad_token_id=tokenizer.pad_token_id)
    others = scores.get(HOLDOUT)
    for place, (name, found) in enumerate(scores.items(), 1):
        state = name if name in (RETAIN, HOLDOUT) else "forgotten" if place <= after else "pending"
        auc = None if others is None or name == HOLDOUT else membership_auc(found.nll, others.nll)
        document["rows"].append(
            {
                "after": after,
                "set": name,
                "state": state,
                "probability": found.probability,
                "exact_match": found.exact_match,
                "mia_auc": auc,
            }
        )
    del loaded
    gc.collect()
    empty_device_cache()
    if world()[0] == 0:
        write_json(out / FILE, document)
