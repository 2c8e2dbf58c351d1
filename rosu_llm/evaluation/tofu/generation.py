"""What a model answers: greedy generation, and its figures, ROUGE and fluency.

The reference answer is not the row's text but the decoded conversation without the decoded prompt, so that both sides
went through the same tokenizer. Spaces before punctuation are removed on both sides, which transformers 5 no longer
does for byte-pair tokenizers.

Fluency is how sure a classifier is that an answer is language and not gibberish (OpenUnlearning's
``forget_Q_A_gibberish``). The classifier comes from the hub or from a local folder of the same architecture.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...compat import dtype_argument
from ...data.chat_format import Encoded
from ...errors import ConfigError, NonFiniteError
from ..model_identity import TOKENIZER_FILES
from .token_statistics import BROKEN

ROUND = 8  # tokens
#: Generation settings that count tokens; 0 and None turn them off.
COUNTED = ("min_length", "min_new_tokens", "begin_suppress_tokens", "exponential_decay_length_penalty")
#: Tokens that must come first or last; None turns them off, 0 is a token.
FORCED = ("forced_bos_token_id", "forced_eos_token_id")

CLASSIFIER = "madhurjindal/autonlp-Gibberish-Detector-492513457"
CLEAN = 0  # the class "clean" among clean, mild gibberish, noise, word salad
CLASSIFIED_TOKENS, CLASSIFIED_AT_ONCE = 32, 32

logger = logging.getLogger(__name__)


@torch.inference_mode()
def generate(
    model: Any, tokenizer: Any, batch: Sequence[Encoded], pad: int, max_new_tokens: int, *, stop: Sequence[str] = ()
) -> list[dict[str, str]]:
    """Greedy answers of one batch, padded on the left: ``input``, ``ground_truth`` and ``generation`` of each.

    An answer ends before the first of the texts ``stop``.
    """
    device = next(model.parameters()).device
    longest = max(len(sample.prompt_ids) for sample in batch)
    rows = [[*[pad] * (longest - len(sample.prompt_ids)), *sample.prompt_ids] for sample in batch]
    ids = torch.tensor(rows, device=device)
    # the mask hides every padding token, as for given answers
    generations = _greedy(model, ids, (ids != pad).long(), tokenizer.eos_token_id, max_new_tokens)
    end = tokenizer.decode([tokenizer.eos_token_id], clean_up_tokenization_spaces=False)
    answered = []
    for sample, new in zip(batch, generations, strict=True):
        asked, whole = text_of(tokenizer, sample.prompt_ids), text_of(tokenizer, sample.input_ids)
        generated = text_of(tokenizer, new)
        for text in (end, *stop):
            if text:
                generated = generated.split(text)[0]
        truth = whole.replace(asked, "").strip()
        answered.append({"input": asked, "ground_truth": truth, "generation": generated.strip()})
    return answered


def _greedy(model: Any, ids: Tensor, mask: Tensor, pad: int, max_new_tokens: int) -> list[list[int]]:
    """The new tokens of each row.

    The cost of a batch is its rows times its longest answer, so one answer that never ends would slow down all rows.
    Generation therefore runs in rounds of ``ROUND`` tokens, after each of which finished rows leave batch and cache.
    """
    from transformers import DynamicCache, LogitsProcessorList

    settings = model.generation_config
    ends = settings.eos_token_id
    broken = torch.zeros((), dtype=torch.bool, device=ids.device)

    def watch(_: Tensor, scores: Tensor) -> Tensor:
        broken.logical_or_(scores.isnan().any())
        return scores

    # settings that count tokens, or keep several continuations, need all tokens in one round
    counts = any(getattr(settings, name, None) for name in COUNTED)
    forces = any(getattr(settings, name, None) is not None for name in FORCED)
    length = max_new_tokens if counts or forces or (settings.num_beams or 1) > 1 else ROUND
    ends = torch.tensor([] if ends is None else ends, device=ids.device).reshape(-1)
    found: list[list[int]] = [[] for _ in ids]
    left = list(range(len(ids)))
    cache = None
    for done in range(0, max_new_tokens, length):
        output = model.generate(
            ids,
            attention_mask=mask,
            past_key_values=cache,
            max_new_tokens=min(length, max_new_tokens - done),
            logits_processor=LogitsProcessorList([watch]),
            return_dict_in_generate=True,
            do_sample=False,
            temperature=None,
            top_p=None,
            use_cache=True,
            pad_token_id=pad,
        )
        if broken:
            raise NonFiniteError(BROKEN)
        new = output.sequences[:, ids.shape[1] :]
        for row, tokens in zip(left, new.tolist(), strict=True):
            found[row] += tokens
        going = (~torch.isin(new, ends).any(-1)).nonzero().flatten()
        if not len(going):
            break
        left = [left[row] for row in going.tolist()]
        ids = output.sequences[going]
        mask = torch.cat([mask, torch.ones_like(new)], 1)[going]
        cache = output.past_key_values
        if isinstance(cache, DynamicCache):
            cache.batch_select_indices(going)
        else:  # a cache that cannot drop rows: the next round reads the prompt again
            cache = None
    return found


def text_of(tokenizer: Any, ids: Sequence[int], *, clean: bool = True) -> str:
    """Decoded text without special tokens; ``clean`` removes the spaces before punctuation."""
    text: str = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return str(tokenizer.clean_up_tokenization(text)) if clean else text


def rouge(scorer: Any, truth: str, generated: str) -> dict[str, float]:
    """ROUGE-1 recall and ROUGE-L of a generated answer."""
    scores = scorer.score(truth, generated)
    return {
        "rouge1_recall": float(scores["rouge1"].recall),
        "rougeL_f1": float(scores["rougeL"].fmeasure),
        "rougeL_recall": float(scores["rougeL"].recall),
    }


def classifier_available(name: str | None) -> bool:
    """Whether the classifier can be loaded; warns if the default one cannot, raises if another one cannot."""
    from transformers import AutoConfig

    if name is None:
        return False
    try:
        _check(AutoConfig.from_pretrained(name), Path(name).expanduser())
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        if name != CLASSIFIER:
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
    """Raise if this is no classifier, before any answer is generated."""
    kinds = config.architectures or []
    if not any(kind.endswith("ForSequenceClassification") for kind in kinds):
        raise ValueError(f"its architecture is {', '.join(kinds) or 'unknown'}")
    if folder.is_dir() and not [*folder.glob("*.safetensors"), *folder.glob("*.bin")]:
        raise OSError("there are no weights in it")
    if folder.is_dir() and not any((folder / file).is_file() for file in TOKENIZER_FILES):
        raise OSError("there is no tokenizer in it")


class FluencyClassifier:
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
            list(texts), return_tensors="pt", padding=True, truncation=True, max_length=CLASSIFIED_TOKENS
        ).to(self.model.device)
        shares: list[float] = torch.softmax(self.model(**inputs).logits, -1)[:, CLEAN].tolist()
        return shares
