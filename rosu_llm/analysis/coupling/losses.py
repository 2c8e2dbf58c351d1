"""The configured losses where there is no trainer to build them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from torch import Tensor, nn

from ...errors import ConfigError, UnsupportedLayoutError
from ...losses import LossContext, ReferenceLogProbs, ReferenceModel
from ...training.config import MethodArguments
from ...training.window import PARTS, WindowLoss
from .windows import Windows


class PlainLosses:
    """The configured losses without a trainer, with what they need of the initial model: the model as it is now."""

    def __init__(
        self, model: nn.Module, settings: MethodArguments, mean: Callable[[Tensor], Tensor], layout: str
    ) -> None:
        self._model, self._settings, self._mean = model, settings, mean
        self._logprobs = ReferenceLogProbs()
        needs = {settings.loss(part).reference for part in PARTS}
        if "activations" in needs:
            raise ConfigError(
                "Losses of hidden activations need a trainer's layers: use 'rosu diagnose --config FILE' with "
                "forget_loss: representation, or another loss here."
            )
        if "logits" in needs and layout in ("fsdp2", "zero"):
            raise UnsupportedLayoutError(
                "retain_loss='kl' would keep a whole second model on every process: use retain_loss='nll'."
            )
        self._reference = ReferenceModel(model) if "logits" in needs else None

    def of(self, part: str) -> WindowLoss:
        """The loss of one part."""
        spec = self._settings.loss(part)
        context = LossContext(
            options={name: getattr(self._settings, name, default) for name, default in spec.options.items()},
            reference_logprobs=self._logprobs,
            reference_logits=self._reference,
        )
        return WindowLoss(spec, context, self._settings.reduction, contextlib.nullcontext, self._mean)

    def compute_references(self, windows: Windows) -> None:
        """Reference values of the samples that will be drawn, where the forget loss wants them; alike on all ranks."""
        if self._settings.loss("forget").reference != "logprobs":
            return
        drawn = {i for pair in range(1, windows.plan.pairs + 1) for i in windows.draw("forget", pair)}
        samples = windows.samples["forget"]
        batches = (windows.prepare(windows.collate([samples[i]])) for i in sorted(drawn))
        self._logprobs.compute(self._model, batches)
