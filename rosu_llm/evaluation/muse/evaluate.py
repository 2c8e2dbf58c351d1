"""All MUSE metrics of one model, by OpenUnlearning's names and definitions; every pass ends with its results on disk.

    VerbMem          forget_verbmem_ROUGE  ROUGE-L F1 of the next 128 tokens against how the passage goes on
    KnowMem          forget_knowmem_ROUGE  ROUGE-L F1 of the answer (32 tokens, cut at the next question), few-shot
    KnowMem, retain  retain_knowmem_ROUGE  the same of the retain set
    PrivLeak         privleak              100 · (r − a)/(1 − r), a the Min-K AUC of the model, r of the retain model

Extraction strength and exact memorisation are of the passages; the attacks are of whole texts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

from ... import __version__
from ...compat import installed_versions
from ...data.batching import plan_batches
from ...data.chat_format import IGNORE, Encoded, find_format
from ...errors import ConfigError, DataError, unknown
from ...files import read_json, write_json
from ..model_identity import loaded_identity
from ..processes import BatchJob, from_first, run_jobs
from ..tofu.document import Entry, TofuSidecar, TofuStore
from ..tofu.generation import generate, rouge, text_of
from ..tofu.metrics import ATTACKS, DERIVED, MEMORISED, attack_entry, entry, score_entry
from ..tofu.token_statistics import TokenStatistics, token_statistics
from .data import Rows, count_cut, encode_question, encode_text, read_part, source_of

SCHEMA = "rosu/muse/1"
FILES = ("MUSE_EVAL.json", "MUSE_SUMMARY.json")
DOCUMENT = "muse.json"
STOP = ("\n\n", "\nQuestion", "Question:")
#: Metric → its part of the data and how long an answer may become.
GENERATED = {
    "forget_verbmem_ROUGE": ("verbmem", 128),
    "forget_knowmem_ROUGE": ("forget_knowmem", 32),
    "retain_knowmem_ROUGE": ("retain_knowmem", 32),
}
PRIVLEAK = "privleak"
METRICS = (*GENERATED, *MEMORISED, *ATTACKS, PRIVLEAK)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class MuseSettings:
    """Settings of one evaluation.

    Attributes:
        split: News or Books.
        data: hub id or folder (``knowmem/forget_qa.jsonl``, ``verbmem/forget.jsonl``, ``privleak/holdout.jsonl``, …);
            None takes the hub's.
        chat_format: see :func:`rosu_llm.data.chat_format.find_format`; MUSE's own models have that of Llama-2-7b-hf.
    """

    split: str = "News"
    data: str | None = None
    chat_format: str | None = None
    batch_size: int = 16
    batch_tokens: int = 16384
    limit: int | None = None
    metrics: tuple[str, ...] = METRICS

    def __post_init__(self) -> None:
        source_of(self.data, self.split)
        for name in ("batch_size", "batch_tokens", "limit"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ConfigError(f"--{name.replace('_', '-')} {value} must be at least 1.")
        for metric in self.metrics:
            if metric not in METRICS:
                raise unknown("MUSE metric", metric, METRICS)


def evaluate_muse(
    model: Any,
    tokenizer: Any,
    settings: MuseSettings,
    out: Path | str,
    *,
    retain: Path | None = None,
    overwrite: bool = False,
    name: str | None = None,
    weights: Mapping[str, str] | None = None,
) -> dict[str, float]:
    """Evaluate ``model`` and write ``MUSE_EVAL.json`` and ``MUSE_SUMMARY.json`` into ``out``; returns the summary.

    ``retain`` are results of the model that never saw the forget set, for PrivLeak; without it an AUC of 0.5 is
    assumed. Where ``torch.distributed`` is initialised all processes must call it.
    """
    if any(find_spec(module) is None for module in ("rouge_score", "scipy", "sklearn")):
        raise ConfigError("MUSE's metrics need rouge-score, scipy and scikit-learn: pip install 'rosu-llm[eval]'.")
    out = Path(out)
    name = name or getattr(model.config, "_name_or_path", "") or type(model).__name__
    form = find_format(settings.chat_format, tokenizer, name)
    reference = from_first(lambda: read_reference(retain))
    passes = MusePasses(model, tokenizer, settings, form)

    def open_store() -> TofuStore:
        sidecar = {
            "schema": SCHEMA,
            "name": name,
            "device": model.device.type,
            "versions": {"rosu-llm": __version__, **installed_versions("torch", "transformers", "rouge-score")},
            "conditions": {
                "dtype": str(model.dtype),
                "model": loaded_identity(model, tokenizer),
                "split": settings.split,
                "limit": settings.limit,
                "data": passes.digests,
                "chat_format": asdict(form),
            },
            **({"weights": dict(weights)} if weights else {}),
            **({"retain": str(retain)} if retain else {}),
        }
        return TofuStore(out, settings.metrics, cast(TofuSidecar, sidecar), overwrite=overwrite, files=FILES)

    store = from_first(open_store)
    training = model.training
    model.eval()
    try:
        passes.run(store)
    finally:
        model.train(training)
    if PRIVLEAK in settings.metrics:
        store.entries[PRIVLEAK] = DERIVED[PRIVLEAK].make([store.entries["mia_min_k"]], reference)
    summary = from_first(store.write)
    from_first(lambda: _document(out, store, settings, summary))
    return summary


def _document(out: Path, store: TofuStore, settings: MuseSettings, summary: Mapping[str, float]) -> None:
    """One small file with every figure, for tables and reports."""
    content = {**store.sidecar, "split": settings.split, "figures": dict(summary)}
    write_json(out / DOCUMENT, content)


def read_reference(path: Path | None) -> Entry | None:
    """The Min-K attack of the retain model, from its results."""
    if path is None:
        return None
    file = path / FILES[0] if path.is_dir() else path
    found = read_json(file).get("mia_min_k")
    if not isinstance(found, dict) or not isinstance(found.get("agg_value"), float):
        raise DataError(f"{file} has no mia_min_k with an agg_value: evaluate the retain model with rosu eval muse.")
    return found


class MusePasses:
    """The samples of an evaluation, read and encoded before the model runs, and the passes over them."""

    def __init__(self, model: Any, tokenizer: Any, settings: MuseSettings, form: Any) -> None:
        self.model, self.tokenizer, self.settings = model, tokenizer, settings
        self.pad = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        self.samples: dict[str, list[Encoded]] = {}
        self.digests: dict[str, str] = {}
        asked = settings.metrics
        source = source_of(settings.data, settings.split)

        def read(part: str) -> Rows:
            rows = read_part(source, part, settings.limit)
            self.digests[part] = f"sha256:{sha256(repr([sorted(row.items()) for row in rows]).encode()).hexdigest()}"
            return rows

        for which in ("forget", "retain"):
            if f"{which}_knowmem_ROUGE" in asked:
                examples = read(f"{which}_examples")
                found = [encode_question(row, examples, tokenizer, form) for row in read(f"{which}_knowmem")]
                self.samples[f"{which}_knowmem"] = found
                if number := count_cut(found, form):
                    logger.warning("%d questions of %s were cut at 512 tokens, as OpenUnlearning does.", number, which)
        if {"forget_verbmem_ROUGE", *MEMORISED} & set(asked):
            self.samples["verbmem"] = [
                encode_text(str(row["prompt"]), str(row["gt"]), tokenizer, space=True) for row in read("verbmem")
            ]
        if {*ATTACKS, PRIVLEAK} & set(asked):
            for part in ("mia_forget", "mia_holdout"):
                self.samples[part] = [encode_text("", str(row["text"]), tokenizer, space=False) for row in read(part)]
        self._check()

    def _check(self) -> None:
        rows = self.model.get_input_embeddings().weight.shape[0]
        every = [sample for samples in self.samples.values() for sample in samples]
        highest = max([self.pad, *(max(sample.input_ids) for sample in every)])
        if highest >= rows:
            raise ConfigError(f"The tokenizer's token {highest} has no row among the model's {rows} embeddings.")
        context = getattr(self.model.config, "max_position_embeddings", None)
        longest = max((len(sample.input_ids) for sample in every), default=0)
        if isinstance(context, int) and longest > context:
            logger.warning("Texts of up to %d tokens exceed the model's context of %d tokens.", longest, context)

    def run(self, store: TofuStore) -> None:
        """Run what is missing; each pass is written when it is done."""
        asked = set(self.settings.metrics) | ({"mia_min_k"} if PRIVLEAK in self.settings.metrics else set())
        missing = asked - store.entries.keys()
        jobs: dict[str, tuple[list[BatchJob], Callable[..., dict[str, Entry]]]] = {}
        for metric, (part, new) in GENERATED.items():
            if metric in missing:
                jobs[metric] = ([self._answers(metric, part, new)], partial(_rouge_entry, metric))
        if missing & set(MEMORISED):
            jobs["verbmem"] = ([self._scoring("verbmem")], _memorised)
        if missing & set(ATTACKS):
            parts = ("mia_forget", "mia_holdout")
            jobs["attacks"] = ([self._scoring(part) for part in parts], self._attacks)
        owners = [(name, place) for name, (own, _) in jobs.items() for place in range(len(own))]
        found: dict[str, dict[int, list[Any]]] = {name: {} for name in jobs}
        done: dict[str, Entry] = {}

        def finished(number: int, values: list[Any], seconds: float) -> None:
            name, place = owners[number]
            found[name][place] = values
            if len(found[name]) == len(jobs[name][0]):
                entries = jobs[name][1](*(found[name][at] for at in sorted(found[name])))
                kept = {key: value for key, value in entries.items() if key in asked}
                store.put(kept, name, seconds)
                done.update(kept)

        if jobs:
            run_jobs([job for own, _ in jobs.values() for job in own], finished)
            store.entries.update(from_first(lambda: done))

    def _plan(self, lengths: Sequence[int]) -> list[list[int]]:
        return plan_batches(lengths, batch_size=self.settings.batch_size, batch_tokens=self.settings.batch_tokens)

    def _answers(self, metric: str, part: str, new: int) -> BatchJob:
        from rouge_score.rouge_scorer import RougeScorer

        logging.getLogger("absl").setLevel(logging.WARNING)
        scorer, samples = RougeScorer(["rouge1", "rougeL"], use_stemmer=True), self.samples[part]
        stop = STOP if "knowmem" in part else ()

        def work(batch: Sequence[int]) -> list[dict[str, Any]]:
            chosen = [samples[at] for at in batch]
            answered = generate(self.model, self.tokenizer, chosen, self.pad, new, stop=stop)
            return [{**rouge(scorer, each["ground_truth"], each["generation"]), **each} for each in answered]

        return BatchJob(metric, self._plan([len(sample.prompt_ids) + new for sample in samples]), work)

    def _scoring(self, part: str) -> BatchJob:
        samples = self.samples[part]

        def work(batch: Sequence[int]) -> list[Any]:
            found = token_statistics(self.model, [samples[at] for at in batch], self.pad, full=True)
            return [each.plain() for each in found]

        return BatchJob(part, self._plan([len(sample.input_ids) for sample in samples]), work)

    def _attacks(self, *values: list[Any]) -> dict[str, Entry]:
        scores: dict[str, list[list[float]]] = {attack: [] for attack in ATTACKS}
        clean = bool(getattr(self.tokenizer, "clean_up_tokenization_spaces", False))
        for part, plain in zip(("mia_forget", "mia_holdout"), values, strict=True):
            statistics = [TokenStatistics.from_plain(each) for each in plain]
            texts = [
                text_of(self.tokenizer, [label for label in sample.labels if label != IGNORE], clean=clean)
                for sample in self.samples[part]
            ]
            scores["mia_loss"].append([each.average_loss() for each in statistics])
            scores["mia_zlib"].append([each.zlib_loss(text) for each, text in zip(statistics, texts, strict=True)])
            scores["mia_min_k"].append([each.min_k() for each in statistics])
            scores["mia_min_k_plus_plus"].append([each.min_k_plus_plus() for each in statistics])
        return {attack: attack_entry(*both) for attack, both in scores.items()}


def _rouge_entry(metric: str, values: list[Any]) -> dict[str, Entry]:
    return {metric: entry(dict(enumerate(values)), "rougeL_f1")}


def _memorised(values: list[Any]) -> dict[str, Entry]:
    statistics = [TokenStatistics.from_plain(each) for each in values]
    return {
        "extraction_strength": score_entry(each.extraction_strength() for each in statistics),
        "exact_memorization": score_entry(each.exact_memorization() for each in statistics),
    }
