"""How far next-token distributions have moved from those of the initial model, without a second model.

    KL = mean over answer tokens of Σ_y p₀(y) (log p₀(y) − log p(y)),

with p₀ from what :mod:`rosu_llm.training.initial` keeps of the initial model. Where the output layer is not trained it
is that of the model, and all happens inside its own forward pass.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from ..files import part_of
from ..losses.answers import wide
from ..losses.language import answer_mask, logits_of
from ..losses.reference import evaluating
from ..losses.registry import Batch
from .initial import Context, InitialStates, before_layer
from .ranks import Ranks

logger = logging.getLogger(__name__)

DRIFT_FILE = "rosu_budget_initial.safetensors"


class Drift(InitialStates):
    """The initial model's distributions on the budget data, and the distance of the current ones from them."""

    def __init__(self) -> None:
        super().__init__("budget_measure='kl'", "budget_measure='loss'", "budget")

    def capture(
        self, model: nn.Module, head: nn.Linear, batches: Iterable[Batch], context: Context, ranks: Ranks
    ) -> None:
        """As for any samples; a budget has few, which stay in host memory."""
        super().capture(model, head, batches, context, ranks)
        logger.warning(
            "budget_measure='kl' keeps %.1f MiB of the initial model in host memory and in every checkpoint.",
            self.extra_bytes / 2**20,
        )

    @torch.no_grad()
    def measure(
        self,
        model: nn.Module,
        head: nn.Linear,
        batches: Iterable[tuple[Batch, bool]],
        context: Context,
        mean_over_ranks: Callable[[Tensor], Tensor],
    ) -> float:
        """Mean KL(initial ‖ current) per answer token, in nats; NaN where there is no answer token.

        Batches that are not this process's own are computed, for others wait for it, but not counted.
        """
        device = head.weight.device
        copied = {name: tensor.to(device) for name, tensor in self._head.items()}
        sums = torch.zeros(2, dtype=torch.float64)
        with evaluating(model):
            for batch, own in batches:
                keep = answer_mask(batch["labels"])
                hidden = self.rows(batch).to(device)

                def initial(layer: nn.Linear, _: Tensor, hidden: Tensor = hidden) -> Tensor:
                    known: Mapping[str, Tensor] = copied or dict(layer.named_parameters())
                    return functional.linear(hidden, known["weight"], known.get("bias"))

                with before_layer(head, initial) as seen, context():
                    current = wide(logits_of(model, batch)[:, :-1][keep]).log_softmax(-1)
                before = wide(seen[0]).log_softmax(-1).to(current.device)
                if own:
                    kl = functional.kl_div(current, before, reduction="none", log_target=True).sum(-1)
                    sums += torch.tensor([float(kl.double().sum()), float(len(kl))], dtype=torch.float64)
        total, count = mean_over_ranks(sums).tolist()
        return float(total / count) if count else float("nan")

    def restart(self, checkpoint: str | None, *, new_model: bool) -> None:
        """Before training: keep what there is, or take what a checkpoint holds.

        A second training of one model is measured by what was before the first, but not where a ``new_model`` is made.
        """
        if checkpoint is not None:
            self.load(part_of(checkpoint, DRIFT_FILE, "budget_measure='kl'"))
        elif new_model:
            self.clear()
