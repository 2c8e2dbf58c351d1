"""The third answers of a run's forget samples, from its settings: refusals, or other plausible answers."""

from __future__ import annotations

from typing import Any

from ..data.alternates import listed_alternates, nearest_alternates
from ..data.chat_format import ChatFormat
from ..data.question_answer import QuestionAnswerDataset
from ..data.sources import Pairs, read_pairs, read_rows
from ..data.third_answers import WithAlternates, check_differs, drawn_refusals, read_alternates, read_refusals
from ..errors import ConfigError, DataError
from .settings import Recipe, RunArguments


def check_third(recipe: Recipe) -> None:
    """Raise for a third answer that is missing, or that nobody asks for."""
    arguments, config = recipe
    loss, wanted = f"forget_loss={config.forget_loss!r}", config.loss("forget").alternative
    if wanted == "alternates" and arguments.alternates is None and arguments.alternates_key is None:
        raise DataError(
            f"{loss} prefers another plausible answer, and there is none: generate some with 'rosu data alternates "
            "MODEL --data FILE --output FILE' and pass --alternates FILE, or name the field of forget_data that lists "
            "them with --alternates-key."
        )
    if arguments.refusals is not None and wanted != "refusals":
        raise ConfigError(
            f"refusals={arguments.refusals!r} would be ignored by {loss}: leave it out, or use idk_nll or idk_dpo."
        )
    if arguments.alternates is not None and wanted != "alternates" and config.forget_until != "alternates":
        raise ConfigError(
            f"alternates={arguments.alternates!r} would be ignored by {loss}: leave it out, or use altpo, or "
            "forget_until: alternates."
        )


def with_third(forget: Any, recipe: Recipe, tokenizer: Any, form: ChatFormat | None) -> Any:
    """The forget samples with what the model is to say instead, where the loss needs that."""
    arguments, config = recipe
    wanted = config.loss("forget").alternative
    if forget is None or wanted == "none":
        return forget
    if wanted == "alternates":
        return WithAlternates(forget, alternate_samples(arguments, tokenizer, form))
    refusals = read_refusals(arguments.refusals)
    questions = [question for question, _ in _pairs(arguments, arguments.forget_data)]
    if None in questions:
        raise DataError(
            f"forget_loss={config.forget_loss!r} answers questions with refusals, and forget_data has rows of plain "
            "text: use another forget_loss."
        )
    return WithAlternates(
        forget, _encoded(drawn_refusals(questions, refusals, config.seed), arguments, tokenizer, form)
    )


def alternate_samples(arguments: RunArguments, tokenizer: Any, form: ChatFormat | None) -> list[Any]:
    """Samples with wrong answers, a list for each forget row."""
    asked, source = _pairs(arguments, arguments.forget_data), str(arguments.forget_data)
    if arguments.alternates is not None:
        found = read_alternates(arguments.alternates, asked)
    elif arguments.alternates_key is not None:
        rows = read_rows(source)[: arguments.limit]
        found = listed_alternates(rows, source, arguments.alternates_key, arguments.question_key)
        for number, ((_, answer), own) in enumerate(zip(asked, found, strict=True), 1):
            check_differs([other for _, other in own], answer, f"Row {number} of {source!r}")
    elif arguments.retain_data is None:
        raise DataError(
            "forget_until: alternates without retain_data has no other answers to compare with: name the field that "
            "lists them (--alternates-key perturbed_answer), or a file of them (--alternates FILE)."
        )
    else:
        found = nearest_alternates(asked, _pairs(arguments, arguments.retain_data))
    return _encoded(found, arguments, tokenizer, form)


def _pairs(arguments: RunArguments, source: Any) -> Pairs:
    keys = (arguments.question_key, arguments.answer_key, arguments.text_key)
    return read_pairs(str(source), *keys, arguments.limit)


def _encoded(lists: list[Pairs], arguments: RunArguments, tokenizer: Any, form: ChatFormat | None) -> list[Any]:
    length = int(arguments.max_length)  # type: ignore[arg-type]  # a list is refused before
    return [QuestionAnswerDataset(own, tokenizer, max_length=length, chat_format=form).samples for own in lists]
