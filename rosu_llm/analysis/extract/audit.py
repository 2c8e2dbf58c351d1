"""``rosu audit extract``: every way of asking put to every model, and the difference to the retain model."""

from __future__ import annotations

import gc
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...compat import empty_device_cache
from ...data.chat_format import find_format
from ...data.tofu import split_names, tofu_rows
from ...errors import ConfigError, DataError
from ...evaluation.processes import joined_device
from ...evaluation.tofu.run import load, load_tokenizer
from ..controls.models import INITIAL, RETAIN, UNLEARNED
from ..controls.request import AuditDocument, AuditRequest, Progress
from .asking import greedily, sampled, through_the_lens
from .estimates import Interval, bootstrap, check_samples, expected_best, leak_at
from .hits import HitJudge, entities
from .ways import FEWSHOT, GREEDY, LENS, SAMPLE, WAYS, check_ways, cut_otherwise, prompts

SCHEMA = "rosu/audit-extract/1"
CELLS = "extract_cells"
KS = (1, 2, 4, 8, 16, 32, 64, 128)
GAINS = {
    RETAIN: "every difference with its interval (what a model says that never saw the data is a guess, not a leak)",
    INITIAL: "how much the same questions got out of the model before unlearning",
}


class ExtractDocument(AuditDocument):
    """``audit_extract.json``."""

    seeds: list[int]
    ways: list[str]
    ks: list[int]
    questions: int
    summary: list[dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class ExtractRequest(AuditRequest):
    """What to ask, and how often."""

    data: str
    forget_split: str = "forget10"
    chat_format: str | None = None
    ways: tuple[str, ...] = WAYS
    samples: int = 128
    ks: tuple[int, ...] | None = None  # None: those of 1, 2, 4 … 128 that the samples allow
    temperature: float = 1.0
    threshold: float = 0.7
    seeds: tuple[int, ...] = (0,)
    limit: int | None = None
    max_new_tokens: int = 200
    max_length: int = 512
    batch_size: int = 64

    def check(self) -> None:
        """Raise for what cannot work, before anything is loaded."""
        check_ways(self.ways)
        check_samples(self.ks or (), self.samples)
        if not 0 < self.threshold <= 1:
            raise ConfigError(f"--threshold {self.threshold:g} is no ROUGE-L recall: give more than 0 and at most 1.")
        if not self.temperature > 0:
            raise ConfigError(f"--temperature {self.temperature:g} draws nothing: give more than 0, e.g. 1.")
        if not self.seeds:
            raise ConfigError("--seeds needs at least one number.")
        self.check_place()

    @property
    def asked_ks(self) -> tuple[int, ...]:
        """The k of leak@k."""
        return self.ks or tuple(k for k in KS if k <= self.samples)


def audit_extract(request: ExtractRequest, progress: Progress) -> ExtractDocument:
    """Ask every model in every way; goes on where an earlier call was stopped."""
    request.check()
    splits = split_names(request.forget_split)
    rows = tofu_rows(request.data, splits.forget_perturbed, limit=request.limit)
    kept = tofu_rows(request.data, splits.retain_perturbed) if FEWSHOT in request.ways else []
    for number, row in enumerate(rows, 1):
        if not all(isinstance(row.get(key), str) and row[key].strip() for key in ("question", "answer")):
            raise DataError(f"{splits.forget_perturbed}, row {number}, needs a question and an answer as text.")
    conditions: dict[str, Any] = {
        "data": _content(rows),
        "chat_format": request.chat_format,
        "threshold": request.threshold,
        "samples": request.samples,
        "temperature": request.temperature,
        "max_new_tokens": request.max_new_tokens,
        "max_length": request.max_length,
        "dtype": request.loading.dtype,
    }
    shown = {"kept": _content(kept)} if kept else {}  # of these cells alone: other ways may be asked before or after
    more = [(f"{CELLS}/{FEWSHOT}", {**conditions, **shown})] if kept else []
    stores, *others = request.stores((CELLS, conditions), *more)
    jobs = [
        (role, way, seed)
        for role in request.models.by_role
        for way in dict.fromkeys(request.ways)
        for seed in (request.seeds if way == SAMPLE else request.seeds[:1])
    ]
    found: dict[tuple[str, str, int], dict[str, Any]] = {}
    asking: _Asking | None = None
    for number, (role, way, seed) in enumerate(jobs):
        progress("models × ways", number, len(jobs))
        name = f"{role}-{way}" + (f"-seed{seed}" if way == SAMPLE else "")
        cells = (others[0] if way == FEWSHOT else stores)[role]
        cell = cells.get(name)
        if cell is None:
            if asking is None or asking.role != role:
                asking = None
                gc.collect()
                empty_device_cache()
                asking = _Asking(request, role, rows, kept)
            cell = asking(way, seed)
            cells.put(name, cell)
        found[role, way, seed] = cell
    progress("models × ways", len(jobs), len(jobs))
    document = request.document(SCHEMA, {**conditions, **shown}, GAINS, "rouge-score")
    document["notes"] += _cut_otherwise(request, rows)
    return {
        **document,
        "seeds": list(request.seeds),
        "ways": list(dict.fromkeys(request.ways)),
        "ks": list(request.asked_ks),
        "questions": len(rows),
        "summary": summary(found, request.asked_ks, request.threshold),
    }


def _cut_otherwise(request: ExtractRequest, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """A sentence where asking understates what a model knows, for the tokens of the prompt alone."""
    which = request.models.by_role[UNLEARNED]
    tokenizer = load_tokenizer(which, request.loading)
    form = find_format(request.chat_format, tokenizer, which.source)
    count = sum(cut_otherwise(prompts(GREEDY, row, (), tokenizer, form, request.max_length)[0]) for row in rows)
    if not count:
        return []
    return [
        f"The prompts of {count} of {len(rows)} questions have other tokens alone than in front of their answers (they "
        "end in a space, say), so that a model is asked in tokens it was not trained on: all ways but the prefixes "
        "understate what it knows. Compare with the initial model, or use a chat format whose prompt ends in no space."
    ]


def _content(rows: Sequence[Mapping[str, Any]]) -> str:
    """``sha256:…`` of whole rows: a paraphrase is asked as well as the question."""
    text = json.dumps(list(rows), sort_keys=True, ensure_ascii=False, default=str)
    return f"sha256:{hashlib.sha256(text.encode('utf-8', 'surrogatepass')).hexdigest()}"


class _Asking:
    """One model, loaded, and everything there is to ask it."""

    def __init__(
        self, request: ExtractRequest, role: str, rows: Sequence[Mapping[str, Any]], kept: Sequence[Mapping[str, Any]]
    ) -> None:
        self.request, self.role, self.rows, self.kept = request, role, rows, kept
        which = request.models.by_role[role]
        form = find_format(request.chat_format, load_tokenizer(which, request.loading), which.source)
        self.model, self.tokenizer = load(which, request.loading, joined_device())
        self.form, self.judge = form, HitJudge(request.threshold)

    def __call__(self, way: str, seed: int) -> dict[str, Any]:
        request = self.request
        asked = [prompts(way, row, self.kept, self.tokenizer, self.form, request.max_length) for row in self.rows]
        flat = [prompt for each in asked for prompt in each]
        if way == LENS:
            return {"layers": through_the_lens(self.model, self.tokenizer, flat)}
        options = {"new": request.max_new_tokens, "batch_size": request.batch_size}
        if way == SAMPLE:
            truths = [row["answer"] for row in self.rows]
            drawn = sampled(
                self.model,
                self.tokenizer,
                flat,
                samples=request.samples,
                temperature=request.temperature,
                seed=seed,
                **options,
            )
            questions = [
                [self._scored(row, truth, text) for text in texts]
                for row, truth, texts in zip(self.rows, truths, drawn, strict=True)
            ]
            return {
                "rouge": [[score[0] for score in each] for each in questions],
                "named": [[score[1] for score in each] for each in questions],
                "seed": seed,
            }
        answers = iter(greedily(self.model, self.tokenizer, flat, title=way, **options))
        best: list[tuple[float, float | None, str]] = []
        for row, forms in zip(self.rows, asked, strict=True):
            said = [next(answers) for _ in forms]
            scored = [
                (*self._scored(row, each["ground_truth"], each["generation"]), each["generation"]) for each in said
            ]
            best.append(max(scored, key=lambda score: score[0]))
        return {
            "rouge": [score[0] for score in best],
            "named": [score[1] for score in best],
            "said": [score[2] for score in best],
        }

    def _scored(self, row: Mapping[str, Any], truth: str, said: str) -> tuple[float, float | None]:
        """ROUGE-L recall of what was still to be said, and whether all names in it were; those asked for are known."""
        shown = row["question"] if truth == row["answer"] else row["question"] + " " + _before(row["answer"], truth)
        return self.judge.rouge(truth, said), self.judge.named(entities(truth, shown), said)


def _before(answer: str, rest: str) -> str:
    """The part of the answer that the prompt held already."""
    return answer[: -len(rest)] if rest and answer.endswith(rest) else ""


def summary(
    found: Mapping[tuple[str, str, int], Mapping[str, Any]], ks: Sequence[int], threshold: float
) -> list[dict[str, Any]]:
    """For each way, seed and measure the mean of every model and the difference to the retain model, with intervals."""
    lines: list[dict[str, Any]] = []
    for way, seed in dict.fromkeys((way, seed) for _, way, seed in found):
        measures: dict[str, dict[str, list[float | None]]] = {}
        for (role, *asked), cell in found.items():
            if asked == [way, seed]:
                for measure, values in _per_question(way, cell, ks, threshold).items():
                    measures.setdefault(measure, {})[role] = values
        for measure, by_role in measures.items():
            lines.append({"way": way, "measure": measure, "seed": seed, **_line(by_role, seed)})
    return lines


def _per_question(
    way: str, cell: Mapping[str, Any], ks: Sequence[int], threshold: float
) -> dict[str, list[float | None]]:
    """Measure → a value for each question; None where an answer holds no name."""
    if way == LENS:
        return {f"layer {at}": [each[at] for each in cell["layers"]] for at in range(len(cell["layers"][0]))}
    if way != SAMPLE:
        hits: list[float | None] = [float(score >= threshold) for score in cell["rouge"]]
        return {"rouge": list(cell["rouge"]), "hit": hits, "named": list(cell["named"])}
    measures: dict[str, list[float | None]] = {}
    for k in ks:
        scores, named = cell["rouge"], cell["named"]
        measures[f"leak@{k}"] = [leak_at(sum(s >= threshold for s in each), len(each), k) for each in scores]
        measures[f"leak@{k}, named"] = [
            None if each[0] is None else leak_at(int(sum(each)), len(each), k) for each in named
        ]
        measures[f"best rouge of {k}"] = [expected_best(each, k) for each in scores]
    return measures


def _line(by_role: Mapping[str, Sequence[float | None]], seed: int) -> dict[str, Any]:
    means: dict[str, dict[str, float]] = {}
    for role, values in by_role.items():
        known = [value for value in values if value is not None]
        if known:
            means[role] = _interval(bootstrap(known, seed))
    line: dict[str, Any] = {"means": means}
    if RETAIN in by_role and UNLEARNED in by_role:
        pairs = zip(by_role[UNLEARNED], by_role[RETAIN], strict=True)
        differences = [mine - other for mine, other in pairs if mine is not None and other is not None]
        if differences:
            line["difference"] = _interval(bootstrap(differences, seed))
    return line


def _interval(interval: Interval) -> dict[str, float]:
    return dict(interval._asdict())
