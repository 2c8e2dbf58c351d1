"""How much of a set of answers a model still remembers, and how well a loss attack recognises training data.

All figures but one come from a forward pass per sample under teacher forcing; that one is of generated answers.
"""

from __future__ import annotations

import re
from collections.abc import Sequence, Sized
from dataclasses import dataclass
from statistics import mean
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..data.pairing import ForgetRetainCollator
from ..errors import DataError
from ..losses import answer_mask, answer_values
from ..losses.language import IGNORE, nll_of
from ..losses.reference import evaluating


@dataclass(frozen=True)
class Scores:
    """Per-sample figures of one data set."""

    nll: Tensor  # mean answer-token negative log-likelihood
    match: Tensor  # share of answer tokens that are the model's first choice ("exact memorization")

    @property
    def probability(self) -> float:
        """Mean of p(answer)^(1/length), TOFU's probability."""
        return float(torch.exp(-self.nll).mean())

    @property
    def exact_match(self) -> float:
        """Mean share of answer tokens reproduced."""
        return float(self.match.mean())


class Samples(Sized, Protocol):
    """A list or data set of tokenised samples."""

    def __getitem__(self, index: int, /) -> Any: ...


@torch.no_grad()
def score(model: nn.Module, samples: Samples, *, pad_token_id: int = 0, batch_size: int = 64) -> Scores:
    """Score tokenised samples; longest first, so that batches hold samples of similar length."""
    if len(samples) == 0:
        raise DataError("There is no sample to score.")
    device, collate = next(model.parameters()).device, ForgetRetainCollator(pad_token_id)
    order = sorted(range(len(samples)), key=lambda i: -len(samples[i]["input_ids"]))
    nll, match = torch.zeros(len(samples)), torch.zeros(len(samples))
    training = model.training
    model.eval()
    try:
        for start in range(0, len(order), batch_size):
            rows = order[start : start + batch_size]
            batch = {k: v.to(device) for k, v in collate([samples[i] for i in rows]).items()}
            count = answer_mask(batch["labels"]).sum(-1)
            if not bool(count.all()):
                raise DataError("A sample has no answer token (every label is -100): it cannot be scored.")
            losses, hits = answer_values(model, batch, _loss_and_hit)
            nll[rows] = (losses.sum(-1) / count).float().cpu()
            match[rows] = (hits.sum(-1) / count).float().cpu()
    finally:
        model.train(training)
    return Scores(nll, match)


def _loss_and_hit(logits: Tensor, tokens: Tensor, at: slice) -> Tensor:
    return torch.stack([nll_of(logits, tokens, at), (logits.argmax(-1) == tokens).to(logits)], 1)


@torch.no_grad()
def greedy(model: Any, prompts: Sequence[Sequence[int]], *, length: int, pad_token_id: int) -> list[list[int]]:
    """What the model says after each prompt; prompts of the same length are asked together, so that none is padded."""
    said: list[list[int]] = [[] for _ in prompts]
    device = next(model.parameters()).device
    with evaluating(model):
        for size in sorted({len(prompt) for prompt in prompts}):
            rows = [i for i, prompt in enumerate(prompts) if len(prompt) == size]
            ids = torch.tensor([list(prompts[i]) for i in rows], device=device)
            mask = torch.ones_like(ids)
            options = {"max_new_tokens": length, "do_sample": False, "pad_token_id": pad_token_id}
            output = model.generate(ids, attention_mask=mask, **options)[:, size:]
            for i, row in zip(rows, output.tolist(), strict=True):
                said[i] = row
    return said


def degenerate_share(model: Any, samples: Samples, tokenizer: Any, *, length: int = 48) -> float:
    """Share of greedy answers to the samples' questions that are noise."""
    prompts = []
    for sample in (samples[i] for i in range(len(samples))):
        first = next((i for i, label in enumerate(sample["labels"]) if label != IGNORE), len(sample["labels"]))
        prompts.append(sample["input_ids"][:first])
    said = greedy(model, prompts, length=length, pad_token_id=tokenizer.pad_token_id)
    return mean(is_degenerate(tokenizer.decode(row, skip_special_tokens=True)) for row in said)


def is_degenerate(text: str, *, longest: int = 8) -> bool:
    """Whether an answer is noise: nothing but punctuation, or the same again and again.

    The same are up to ``longest`` words three times in a row, or as many letters of one word eight times.
    """
    words = text.split()
    for size in range(1, longest + 1):
        for start in range(len(words) - 3 * size + 1):
            first, second, third = (words[start + i * size : start + (i + 1) * size] for i in range(3))
            if first == second == third:
                return True
    if re.search(rf"([^\W\d_]{{1,{longest}}}?)\1{{7}}", text):
        return True
    return not any(character.isalnum() for character in text)


def membership_auc(members: Tensor, others: Tensor) -> float:
    """Area under the ROC curve of the loss attack: how often a member's loss is below a non-member's.

    0.5 is chance. 1 means that the members are still remembered; 0 means that their loss is higher than that of
    unseen data, which identifies them just as well. Ties count one half.
    """
    if members.numel() == 0 or others.numel() == 0:
        raise DataError("The membership attack needs members and non-members; one of them is empty.")
    if not bool(torch.isfinite(members).all() and torch.isfinite(others).all()):
        raise DataError("The membership attack needs finite losses; some are NaN or infinite.")
    difference = others.double().unsqueeze(0) - members.double().unsqueeze(1)
    return float(((difference > 0).double() + 0.5 * (difference == 0).double()).mean())
