"""Plain text to forget and to keep, as settings name it: one or several forget corpora, one retain corpus."""

from __future__ import annotations

from functools import partial
from typing import Any

from ..data.corpus import TextCorpus, load_corpus
from ..errors import ConfigError
from .settings import RunArguments


def lengths_of(arguments: RunArguments) -> list[tuple[str, int]]:
    """Each forget corpus with the length to which its documents are cut."""
    sources = [arguments.forget_data] if isinstance(arguments.forget_data, str) else list(arguments.forget_data or [])
    given, count = arguments.max_length, len(sources)
    lengths = [given] * count if isinstance(given, int) else given
    if len(lengths) != count or not all(isinstance(length, int) for length in lengths):
        raise ConfigError(f"max_length={given!r} must be one number, or one for each of the {count} forget corpora.")
    return list(zip(sources, lengths, strict=True))


def read_corpora(arguments: RunArguments, tokenizer: Any) -> tuple[list[TextCorpus], TextCorpus]:
    """The documents to forget, by corpus, and those to keep."""
    sources = lengths_of(arguments)
    corpus = partial(
        load_corpus,
        tokenizer=tokenizer,
        text_key=arguments.text_key,
        min_length=arguments.min_length,
        limit=arguments.limit,
    )
    forget = [corpus(name, max_length=length, corpus=number) for number, (name, length) in enumerate(sources)]
    assert arguments.retain_data is not None
    return forget, corpus(arguments.retain_data, max_length=max(length for _, length in sources))
