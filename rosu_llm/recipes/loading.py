"""What both levels load alike."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..errors import ConfigError, one_line
from .settings import RunArguments


@dataclass(frozen=True)
class Loaded:
    """What a trainer is built from.

    Attributes:
        model: a model; at representation level its name or folder, of which the trainer loads the layers it needs.
        forget: samples; at representation level a list of corpora that are taken in turn.
        retain, holdout: samples, or one corpus.
    """

    model: Any
    tokenizer: Any
    forget: Any
    retain: Any
    holdout: Any = None


def load_tokenizer(arguments: RunArguments) -> Any:
    """The model's tokenizer, able to pad."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            arguments.model_name_or_path, trust_remote_code=arguments.trust_remote_code
        )
    except (OSError, ValueError) as error:
        raise not_loaded(arguments, "tokenizer", error) from error
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token is None:
            raise ConfigError(
                f"The tokenizer of {arguments.model_name_or_path!r} has neither a pad nor an end-of-text token: set "
                "pad_token in its tokenizer_config.json."
            )
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def not_loaded(arguments: RunArguments, what: str, error: Exception) -> ConfigError:
    """The error for a model or tokenizer that is neither a folder nor on the hub."""
    return ConfigError(
        f"model_name_or_path={arguments.model_name_or_path!r}: the {what} could not be loaded as a folder or from the "
        f"hub. {one_line(error)[:300]}"
    )
