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

from ...data.chat_format import Encoded


@dataclass(frozen=True)
class Answered:
    """One question with the answer it should get and the one it got."""

    input: str
    ground_truth: str
    generation: str


@torch.inference_mode()
def generate(model: Any, tokenizer: Any, batch: Sequence[Encoded], pad: int, max_new_tokens: int) -> list[Answered]:
    """Greedy answers of one batch, padded on the left; it ends when every sequence has ended."""
    device = next(model.parameters()).device
    longest = max(len(sample.prompt_ids) for sample in batch)
    rows = [[*[pad] * (longest - len(sample.prompt_ids)), *sample.prompt_ids] for sample in batch]
    ids = torch.tensor(rows, device=device)
    output = model.generate(
        ids,
        attention_mask=(ids != pad).long(),  # by the token, as for given answers
        do_sample=False,
        temperature=None,
        top_p=None,
        max_new_tokens=max_new_tokens,
        use_cache=True,
        pad_token_id=tokenizer.eos_token_id,
    )
    end = tokenizer.decode([tokenizer.eos_token_id], clean_up_tokenization_spaces=False)
    answered = []
    for sample, new in zip(batch, output[:, longest:].tolist(), strict=True):
        asked, whole = text_of(tokenizer, sample.prompt_ids), text_of(tokenizer, sample.input_ids)
        generated = text_of(tokenizer, new)
        if end:
            generated = generated.split(end)[0]
        answered.append(Answered(asked, whole.replace(asked, "").strip(), generated.strip()))
    return answered


def text_of(tokenizer: Any, ids: Sequence[int], *, clean: bool = True) -> str:
    """Decoded text without special tokens; ``clean`` removes the spaces before punctuation."""
    text: str = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return str(tokenizer.clean_up_tokenization(text)) if clean else text
