"""The passes of one model over its questions: each measures several metrics at once, and ends with them on disk."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from ...data.chat_format import IGNORE
from ...errors import ConfigError
from . import figures, fluency
from .answers import TokenStatistics, may_share, token_statistics
from .generation import generate, text_of
from .metrics import ATTACKS, GENERATED, MEMORISED, PROBABILITIES, Answers, Entry, attack_entry, entry
from .packing import packed_length
from .processes import from_first
from .questions import Encoder
from .settings import TofuSettings
from .sharing import Job, plan, share
from .store import Store
from .summary import FLUENCY

logger = logging.getLogger(__name__)

FORGET, HOLDOUT = PROBABILITIES["forget_Q_A_Prob"], Answers("holdout", "answer")

#: For each of several sets of answers: the statistics of every answer of every question.
Scores = list[list[list[TokenStatistics]]]


@dataclass(frozen=True)
class Pass:
    """What is measured together.

    Attributes:
        jobs: what has to be done for it.
        make: the metrics, of the jobs' results.
    """

    jobs: tuple[Job, ...]
    make: Callable[..., dict[str, Entry]]


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
        # OpenUnlearning's choice where a tokenizer has no padding token
        self.pad = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id

    def run(self, metrics: set[str]) -> None:
        """Every pass that one of the metrics still needs; all samples are encoded, so checked, before the first."""
        missing = metrics - self.store.entries.keys()
        todo: dict[str, Callable[[], Pass]] = {}
        samples: set[Answers] = set()
        for metric, dataset in GENERATED.items():  # first, for their batches take longest: at the end one would wait
            if metric in missing:
                samples.add(Answers(dataset, "answer"))
                todo[metric] = partial(self._rouge, metric, dataset)
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
        for which in sorted(samples):
            self.encoder(which)
        self._check_tokens(samples)
        self._check_room(missing)
        self._share({name: prepare() for name, prepare in todo.items()})
        if FLUENCY in missing:  # it judges the generated answers
            self._share({FLUENCY: self._fluency()})

    def _share(self, passes: Mapping[str, Pass]) -> None:
        """Run them on all processes; each is on disk as soon as it is whole."""
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
            share([job for each in passes.values() for job in each.jobs], finished)
            self.store.entries.update(from_first(lambda: done))

    def _check_tokens(self, samples: set[Answers]) -> None:
        """Raise where the tokenizer knows tokens that the model does not; warn of answers that were cut."""
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
        """Answers that may run past the model's context: rotary positions go on, learned ones end there."""
        context, new = self.encoder.context, self.settings.max_new_tokens
        asked = [self.encoder(Answers(dataset, "answer")) for name, dataset in GENERATED.items() if name in metrics]
        longest = max((len(sample[0].prompt_ids) for samples in asked for sample in samples), default=0)
        if asked and context is not None and longest + new > context:
            text = (
                f"Prompts of up to {longest} tokens and answers of up to {new} exceed the model's context of {context} "
                f"tokens: --max-new-tokens {context - longest} would fit."
            )
            if _learned_positions(self.model, context):
                raise ConfigError(text)
            logger.warning(text)

    def _probabilities(self, dataset: str, asked: Mapping[str, Answers]) -> Pass:
        job, arrange = self._scoring(list(asked.values()), f"{dataset} probabilities")

        def make(values: list[Any]) -> dict[str, Entry]:
            return {metric: _probability_entry(each) for metric, each in zip(asked, arrange(values), strict=True)}

        return Pass((job,), make)

    def _forget_answers(self, attacked: bool) -> Pass:
        """Probability, memorisation and, with the holdout set, the attacks."""
        known, arrange = self._scoring([FORGET], "forget answers", full=True)

        def make(values: list[Any], *others: list[Any]) -> dict[str, Entry]:
            (scored,) = arrange(values)
            members = [answers[0] for answers in scored]
            strength = {at: {"score": figures.extraction_strength(tokens)} for at, tokens in enumerate(members)}
            exact = {at: {"score": figures.exact_memorization(tokens)} for at, tokens in enumerate(members)}
            entries = {
                "forget_Q_A_Prob": _probability_entry(scored),
                "extraction_strength": entry(strength, "score"),
                "exact_memorization": entry(exact, "score"),
            }
            for unseen in others:
                (scored,) = arrange_unseen(unseen)
                inside = self._attack_scores(members, FORGET)
                outside = self._attack_scores([answers[0] for answers in scored], HOLDOUT)
                entries |= {attack: attack_entry(inside[attack], outside[attack]) for attack in ATTACKS}
            return entries

        if not attacked:
            return Pass((known,), make)
        unknown, arrange_unseen = self._scoring([HOLDOUT], "holdout answers", full=True)
        return Pass((known, unknown), make)

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

    def _scoring(
        self, parts: Sequence[Answers], title: str, *, full: bool = False
    ) -> tuple[Job, Callable[[list[Any]], Scores]]:
        """The job that scores the answers of the parts, all to the same questions, and what sorts its results by part.

        Answers to one question share its prompt where the model lets them.
        """
        asked = [self.encoder(which) for which in parts]
        questions = [[sample for answers in same for sample in answers] for same in zip(*asked, strict=True)]
        longest = max(questions, key=packed_length)  # tried on: a window of attention shows there
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

        return Job(title, self._plan([packed_length(row) for row in rows]), work), arrange

    def _rouge(self, metric: str, dataset: str) -> Pass:
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
        return Pass(
            (Job(metric, batches, work),), lambda values: {metric: entry(dict(enumerate(values)), "rougeL_recall")}
        )

    def _fluency(self) -> Pass:
        name = str(self.settings.fluency_model)
        classify = fluency.Classifier(name, next(self.model.parameters()).device)
        generated = self.store.entries["forget_Q_A_ROUGE"]["value_by_index"].values()
        texts = [str(answer["generation"]) for answer in generated]

        def work(batch: Sequence[int]) -> list[float]:
            return classify([texts[at] for at in batch])

        def make(scores: list[Any]) -> dict[str, Entry]:
            scored = enumerate(zip(scores, texts, strict=True))
            return {FLUENCY: entry({at: {"score": score, "generation": text} for at, (score, text) in scored}, "score")}

        size = fluency.BATCH_SIZE
        batches = [list(range(at, min(at + size, len(texts)))) for at in range(0, len(texts), size)]
        self.store.record["fluency_model"] = name
        return Pass((Job(FLUENCY, batches, work),), make)

    def _plan(self, lengths: Sequence[int], order: Sequence[Any] = ()) -> list[list[int]]:
        settings = self.settings
        return plan(lengths, order=order, batch_size=settings.batch_size, batch_tokens=settings.batch_tokens)


def _learned_positions(model: Any, context: int) -> bool:
    """Whether the model looks positions up in a table, besides its tokens."""
    tables = [module for module in model.modules() if isinstance(module, torch.nn.Embedding)]
    tokens = model.get_input_embeddings()
    return any(table is not tokens and context <= table.num_embeddings <= context + 2 for table in tables)  # OPT: +2


def _probability_entry(scored: Sequence[Sequence[TokenStatistics]]) -> Entry:
    """Probability and loss of each question's answer; lists where there are several."""
    by_index: dict[int, dict[str, Any]] = {}
    for at, answers in enumerate(scored):
        losses = [figures.average_loss(tokens) for tokens in answers]
        chances = [figures.probability(loss) for loss in losses]
        one = len(losses) == 1
        by_index[at] = {"prob": chances[0] if one else chances, "avg_loss": losses[0] if one else losses}
    return entry(by_index, "prob")
