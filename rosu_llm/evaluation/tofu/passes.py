"""The passes of one model over its questions: each measures several metrics at once, and ends with them on disk."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from ...data.chat_format import IGNORE
from ..tofu_summary import FLUENCY
from . import figures, fluency
from .answers import TokenStatistics, may_share, token_statistics
from .generation import generate, text_of
from .metrics import ATTACKS, GENERATED, MEMORISED, PROBABILITIES, Answers, Entry, attack_entry, entry
from .packing import packed_length
from .processes import from_first, plan, share
from .questions import Encoder
from .settings import TofuSettings
from .store import Store

logger = logging.getLogger(__name__)

FORGET, HOLDOUT = PROBABILITIES["forget_Q_A_Prob"], Answers("holdout", "answer")


class Passes:
    """What has to be run on the model, in which order.

    Args:
        model, tokenizer: in evaluation mode, on its device.
        encoder: gives the samples.
        store: takes the results.
    """

    def __init__(self, model: Any, tokenizer: Any, settings: TofuSettings, encoder: Encoder, store: Store) -> None:
        self.model, self.tokenizer, self.settings = model, tokenizer, settings
        self.encoder, self.store = encoder, store
        self._shares: bool | None = None
        # OpenUnlearning's choice where a tokenizer has no padding token
        self.pad = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id

    def run(self, metrics: set[str]) -> None:
        """Every pass that one of the metrics still needs; all samples are encoded, so checked, before the first."""
        missing = metrics - self.store.entries.keys()
        todo: dict[str, Callable[[], dict[str, Entry]]] = {}
        samples: set[Answers] = set()
        if missing & {"forget_Q_A_Prob", *MEMORISED, *ATTACKS}:
            attacked = bool(missing & set(ATTACKS))
            samples |= {FORGET, HOLDOUT} if attacked else {FORGET}
            todo["forget_Q_A_Prob"] = partial(self._forget_answers, attacked)
        for dataset in dict.fromkeys(GENERATED.values()):  # answers to the same questions go together
            asked = {
                name: which for name, which in PROBABILITIES.items() if which.dataset == dataset and name in missing
            }
            asked.pop("forget_Q_A_Prob", None)
            if asked:
                samples |= set(asked.values())
                todo[f"{dataset}_Q_A_*Prob"] = partial(self._probabilities, dataset, asked)
        for metric, dataset in GENERATED.items():
            if metric in missing:
                samples.add(Answers(dataset, "answer"))
                todo[metric] = partial(self._rouge, metric, dataset)
        if FLUENCY in missing:
            todo[FLUENCY] = self._fluency
        for which in sorted(samples):
            self.encoder(which)
        self._check_room(missing)
        for at, (name, work) in enumerate(todo.items(), 1):
            start = time.perf_counter()
            entries = work()
            seconds = time.perf_counter() - start
            self.store.entries.update(entries)
            from_first(partial(self.store.put, entries, name, seconds))
            logger.info("%d of %d passes: %s, %.1f s", at, len(todo), ", ".join(entries), seconds)

    def _check_room(self, metrics: set[str]) -> None:
        """Warn of answers that may run past the model's context: rotary positions go on, others fail there."""
        context, new = self.encoder.context, self.settings.max_new_tokens
        asked = [self.encoder(Answers(dataset, "answer")) for name, dataset in GENERATED.items() if name in metrics]
        longest = max((len(sample[0].prompt_ids) for samples in asked for sample in samples), default=0)
        if asked and context is not None and longest + new > context:
            logger.warning(
                "Prompts of up to %d tokens and answers of up to %d exceed the model's context of %d tokens: "
                "--max-new-tokens %d would fit.",
                longest,
                new,
                context,
                context - longest,
            )

    def _probabilities(self, dataset: str, asked: Mapping[str, Answers]) -> dict[str, Entry]:
        scored = self._score(list(asked.values()), f"{dataset} probabilities")
        return {metric: _probability_entry(each) for metric, each in zip(asked, scored, strict=True)}

    def _forget_answers(self, attacked: bool) -> dict[str, Entry]:
        """Probability, memorisation and, with the holdout set, the attacks."""
        (scored,) = self._score([FORGET], "forget answers", full=True)
        members = [answers[0] for answers in scored]
        strength = {at: {"score": figures.extraction_strength(tokens)} for at, tokens in enumerate(members)}
        exact = {at: {"score": figures.exact_memorization(tokens)} for at, tokens in enumerate(members)}
        entries = {
            "forget_Q_A_Prob": _probability_entry(scored),
            "extraction_strength": entry(strength, "score"),
            "exact_memorization": entry(exact, "score"),
        }
        if attacked:
            (unknown,) = self._score([HOLDOUT], "holdout answers", full=True)
            others = [answers[0] for answers in unknown]
            known, new = self._attack_scores(members, FORGET), self._attack_scores(others, HOLDOUT)
            entries |= {attack: attack_entry(known[attack], new[attack]) for attack in ATTACKS}
        return entries

    def _attack_scores(self, statistics: Sequence[TokenStatistics], which: Answers) -> dict[str, list[float]]:
        losses = [figures.average_loss(tokens) for tokens in statistics]
        clean = bool(getattr(self.tokenizer, "clean_up_tokenization_spaces", False))
        answers = [[label for label in samples[0].labels if label != IGNORE] for samples in self.encoder(which)]
        texts = [text_of(self.tokenizer, answer, clean=clean) for answer in answers]
        return {
            "mia_loss": losses,
            "mia_zlib": [figures.zlib_loss(loss, text) for loss, text in zip(losses, texts, strict=True)],
            "mia_min_k": [figures.min_k(tokens) for tokens in statistics],
            "mia_min_k_plus_plus": [figures.min_k_plus_plus(tokens) for tokens in statistics],
        }

    def _score(self, parts: Sequence[Answers], title: str, *, full: bool = False) -> list[list[list[TokenStatistics]]]:
        """For each part, all of the same questions, the statistics of every answer of every question.

        Answers to one question share its prompt where the model lets them.
        """
        asked = [self.encoder(which) for which in parts]
        questions = [[sample for answers in same for sample in answers] for same in zip(*asked, strict=True)]
        several = next((answers for answers in questions if len(answers) > 1), None)
        if several and self._shares is None:
            self._shares = from_first(lambda: may_share(self.model, several, self.pad))
        shares = bool(several and self._shares)
        rows = questions if shares else [[sample] for answers in questions for sample in answers]

        def work(batch: Sequence[int]) -> list[list[TokenStatistics]]:
            samples = [sample for at in batch for sample in rows[at]]
            found = iter(token_statistics(self.model, samples, self.pad, full=full, share=shares))
            return [[next(found) for _ in rows[at]] for at in batch]

        scored = share(self._plan([packed_length(row) for row in rows]), work, title)
        flat = (tokens for row in scored for tokens in row)
        by_question = [iter([next(flat) for _ in answers]) for answers in questions]
        return [
            [[next(tokens) for _ in answers] for tokens, answers in zip(by_question, part, strict=True)]
            for part in asked
        ]

    def _rouge(self, metric: str, dataset: str) -> dict[str, Entry]:
        from rouge_score.rouge_scorer import RougeScorer

        logging.getLogger("absl").setLevel(logging.WARNING)  # the scorer tells everyone which tokenizer it uses
        scorer = RougeScorer(["rouge1", "rougeL"], use_stemmer=True)
        samples = [answers[0] for answers in self.encoder(Answers(dataset, "answer"))]
        new = self.settings.max_new_tokens

        def work(batch: Sequence[int]) -> list[dict[str, Any]]:
            answered = generate(self.model, self.tokenizer, [samples[at] for at in batch], self.pad, new)
            return [{**figures.rouge(scorer, each.ground_truth, each.generation), **asdict(each)} for each in answered]

        # a batch runs until its last sequence has ended, so sequences that should end together share one
        expected = [(len(sample.input_ids) - len(sample.prompt_ids), len(sample.prompt_ids)) for sample in samples]
        batches = self._plan([len(sample.prompt_ids) + new for sample in samples], expected)
        return {metric: entry(dict(enumerate(share(batches, work, metric))), "rougeL_recall")}

    def _fluency(self) -> dict[str, Entry]:
        name = str(self.settings.fluency_model)
        classify = fluency.Classifier(name, next(self.model.parameters()).device)
        generated = self.store.entries["forget_Q_A_ROUGE"]["value_by_index"].values()
        texts = [str(answer["generation"]) for answer in generated]

        def work(batch: Sequence[int]) -> list[float]:
            return classify([texts[at] for at in batch])

        size = fluency.BATCH_SIZE
        batches = [list(range(at, min(at + size, len(texts)))) for at in range(0, len(texts), size)]
        scores = enumerate(zip(share(batches, work, FLUENCY), texts, strict=True))
        by_index = {at: {"score": score, "generation": text} for at, (score, text) in scores}
        self.store.record["fluency_model"] = name
        return {FLUENCY: entry(by_index, "score")}

    def _plan(self, lengths: Sequence[int], order: Sequence[Any] = ()) -> list[list[int]]:
        settings = self.settings
        return plan(lengths, order=order, batch_size=settings.batch_size, batch_tokens=settings.batch_tokens)


def _probability_entry(scored: Sequence[Sequence[TokenStatistics]]) -> Entry:
    """Probability and loss of each question's answer; lists where there are several."""
    by_index: dict[int, dict[str, Any]] = {}
    for at, answers in enumerate(scored):
        losses = [figures.average_loss(tokens) for tokens in answers]
        chances = [figures.probability(loss) for loss in losses]
        one = len(losses) == 1
        by_index[at] = {"prob": chances[0] if one else chances, "avg_loss": losses[0] if one else losses}
    return entry(by_index, "prob")
