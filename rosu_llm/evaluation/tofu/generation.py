"""What a model answers: greedy generation, and the texts that OpenUnlearning compares by ROUGE.

The reference answer is not the row's: it is the decoded conversation with the decoded prompt taken out of it, so that
both sides went through the same tokenizer. Spaces before punctuation are removed on both sides, which transformers 5
no longer does for byte-pair tokenizers by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...data.chat_format import Encoded
from ...errors import NonFiniteError
from .answers import BROKEN

ROUND = 8  # tokens
#: Settings of generation that count tokens: 0 or nothing means that they are off.
COUNTED = ("min_length", "min_new_tokens", "begin_suppress_tokens", "exponential_decay_length_penalty")
#: Tokens that must come first or last; 0 is a token.
FORCED = ("forced_bos_token_id", "forced_eos_token_id")


@dataclass(frozen=True)
class Answered:
    """One question with the answer it should get and the one it got."""

    input: str
    ground_truth: str
    generation: str


@torch.inference_mode()
def generate(model: Any, tokenizer: Any, batch: Sequence[Encoded], pad: int, max_new_tokens: int) -> list[Answered]:
    """Greedy answers of one batch, padded on the left."""
    device = next(model.parameters()).device
    longest = max(len(sample.prompt_ids) for sample in batch)
    rows = [[*[pad] * (longest - len(sample.prompt_ids)), *sample.prompt_ids] for sample in batch]
    ids = torch.tensor(rows, device=device)
    # padding by the token, as for given answers
    generations = _greedy(model, ids, (ids != pad).long(), tokenizer.eos_token_id, max_new_tokens)
    end = tokenizer.decode([tokenizer.eos_token_id], clean_up_tokenization_spaces=False)
    answered = []
    for sample, new in zip(batch, generations, strict=True):
        asked, whole = text_of(tokenizer, sample.prompt_ids), text_of(tokenizer, sample.input_ids)
        generated = text_of(tokenizer, new)
        if end:
            generated = generated.split(end)[0]
        answered.append(Answered(asked, whole.replace(asked, "").strip(), generated.strip()))
    return answered


def _greedy(model: Any, ids: Tensor, mask: Tensor, pad: int, max_new_tokens: int) -> list[list[int]]:
    """The new tokens of each row.

    A batch costs as much as its longest answer times its rows, and one answer that never ends would make all of them
    long. So it runs in rounds of ``ROUND`` tokens, and rows that have ended leave it, cache and all, after each.
    """
    from transformers import DynamicCache, LogitsProcessorList

    settings = model.generation_config
    ends = settings.eos_token_id
    broken = torch.zeros((), dtype=torch.bool, device=ids.device)

    def watch(_: Tensor, scores: Tensor) -> Tensor:
        broken.logical_or_(scores.isnan().any())
        return scores

    # settings that count from the first or to the last token, or keep several continuations, need it in one go
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
        else:  # of a fixed size, or of a kind of its own: the next round reads the prompt again
            cache = None
    return found


def text_of(tokenizer: Any, ids: Sequence[int], *, clean: bool = True) -> str:
    """Decoded text without special tokens; ``clean`` removes the spaces before punctuation."""
    text: str = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return str(tokenizer.clean_up_tokenization(text)) if clean else text
