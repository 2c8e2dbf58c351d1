"""One row of the demo's table."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ...data.people import Item
from ...evaluation.memorisation import membership_auc, score
from .world import World, pairs_of


def measure(model: nn.Module, world: World) -> dict[str, float]:
    """Every figure of a row except its name and seconds.

    The membership attack compares the forgotten people with the ``holdout`` people; the
    ``calibration`` people, whose loss a calibrated run has seen, take no part in any figure.
    """
    forget, retain, holdout = (score(model, world.data[split]) for split in ("forget", "retain", "holdout"))
    items = world.corpus.items["forget"]
    paraphrased = score(model, world.encode(pairs_of(items, paraphrased=True)))
    return {
        "forget_prob": forget.probability,
        "forget_em": forget.exact_match,
        "retain_prob": retain.probability,
        "retain_em": retain.exact_match,
        "holdout_em": holdout.exact_match,
        "mia_auc": membership_auc(forget.nll, holdout.nll),
        "forget_loss": float(forget.nll.mean()),
        "holdout_loss": float(holdout.nll.mean()),
        "forget_paraphrase_prob": paraphrased.probability,
        "forget_choice": _choice(model, world, items, forget.nll),
    }


def _choice(model: nn.Module, world: World, items: list[Item], truth: torch.Tensor) -> float:
    """Share of questions whose true answer is likelier than each of its perturbed ones."""
    columns = zip(*(item.perturbed_answers for item in items), strict=True)
    wrong = [
        score(model, world.encode([(i.question, a) for i, a in zip(items, column, strict=True)])).nll
        for column in columns
    ]
    return float((truth.unsqueeze(0) < torch.stack(wrong)).all(0).float().mean())


@torch.no_grad()
def answer(model: Any, world: World, question: str, *, length: int = 16) -> str:
    """The model's greedy answer."""
    prompt = world.tokenizer(f"{question} ", return_tensors="pt")
    was_training = model.training
    model.eval()
    output = model.generate(
        prompt["input_ids"],
        attention_mask=prompt["attention_mask"],
        max_new_tokens=length,
        do_sample=False,
        pad_token_id=world.tokenizer.pad_token_id,
    )
    model.train(was_training)
    return str(world.tokenizer.decode(output[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True))
