"""Fluency: how sure a classifier is that an answer is language and not gibberish (OpenUnlearning's
``forget_Q_A_gibberish``). The classifier comes from the hub or from a local folder of the same architecture."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ...compat import dtype_argument
from ...errors import ConfigError
from ..model_identity import TOKENIZER_FILES

DEFAULT = "madhurjindal/autonlp-Gibberish-Detector-492513457"
CLEAN = 0  # the class "clean" among clean, mild gibberish, noise, word salad
MAX_LENGTH, BATCH_SIZE = 32, 32

logger = logging.getLogger(__name__)


def available(name: str | None) -> bool:
    """Whether the classifier can be loaded. The default one may be out of reach: a warning; any other must be there."""
    from transformers import AutoConfig

    if name is None:
        return False
    try:
        _check(AutoConfig.from_pretrained(name), Path(name).expanduser())
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        if name != DEFAULT:
            where = "folder" if Path(name).exists() else "folder or hub id"
            raise ConfigError(
                f"--fluency-model {name!r} is not the {where} of a classifier ({reason}). Give one, or 'none'."
            ) from error
        logger.warning(
            "The fluency classifier %s is out of reach (%s): forget_Q_A_gibberish is left out and Util is model "
            "utility alone. Give a local copy with --fluency-model FOLDER.",
            name,
            reason,
        )
        return False
    return True


def _check(config: Any, folder: Path) -> None:
    """Raise for what is no classifier, now rather than after all answers were generated."""
    kinds = config.architectures or []
    if not any(kind.endswith("ForSequenceClassification") for kind in kinds):
        raise ValueError(f"its architecture is {', '.join(kinds) or 'unknown'}")
    if folder.is_dir() and not [*folder.glob("*.safetensors"), *folder.glob("*.bin")]:
        raise OSError("there are no weights in it")
    if folder.is_dir() and not any((folder / file).is_file() for file in TOKENIZER_FILES):
        raise OSError("there is no tokenizer in it")


class Classifier:
    """The classifier on a device, in float32."""

    def __init__(self, name: str, device: torch.device) -> None:
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(name)
        self.model: Any = AutoModelForSequenceClassification.from_pretrained(name, **dtype_argument(torch.float32))
        self.model.to(device).eval()

    @torch.inference_mode()
    def __call__(self, texts: Sequence[str]) -> list[float]:
        """p(clean) of each text's first 32 tokens."""
        inputs = self.tokenizer(
            list(texts), return_tensors="pt", padding=True, truncation=True, max_length=MAX_LENGTH
        ).to(self.model.device)
        shares: list[float] = torch.softmax(self.model(**inputs).logits, -1)[:, CLEAN].tolist()
        return shares
