"""What the configured losses need of the initial model, and the losses built with it.

``npo`` needs one log-probability per forget sample, computed before the first step; ``kl`` needs the initial model's
logits at every step (:mod:`rosu_llm.losses.reference`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, nn

from ..errors import UnsupportedLayoutError
from ..files import part_of
from ..losses import LossContext, ReferenceLogProbs, ReferenceModel
from ..losses.registry import Batch
from .config import MethodArguments
from .ranks import Ranks
from .window import PARTS, WindowLoss

logger = logging.getLogger(__name__)

REFERENCE_FILE = "rosu_reference.safetensors"


class References:
    """The references of one run.

    Args:
        settings: the losses.
        model: the initial model.
        layout: ``local``, ``ddp``, ``fsdp2`` or ``zero``.
    """

    def __init__(self, settings: MethodArguments, model: nn.Module, layout: str) -> None:
        self._settings = settings
        self.logprobs = ReferenceLogProbs()
        self._told = False
        self._fixed = False  # whether the model may have left its initial weights since
        self.model: ReferenceModel | None = None
        needing = [part for part in PARTS if settings.loss(part).reference == "logits"]
        if not needing:
            return
        named = f"{needing[0]}_loss={getattr(settings, f'{needing[0]}_loss')!r}"
        if layout in ("fsdp2", "zero") and not hasattr(model, "disable_adapter"):
            raise UnsupportedLayoutError(
                f"{named} would keep a whole second model on every process, which sharding is meant to avoid: train an "
                f"adapter (lora_r), or use {needing[0]}_loss='nll'."
            )
        self.model = ReferenceModel(model)
        if layout in ("fsdp2", "zero") and self.model.beside:
            raise UnsupportedLayoutError(
                f"{named} needs the initial values of what is trained beside the adapter ({len(self.model.beside)} "
                f"tensors such as biases), which {layout} takes apart: train the adapter alone, or use "
                f"{needing[0]}_loss='nll'."
            )
        if self.extra_bytes and not self.model.beside:
            size = self.extra_bytes / 2**30
            logger.warning("%s keeps a frozen copy of the model (+%.2f GiB); with LoRA there is none.", named, size)

    @property
    def needs_logprobs(self) -> bool:
        """Whether the forget loss compares with log-probabilities of the initial model."""
        return self._settings.loss("forget").reference == "logprobs"

    @property
    def extra_bytes(self) -> int:
        """Memory of a frozen copy of the model, where one is kept."""
        return self.model.extra_bytes if self.model is not None else 0

    def restart(self, checkpoint: str | None, *, new_model: bool = False) -> None:
        """Before training: keep the log-probabilities there are, or take those of a checkpoint.

        The initial model may be gone: a second training of one model goes on from the first one's weights, but not
        where a ``new_model`` is made for it.
        """
        if checkpoint is None:
            if new_model:
                self.logprobs, self._fixed = ReferenceLogProbs(), False
            return
        self.logprobs, self._fixed = ReferenceLogProbs(), True
        if not self.needs_logprobs:
            return
        path = part_of(checkpoint, REFERENCE_FILE, f"forget_loss={self._settings.forget_loss!r}")
        self.logprobs = ReferenceLogProbs.load(path)

    def compute(self, model: nn.Module, batches: Callable[[], Iterable[Batch]], ranks: Ranks) -> None:
        """The log-probabilities of all forget batches under the weights the model has now, unless they are known.

        ``batches`` are this process's share.
        """
        if self.needs_logprobs and not self._fixed:
            self.logprobs.compute(model, batches())
            self.logprobs.values = ranks.merge(self.logprobs.values)
        self._fixed = True

    def cover(self, model: nn.Module, batch: Batch) -> bool:
        """Whether the forget loss of an evaluation batch can be had; before training its references are computed."""
        if not self.needs_logprobs or self.logprobs.know(batch):
            return True
        if self._fixed:
            if not self._told:
                logger.warning(
                    "eval_forget_loss leaves out samples that were no part of eval_dataset when training began: "
                    "forget_loss=%s compares with the initial model, which is gone.",
                    self._settings.forget_loss,
                )
            self._told = True
            return False
        self.logprobs.compute(model, [batch])
        return True

    def window_loss(
        self,
        part: str,
        mean_over_ranks: Callable[[Tensor], Tensor],
        forward_context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> WindowLoss:
        """The configured loss of ``forget`` or ``retain``, with its options and references."""
        spec = self._settings.loss(part)
        options = {name: getattr(self._settings, name, default) for name, default in spec.options.items()}
        context = LossContext(options=options, reference_logprobs=self.logprobs, reference_logits=self.model)
        return WindowLoss(spec, context, self._settings.reduction, forward_context, mean_over_ranks)
