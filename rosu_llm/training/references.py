"""What the configured losses need of the initial model, and the losses built with it.

``npo`` needs one log-probability per forget sample, computed before the first step. ``kl`` needs the initial model's
distributions at every step: with an adapter those of the model without it; else of hidden states that are computed
before the first step, where the retain samples can be listed (:mod:`rosu_llm.training.initial`); else of a frozen copy
(:mod:`rosu_llm.losses.reference`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ..errors import UnsupportedLayoutError
from ..files import part_of
from ..losses import LossContext, ReferenceLogProbs, ReferenceModel
from ..losses.answers import compiled
from ..losses.reference import starts_at_zero
from ..losses.registry import Batch, InitialAnswers
from .config import MethodArguments
from .initial import InitialStates, OutputLayerError
from .ranks import Ranks
from .window import PARTS, WindowLoss

logger = logging.getLogger(__name__)

REFERENCE_FILE = "rosu_reference.safetensors"
INITIAL_FILE = "rosu_initial.safetensors"


class References:
    """The references of one run.

    Args:
        settings: the losses.
        model: the initial model.
        layout: ``local``, ``ddp``, ``fsdp2`` or ``zero``.
        listed: whether all retain samples can be listed before the first step.
    """

    def __init__(self, settings: MethodArguments, model: nn.Module, layout: str, *, listed: bool = False) -> None:
        self._settings, self._initial = settings, model
        self._sharded = layout in ("fsdp2", "zero")
        self.logprobs = ReferenceLogProbs()
        self._told: set[str] = set()
        self._fixed = False  # whether the model may have left its initial weights since
        self.model: ReferenceModel | None = None
        self.states: InitialStates | None = None
        kinds = {settings.loss(part).reference: part for part in reversed(PARTS)}
        part = kinds.get("logits") or kinds.get("distributions")
        if part is None:
            return
        self._named = f"{part}_loss={getattr(settings, f'{part}_loss')!r}"
        self._instead = f"{part}_loss='nll'"
        if "logits" not in kinds and listed and not starts_at_zero(model):
            self.states = InitialStates(self._named, self._instead, part, frozen_head=True)
            try:
                self.states.output_layer(model)
                return
            except OutputLayerError:
                self.states = None
        self._keep_model(layout)

    def _keep_model(self, layout: str) -> None:
        if self._sharded and not hasattr(self._initial, "disable_adapter"):
            raise UnsupportedLayoutError(
                f"{self._named} would keep a whole second model on every process, which sharding is meant to avoid: "
                f"train an adapter (lora_r), or use {self._instead}. ('kl' needs none where the training data lists "
                "its retain samples, as ForgetRetainDataset does, and the logits are those of an output layer.)"
            )
        self.model = ReferenceModel(self._initial)
        if self._sharded and self.model.beside:
            raise UnsupportedLayoutError(
                f"{self._named} needs the initial values of what is trained beside the adapter "
                f"({len(self.model.beside)} tensors such as biases), which {layout} takes apart: train the adapter "
                f"alone, or use {self._instead}."
            )
        self._tell_copy()

    def _tell_copy(self) -> None:
        if self.model is not None and self.extra_bytes and not self.model.beside:
            size = self.extra_bytes / 2**30
            logger.warning(
                "%s keeps a frozen copy of the model (+%.2f GiB); with LoRA there is none.", self._named, size
            )

    @property
    def needs_logprobs(self) -> bool:
        """Whether the forget loss compares with log-probabilities of the initial model."""
        return self._settings.loss("forget").reference == "logprobs"

    @property
    def wants_states(self) -> bool:
        """Whether hidden states of the initial model are to be kept now, before the first step."""
        return self.states is not None and not self._fixed

    @property
    def extra_bytes(self) -> int:
        """Memory beside the model: of a frozen copy, or of the output layer's; hidden states are not on the device."""
        if self.states is not None:
            return self.states.head_bytes
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
        if self.states is not None:
            self._restart_states(self.states, checkpoint)
        self.logprobs, self._fixed = ReferenceLogProbs(), True
        if not self.needs_logprobs:
            return
        path = part_of(checkpoint, REFERENCE_FILE, f"forget_loss={self._settings.forget_loss!r}")
        self.logprobs = ReferenceLogProbs.load(path)

    def _restart_states(self, states: InitialStates, checkpoint: str) -> None:
        # A run that kept a copy wrote none; the model as it was given is still the initial one then.
        copied = not (Path(checkpoint) / INITIAL_FILE).is_file()
        if copied and not self._sharded and not self._fixed:
            self._copy_instead()
        elif not (copied and self._fixed):
            states.load(part_of(checkpoint, INITIAL_FILE, self._named))

    def _copy_instead(self) -> None:
        self.states, self.model = None, ReferenceModel(self._initial)
        self._tell_copy()

    def keep_states(
        self,
        model: nn.Module,
        listed: Iterable[Batch],
        drawn: Batch | None,
        ranks: Ranks,
        file: Path,
        *,
        writer: bool,
    ) -> None:
        """Hidden states of all retain samples under the weights the model has now; a frozen copy where they fail.

        Args:
            listed: this process's share of the samples.
            drawn: some as training meets them, to see whether they are the same.
            file: where they are kept; one process is its ``writer``.
        """
        if self.states is None or not self._look(model, listed, ranks):
            return
        if drawn is not None and not self._sharded and not self.states.know(drawn):
            logger.warning("The training data returns other retain samples than it lists.")
            self._copy_instead()
            return
        size = (self.states.extra_bytes - self.states.head_bytes) / 2**20
        self.states.move_to(file, ranks, writer=writer)
        logger.info(
            "%s keeps %.1f MiB of the initial model's hidden states in %s and in every checkpoint, and its output "
            "layer (%.1f MiB) beside the model.",
            self._named,
            size,
            file.name,
            self.states.head_bytes / 2**20,
        )

    def _look(self, model: nn.Module, batches: Iterable[Batch], ranks: Ranks) -> bool:
        """Whether hidden states were kept, not a copy of the model instead."""
        assert self.states is not None
        try:
            if compiled(model):  # the graph would keep the hook that looks
                raise self.states.refused("a compiled model does not show what that layer is given")
            self.states.capture(model, self.states.output_layer(self._initial), batches, nullcontext, ranks)
        except OutputLayerError:
            if self._sharded:
                raise
            self._copy_instead()
        return self.states is not None

    def compute(self, model: nn.Module, batches: Callable[[], Iterable[Batch]], ranks: Ranks) -> None:
        """The log-probabilities of all forget batches under the weights the model has now, unless they are known.

        ``batches`` are this process's share.
        """
        if self.needs_logprobs and not self._fixed:
            self.logprobs.compute(model, batches())
            self.logprobs.values = ranks.merge(self.logprobs.values)
        self._fixed = True

    def cover(self, model: nn.Module, batch: Batch, part: str) -> bool:
        """Whether the loss of an evaluation batch can be had; before training its references are computed."""
        of_states = self._settings.loss(part).reference == "distributions"
        if part == "forget" and not of_states:
            known = not self.needs_logprobs or self.logprobs.know(batch)
        else:
            known = not of_states or self.states is None or self.states.know(batch)
        if known:
            return True
        if self._fixed:
            if part not in self._told:
                logger.warning(
                    "eval_%s leaves out samples that were no part of eval_dataset when training began: %s_loss=%s "
                    "compares with the initial model, which is gone.",
                    "forget_loss" if part == "forget" else "loss",
                    part,
                    getattr(self._settings, f"{part}_loss"),
                )
            self._told.add(part)
            return False
        if part == "forget" and not of_states:
            self.logprobs.compute(model, [batch])
        else:
            self._look(model, [batch], Ranks(0, 1, lambda values: values))
        return True

    def _reference_hidden(self, batch: Batch) -> InitialAnswers | None:
        return None if self.states is None else self.states(batch)

    def _reference_logits(self, batch: Batch) -> Tensor:
        assert self.model is not None
        return self.model(batch)

    def window_loss(
        self,
        part: str,
        mean_over_ranks: Callable[[Tensor], Tensor],
        forward_context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> WindowLoss:
        """The configured loss of ``forget`` or ``retain``, with its options and references."""
        spec = self._settings.loss(part)
        options = {name: getattr(self._settings, name, default) for name, default in spec.options.items()}
        context = LossContext(
            options=options,
            reference_logprobs=self.logprobs,
            reference_logits=self._reference_logits,
            reference_hidden=self._reference_hidden,
        )
        return WindowLoss(spec, context, self._settings.reduction, forward_context, mean_over_ranks)
