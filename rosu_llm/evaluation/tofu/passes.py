"""The passes of one model over its questions: each measures several metrics at once and then writes them to disk."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from ...data.batching import plan_batches
from ...data.chat_format import IGNORE
from ...errors import ConfigError
from ..processes import BatchJob, from_first, run_jobs
from .document import Entry, TofuStore
from .generation import CLASSIFIED_AT_ONCE, FluencyClassifier, generate, rouge, text_of
from .metrics import (
    ATTACKS,
    GENERATED,
    MEMORISED,
    PROBABILITIES,
    AnswerField,
    TofuSettings,
    attack_entry,
    entry,
    score_entry,
)
from .packing import packed_length
from .questions import Encoder
from .summary import FLUENCY
from .token_statistics import TokenStatistics, may_share, token_statistics

logger = logging.getLogger(__name__)

FORGET, HOLDOUT = PROBABILITIES["forget_Q_A_Prob"], AnswerField("holdout", "answer")

#: For each of several sets of answers: the statistics of every answer of every question.
Scores = list[list[list[TokenStatistics]]]


class Pass(NamedTuple):
    """What is measured together: the work on the model, and how its results become metrics."""

    jobs: tuple[BatchJob, ...]
    make: Callable[..., dict[str, Entry]]


class Passes:
    """All passes that an evaluation needs, in their order.

    Args:
        model: in evaluation mode, on its device.
        encoder: gives the samples, and has the tokenizer.
        store: takes the results.
    """

    def __init__(self, model: Any, settings: TofuSettings, encoder: Encoder, store: TofuStore) -> None:
        self.model, self.settings, self.encoder, self.store = model, settings, encoder, store
        self.tokenizer = tokenizer = encoder.tokenizer
        # OpenUnlearning's choice where a tokenizer has no padding token
        self.pad = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        self._plan = partial(plan_batches, batch_size=settings.batch_size, batch_tokens=settings.batch_tokens)

    def run(self, metrics: set[str]) -> None:
        """Run every pass that one of the metrics still needs; all samples are encoded and checked before the first."""
        missing = metrics - self.store.entries.keys()
        todo: dict[str, Callable[[], Pass]] = {}
        samples: set[AnswerField] = set()
        for metric, dataset in GENERATED.items():  # slowest batches first, so that no process idles at the end
            if metric in missing:
                samples.add(AnswerField(dataset, "answer"))
                todo[metric] = partial(self._rouge, metric, dataset)
        if missing & {"forget_Q_A_Prob", *MEMORISED, *ATTACKS}:
            attacked = bool(missing & set(ATTACKS))
            samples |= {FORGET, HOLDOUT} if attacked else {FORGET}
            todo["forget_Q_A_Prob"] = partial(self._forget_answers, attacked)
        for dataset in dict.fromkeys(GENERATED.values()):  # answers to the same questions share a pass
            asked = {
                name: which for name, which in PROBABILITIES.items() if which.dataset == dataset and name in missing
            }
            asked.pop("forget_Q_A_Prob", None)
            if asked:
                samples |= set(asked.values())
                todo[f"{dataset}_Q_A_*Prob"] = partial(self._probabilities, dataset, asked)
        for which in sorted(samples):
            self.encoder(which)
        self._check_tokens(samples)
        self._check_room(missing)
        self._run({name: prepare() for name, prepare in todo.items()})
        if FLUENCY in missing:  # it classifies the generated answers
            self._run({FLUENCY: self._fluency()})

    def _run(self, passes: Mapping[str, Pass]) -> None:
        """Run passes on all processes; each is written to disk when its last job is finished."""
        owners = [(name, place) for name, each in passes.items() for place in range(len(each.jobs))]
        found: dict[str, dict[int, list[Any]]] = {name: {} for name in passes}
        seconds = dict.fromkeys(passes, 0.0)
        done: dict[str, Entry] = {}

        def finished(number: int, values: list[Any], took: float) -> None:
            name, place = owners[number]
            found[name][place] = values
            seconds[name] += took
            if len(found[name]) == len(passes[name].jobs):
                results = found.pop(name)
                entries = passes[name].make(*(results[place] for place in sorted(results)))
                self.store.put(entries, name, seconds[name])
                done.update(entries)
                number = len(passes) - len(found)
                logger.info("%d of %d passes: %s, %.1f s", number, len(passes), ", ".join(entries), seconds[name])

        if passes:
            run_jobs([job for each in passes.values() for job in each.jobs], finished)
            self.store.entries.update(from_first(lambda: done))

    def _check_tokens(self, samples: set[AnswerField]) -> None:
        """Raise if the tokenizer has tokens the model has not; warn of truncated answers."""
        encoded = [sample for which in samples for answers in self.encoder(which) for sample in answers]
        rows = self.model.get_input_embeddings().weight.shape[0]
        highest = max([self.pad, *(max(sample.input_ids) for sample in encoded)])
        if highest >= rows:
            raise ConfigError(
                f"The tokenizer's token {highest} ({self.tokenizer.convert_ids_to_tokens(highest)!r}) has no row among "
                f"the model's {rows} embeddings: it is another model's tokenizer, or the model was not resized to it."
            )
        cut = 0 if self.encoder.form.apply_chat_template else self.encoder.max_length
        if cut and (number := sum(len(sample.input_ids) > cut for sample in encoded)):
            logger.warning("%d answers were cut at --max-length %d, as OpenUnlearning does.", number, cut)

    def _check_room(self, metrics: set[str]) -> None:
        """Answers may exceed the model's context: an error with learned positions, a warning with rotary ones."""
        context, new = self.encoder.context, self.settings.max_new_tokens
        asked = [self.encoder(AnswerField(dataset, "answer")) for name, dataset in GENERATED.items() if name in metrics]
        longest = max((len(sample[0].prompt_ids) for samples in asked for sample in samples), default=0)
        if asked and context is not None and longest + new > context:
            text = (
                f"Prompts of up to {longest} tokens and answers of up to {new} exceed the model's context of {context} "
                f"tokens: --max-new-tokens {context - longest} would fit."
            )
            tables = [module for module in self.model.modules() if isinstance(module, torch.nn.Embedding)]
            sizes = [table.num_embeddings for table in tables if table is not self.model.get_input_embeddings()]
            if any(context <= size <= context + 2 for size in sizes):  # a table of positions; OPT's has 2 more
                raise ConfigError(text)
            logger.warning(text)

    def _probabilities(self, dataset: str, asked: Mapping[str, AnswerField]) -> Pass:
        job, arrange = self._scoring(list(asked.values()), f"{dataset} probabilities")

        def make(values: list[Any]) -> dict[str, Entry]:
            return {metric: _probability_entry(each) for metric, each in zip(asked, arrange(values), strict=True)}

        return Pass((job,), make)

    def _forget_answers(self, attacked: bool) -> Pass:
        """Probability, memorisation and, with the holdout set, the attacks."""
        sets = (FORGET, HOLDOUT) if attacked else (FORGET,)
        scorings = [self._scoring([which], f"{which.dataset} answers", full=True) for which in sets]

        def make(*values: list[Any]) -> dict[str, Entry]:
            scored = [arrange(found)[0] for (_, arrange), found in zip(scorings, values, strict=True)]
            members = [answers[0] for answers in scored[0]]
            entries = {
                "forget_Q_A_Prob": _probability_entry(scored[0]),
                "extraction_strength": score_entry(tokens.extraction_strength() for tokens in members),
                "exact_memorization": score_entry(tokens.exact_memorization() for tokens in members),
            }
            if attacked:
                inside, outside = map(self._attack_scores, scored, sets)
                entries |= {attack: attack_entry(inside[attack], outside[attack]) for attack in ATTACKS}
            return entries

        return Pass(tuple(job for job, _ in scorings), make)

    def _attack_scores(self, scored: Sequence[Sequence[TokenStatistics]], which: AnswerField) -> dict[str, list[float]]:
        statistics = [answers[0] for answers in scored]
        clean = bool(getattr(self.tokenizer, "clean_up_tokenization_spaces", False))
        answers = [[label for label in samples[0].labels if label != IGNORE] for samples in self.encoder(which)]
        texts = [text_of(self.tokenizer, answer, clean=clean) for answer in answers]
        return {
            "mia_loss": [tokens.average_loss() for tokens in statistics],
            "mia_zlib": [tokens.zlib_loss(text) for tokens, text in zip(statistics, texts, strict=True)],
            "mia_min_k": [tokens.min_k() for tokens in statistics],
            "mia_min_k_plus_plus": [tokens.min_k_plus_plus() for tokens in statistics],
        }

    def _scoring(
        self, parts: Sequence[AnswerField], title: str, *, full: bool = False
    ) -> tuple[BatchJob, Callable[[list[Any]], Scores]]:
        """The job that scores the parts' answers, all to the same questions, and a function that sorts results by part.

        Answers to one question share its prompt if the model supports it.
        """
        asked = [self.encoder(which) for which in parts]
        questions = [[sample for answers in same for sample in answers] for same in zip(*asked, strict=True)]
        longest = max(questions, key=packed_length)  # the trial row: only a long one shows an attention window
        shares = len(longest) > 1 and from_first(lambda: may_share(self.model, longest, self.pad))
        rows = questions if shares else [[sample] for answers in questions for sample in answers]

        def work(batch: Sequence[int]) -> list[Any]:
            samples = [sample for at in batch for sample in rows[at]]
            found = iter(token_statistics(self.model, samples, self.pad, full=full, share=shares))
            return [[next(found).plain() for _ in rows[at]] for at in batch]

        def arrange(scored: list[Any]) -> Scores:
            flat = (TokenStatistics.from_plain(tokens) for row in scored for tokens in row)
            by_question = [iter([next(flat) for _ in answers]) for answers in questions]
            return [
                [[next(tokens) for _ in answers] for tokens, answers in zip(by_question, part, strict=True)]
                for part in asked
            ]

        return BatchJob(title, self._plan([packed_length(row) for row in rows]), work), arrange

    def _rouge(self, metric: str, dataset: str) -> Pass:
        from rouge_score.rouge_scorer import RougeScorer

        logging.getLogger("absl").setLevel(logging.WARNING)  # the scorer logs which tokenizer it uses
        scorer = RougeScorer(["rouge1", "rougeL"], use_stemmer=True)
        samples = [answers[0] for answers in self.encoder(AnswerField(dataset, "answer"))]
        new = self.settings.max_new_tokens

        def work(batch: Sequence[int]) -> list[dict[str, Any]]:
            answered = generate(self.model, self.tokenizer, [samples[at] for at in batch], self.pad, new)
            return [{**rouge(scorer, each["ground_truth"], each["generation"]), **each} for each in answered]

        # a batch runs until its last sequence ends, so sequences of similar expected length share one
        expected = [(len(sample.input_ids) - len(sample.prompt_ids), len(sample.prompt_ids)) for sample in samples]
        job = BatchJob(metric, self._plan([len(sample.prompt_ids) + new for sample in samples], order=expected), work)
        return Pass((job,), lambda values: {metric: entry(dict(enumerate(values)), "rougeL_recall")})

    def _fluency(self) -> Pass:
        name = str(self.settings.fluency_model)
        classify = FluencyClassifier(name, next(self.model.parameters()).device)
        generated = self.store.entries["forget_Q_A_ROUGE"]["value_by_index"].values()
        texts = [str(answer["generation"]) for answer in generated]

        def work(batch: Sequence[int]) -> list[float]:
            return classify([texts[at] for at in batch])

        def make(scores: list[Any]) -> dict[str, Entry]:
            scored = enumerate(zip(scores, texts, strict=True))
            return {FLUENCY: entry({at: {"score": score, "generation": text} for at, (score, text) in scored}, "score")}

        order, size = range(len(texts)), CLASSIFIED_AT_ONCE
        batches = [order[at : at + size] for at in order[::size]]
        self.store.sidecar["fluency_model"] = name
        return Pass((BatchJob(FLUENCY, batches, work),), make)


def _probability_entry(scored: Sequence[Sequence[TokenStatistics]]) -> Entry:
    """Probability and loss of each question's answer; lists where there are several."""
    by_index: dict[int, dict[str, Any]] = {}
    for at, answers in enumerate(scored):
        found = {
            "prob": [tokens.probability() for tokens in answers],
            "avg_loss": [tokens.average_loss() for tokens in answers],
        }
        by_index[at] = {key: values[0] if len(values) == 1 else values for key, values in found.items()}
    return entry(by_index, "prob")
