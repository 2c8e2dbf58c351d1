"""All TOFU metrics of one model, each answer read once.

Only the model's passes are expensive (``passes.py``): one over given answers yields probability, memorisation and all
attacks, one of generation yields ROUGE and the texts for fluency. Every pass ends with its results on disk, so a killed
run resumes with the next one. Everything else is arithmetic on those results and is repeated each time.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ... import __version__
from ...compat import installed_versions
from ...data.chat_format import FORMATS, find_format
from ...errors import ConfigError
from ..model_identity import loaded_identity
from ..processes import from_first
from .collection import read_retain
from .document import TofuSidecar, TofuStore
from .generation import classifier_available
from .metrics import COMPARED, DERIVED, TofuSettings, datasets_of, needed
from .passes import Passes
from .questions import Encoder, load_questions
from .summary import FLUENCY

LIBRARIES = ("torch", "transformers", "tokenizers", "rouge-score", "scikit-learn", "scipy")

logger = logging.getLogger(__name__)


def evaluate_tofu(
    model: Any,
    tokenizer: Any,
    settings: TofuSettings,
    out: Path | str,
    *,
    retain: Path | str | Mapping[str, Any] | None = None,
    overwrite: bool = False,
    identity: str | None = None,
    name: str | None = None,
    weights: Mapping[str, str] | None = None,
    training: Mapping[str, Any] | None = None,
) -> dict[str, float]:
    """Evaluate ``model`` and write ``TOFU_EVAL.json`` and ``TOFU_SUMMARY.json`` into ``out``; returns the summary.

    Where ``torch.distributed`` is initialised all processes must call it, each with the whole model; all get the
    summary and the first one writes.

    Args:
        retain: results of the model that never saw the forget set (file, folder or content), for forget quality and
            privleak.
        overwrite: start over although ``out`` holds results.
        identity: what tells this model from others; a digest of its weights by default.
        name: hub id or folder of the model, for the record and to find its chat format.
        weights: digests of the files that the model was loaded from, by which readers know results of other weights.
        training: settings that made the model, where no folder of it will tell them.
    """
    if any(find_spec(module) is None for module in ("rouge_score", "scipy", "sklearn")):
        raise ConfigError("TOFU's metrics need rouge-score, scipy and scikit-learn: pip install 'rosu-llm[eval]'.")
    out, retain = Path(out), Path(retain) if isinstance(retain, str) else retain
    name = name or getattr(model.config, "_name_or_path", "") or type(model).__name__
    form = find_format(settings.chat_format, tokenizer, name)
    metrics = settings.metrics
    if FLUENCY in metrics and not from_first(lambda: classifier_available(settings.fluency_model)):
        metrics = tuple(metric for metric in metrics if metric != FLUENCY)
    if not metrics:
        raise ConfigError(f"Nothing is left to measure: {FLUENCY} needs the classifier (--fluency-model FOLDER).")
    wanted = needed(metrics)
    compared = any(metric in wanted for metric in COMPARED)
    questions = load_questions(settings, datasets_of(wanted))

    def open_store() -> TofuStore:
        by_name = next((known for known in FORMATS if known.lower() in name.lower()), None)
        sidecar: TofuSidecar = {
            "name": name,
            "family": settings.chat_format if settings.chat_format in FORMATS else by_name,
            "architecture": _architecture(model),
            "device": model.device.type,
            "attn_implementation": getattr(model.config, "_attn_implementation", None),
            "versions": {"rosu-llm": __version__, **installed_versions(*LIBRARIES)},
            "conditions": {
                "dtype": str(model.dtype),
                "model": identity or loaded_identity(model, tokenizer),
                "forget_split": settings.forget_split,
                "limit": settings.limit,
                "held_out_questions": settings.held_out_questions,
                "data": dict(questions.digests),
                "chat_format": asdict(form),
                "max_length": settings.max_length,
                "max_new_tokens": settings.max_new_tokens,
            },
        }
        if weights:
            sidecar["weights"] = dict(weights)
        if training:
            sidecar["training"] = json.loads(json.dumps(training, default=str))
        if compared and isinstance(retain, Path):
            sidecar["retain"] = str(retain)
        return TofuStore(out, metrics, sidecar, overwrite=overwrite)

    store = from_first(open_store)
    if FLUENCY in wanted and store.sidecar.get("fluency_model") != settings.fluency_model:
        store.entries.pop(FLUENCY, None)
    elif settings.fluency_model is None:
        store.entries.pop(FLUENCY, None)
        store.metrics.discard(FLUENCY)
    if compared and retain is not None:  # what an earlier run compared with another retain model is computed again
        wanted |= {metric for metric in COMPARED if metric in store.entries}
    reference = from_first(lambda: read_retain(retain, wanted, settings.forget_split, questions))
    context = getattr(model.config, "max_position_embeddings", None)
    encoder = Encoder(questions, tokenizer, form, max_length=settings.max_length, context=context)
    logger.info("TOFU %s of %s, results in %s", settings.forget_split, name, out)
    was_training = model.training
    model.eval()
    try:
        Passes(model, settings, encoder, store).run(wanted)
    finally:
        model.train(was_training)
    for metric, derived in DERIVED.items():  # in the order in which they build on each other
        if metric in wanted and not (derived.reference and retain is None and metric in store.entries):
            other = reference.get(derived.reference) if derived.reference else None
            store.entries[metric] = derived.make([store.entries[need] for need in derived.needs], other)
    return from_first(store.write)


def _architecture(model: Any) -> str:
    """Kind and size, for models without a name of OpenUnlearning's; equal with and without an adapter."""
    config = model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config
    sizes = {"layers": "num_hidden_layers", "wide": "hidden_size"}
    known = [f"{value} {name}" for name, key in sizes.items() if (value := getattr(config, key, None)) is not None]
    return ", ".join([str(getattr(config, "model_type", type(model).__name__)), *known])
