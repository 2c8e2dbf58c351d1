"""Cross-entropy of a classifier: one label per sample, images or anything else the model takes."""

from __future__ import annotations

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from .answers import wide
from .language import IGNORE, answer_nll, model_inputs
from .registry import Batch, LossContext, register_loss

#: The key under which a batch may hold images that are normalised together with its own and have no label.
BESIDE = "beside"


def class_logits(model: nn.Module, batch: Batch) -> Tensor:
    """Logits of the batch's own samples, in at least float32.

    Images under :data:`BESIDE` go through the model in the same batch, so that BatchNorm sees both.
    """
    inputs = model_inputs(model, batch)
    if BESIDE in batch:
        inputs["pixel_values"] = torch.cat([inputs["pixel_values"], batch[BESIDE]])
    found = model(**inputs)
    logits = found.logits if hasattr(found, "logits") else found
    return wide(logits[: len(batch["labels"])])


@register_loss("classification", unit="label", keys=("labels",))
def classification(model: nn.Module, batch: Batch, context: LossContext) -> Tensor:
    """Σ −log p(label); labels of −100 do not count."""
    logits, labels = class_logits(model, batch), batch["labels"]
    if context.gate is None:
        return functional.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="sum")
    losses = functional.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="none")
    context.gate.weigh_rows(losses, losses[:, None])
    return losses.sum()


def answer_levels(model: nn.Module, batch: Batch) -> Tensor:
    """−log p of every answer token, or, for a classifier, of every row's label, in one column."""
    if batch["labels"].dim() > 1:
        return answer_nll(model, batch)
    return functional.cross_entropy(class_logits(model, batch), batch["labels"], ignore_index=IGNORE, reduction="none")[
        :, None
    ]
