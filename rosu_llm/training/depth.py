"""Where the targets of bounded forgetting come from (``forget_until``).

``holdout``: the losses of never-trained samples of the same kind, one drawn for each forget sample so that the
distributions match, or their mean. ``base``: the loss of the sample itself under the model as it was before it learned
the data. ``alternates``: that of wrong answers to the same question. A number: itself. All are computed before the
first step and travel with the checkpoints; with ``forget_refresh`` they follow what the present weights say of unseen
data, which is what an attacker compares with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from ..compat import dtype_argument, load_causal_model, loading_whole
from ..errors import ConfigError, DataError, one_line
from ..files import part_of
from ..losses.classification import answer_levels
from ..losses.depth import Depth, sample_nll
from ..losses.language import IGNORE, answer_mask
from ..losses.reference import SampleValues, evaluating, sample_keys
from ..losses.registry import Batch
from .config import MethodArguments
from .method_checks import TOKEN_LEVELS

TARGETS_FILE = "rosu_targets.safetensors"
#: How many similar held-out samples stand for one forget sample, and all that are as similar as the last of them:
#: where the questions are the same, only the order of the data would tell them apart.
NEIGHBOURS = 5


@dataclass(frozen=True)
class Unseen:
    """What the targets may be measured on.

    Attributes:
        forget: the forget samples, in batches.
        share: those of them that this process measures.
        merge: what all processes have measured, by key.
        holdout: never-trained samples, in batches.
        alternates: for each forget sample, in order, a batch of other answers to its question.
        base: the model before it learned the forget samples.
    """

    forget: Callable[[], Iterable[Batch]]
    share: Callable[[], Iterable[Batch]]
    merge: Callable[[dict[str, tuple[float, ...]]], dict[str, tuple[float, ...]]]
    holdout: Callable[[], Iterable[Batch]] | None = None
    alternates: Callable[[], Iterable[Batch]] | None = None
    base: Callable[[], nn.Module] | None = None


class Bound:
    """Bounded forgetting in one run: its targets, and what they make of a batch.

    Args:
        settings: ``forget_until`` and what belongs to it; not ``off``.
        seed: of the draw.
    """

    def __init__(self, settings: MethodArguments, seed: int) -> None:
        self._settings, self._seed = settings, seed
        self.targets = SampleValues()
        #: For every forget sample the places of the held-out samples that stand for it, once they were looked for.
        self._near: dict[str, list[int]] = {}
        whole, beyond = settings.forget_level == "both", settings.forget_beyond
        self.depth = Depth(self._of, settings.forget_margin, whole=whole, beyond=beyond)

    @property
    def measured(self) -> bool:
        """Whether the targets depend on the sample."""
        return isinstance(self._settings.forget_until, str)

    def restart(self, checkpoint: str | None, start: float | None, *, new_model: bool) -> None:
        """Before training: keep the targets there are, or take those of a checkpoint.

        As for references: a second training goes on from the first one's weights, which say nothing about unseen data
        any more, but not where a ``new_model`` is made for it. ``start`` is the checkpoint's :attr:`Depth.start`.
        """
        self._near = {}  # the held-out samples may be others
        if checkpoint is None and not new_model:
            return
        self.targets, self.depth.start = SampleValues(), start
        if checkpoint is not None and self.measured:
            until = f"forget_until={self._settings.forget_until!r}"
            self.targets = SampleValues.load(part_of(checkpoint, TARGETS_FILE, until))

    def compute(self, model: nn.Module, unseen: Unseen, step: int, *, returned: bool = False) -> None:
        """The targets under the weights the model has now, unless they are known and not due again at this ``step``.

        They are due, too, where the run has ``returned`` to earlier weights.
        """
        until, every = self._settings.forget_until, self._settings.forget_refresh
        due = every > 0 and (returned or step % every == 0)
        if not self.measured or (self.targets.values and not due):
            return
        measure = {"holdout": self._holdout, "base": self._base, "alternates": self._alternates}
        self.targets = SampleValues(measure[str(until)](model, unseen))

    def _holdout(self, model: nn.Module, unseen: Unseen) -> dict[str, Sequence[float]]:
        assert unseen.holdout is not None
        if self._settings.forget_level in TOKEN_LEVELS:
            return self._holdout_tokens(model, unseen)
        found = _levels(model, unseen.holdout(), "holdout_dataset")
        keys = [key for batch in unseen.forget() for key in sample_keys(batch)]
        if self._settings.forget_draw:
            values = drawn(found, len(keys), self._seed)
        else:
            values = [float(np.mean(found))] * len(keys)
        return {key: (value,) for key, value in zip(keys, values, strict=True)}

    def _holdout_tokens(self, model: nn.Module, unseen: Unseen) -> dict[str, Sequence[float]]:
        """For every answer token the loss of its counterpart in similar held-out samples."""
        assert unseen.holdout is not None
        kept = list(unseen.holdout())
        losses = dict(_measured(model, kept, each_token=True))
        known = [(sample, losses[key]) for batch in kept for key, sample in _tokens(batch) if losses[key]]
        if not known:
            raise _no_answer("holdout_dataset")
        values: dict[str, Sequence[float]] = {}
        generator = np.random.default_rng(abs(self._seed))
        for batch in unseen.forget():
            for key, sample in _tokens(batch):
                if key not in self._near:
                    alike = [sample.likeness(other) for other, _ in known]
                    least = sorted(alike)[-NEIGHBOURS:][0]
                    near = [i for i, value in enumerate(alike) if value >= least]
                    self._near[key] = [near[int(generator.integers(len(near)))]] if self._settings.forget_draw else near
                found = [counterparts(sample.answer, known[i][0].answer, known[i][1]) for i in self._near[key]]
                values[key] = tuple(float(value) for value in np.mean(found, axis=0))
        return values

    def _base(self, model: nn.Module, unseen: Unseen) -> dict[str, Sequence[float]]:
        assert unseen.base is not None
        each_token = self._settings.forget_level in TOKEN_LEVELS
        return {**unseen.merge(dict(_measured(unseen.base(), unseen.share(), each_token=each_token)))}

    def _alternates(self, model: nn.Module, unseen: Unseen) -> dict[str, Sequence[float]]:
        assert unseen.alternates is not None
        keys = [key for batch in unseen.forget() for key in sample_keys(batch)]
        values: dict[str, Sequence[float]] = {}
        for key, batch in zip(keys, unseen.alternates(), strict=True):
            values[key] = (float(np.mean(_levels(model, [batch], "alternates_dataset"))),)
        return values

    def _of(self, batch: Batch) -> Tensor:
        labels = batch["labels"]
        token = self._settings.forget_level in TOKEN_LEVELS
        mask = answer_mask(labels)
        if not self.measured:
            shape = mask.shape if token else mask.shape[:1]
            return torch.full(shape, float(self._settings.forget_until), dtype=torch.float64, device=labels.device)
        found = self.targets.of(batch, "target of forget_until")
        if not token:
            values = [own[0] if own else 0.0 for own in found]  # one without an answer has no gradient to weigh
            return torch.tensor(values, dtype=torch.float64, device=labels.device)
        targets = torch.zeros(mask.shape, dtype=torch.float64, device=labels.device)
        targets[mask] = torch.tensor([value for own in found for value in own], dtype=torch.float64).to(labels.device)
        return targets


def load_base(model: Any) -> Any:
    """The base model in float32 by its name or folder; one that is loaded already stays as it is."""
    if not isinstance(model, str):
        return model
    try:
        with loading_whole():
            return load_causal_model(model, **dtype_argument(torch.float32))
    except (ConfigError, OSError, SafetensorError, ValueError) as error:
        raise ConfigError(f"base_model={model!r} could not be loaded: {one_line(error)[:300]}") from error


def check_base(base: Any, model: Any) -> None:
    """Raise if the targets of ``forget_until="base"`` could not be measured with ``base``."""
    if base is None:
        raise ConfigError(
            "forget_until='base' needs the model as it was before it learned the data: pass base_model=…, or use "
            "'holdout', 'alternates' or a target loss."
        )
    if isinstance(base, str):
        from transformers import AutoConfig

        try:
            config = AutoConfig.from_pretrained(base)
        except (OSError, ValueError) as error:
            raise ConfigError(f"base_model={base!r} could not be loaded: {one_line(error)[:300]}") from error
    else:
        config = base.config
        if any(hasattr(p, "ds_id") for p in base.parameters()):
            raise ConfigError(
                "base_model was loaded after ZeRO-3 had been configured, which split it: pass its name or folder "
                "instead, or load it before the training arguments are made."
            )
    own, other = (getattr(of, "vocab_size", None) for of in (getattr(model, "config", None), config))
    if None not in (own, other) and own != other:
        named = f"base_model={base!r}" if isinstance(base, str) else "base_model"
        raise ConfigError(
            f"{named} has a vocabulary of {other} tokens and the model one of {own}: the same token ids mean other "
            "text there. Give the model that this one was trained from."
        )


def check_alternates(alternates: Any, train_dataset: Any) -> None:
    """Raise if there are not alternate answers for every forget sample."""
    if alternates is None:
        raise DataError(
            "forget_until='alternates' needs other answers to the forget questions: pass alternates_dataset=…, a list "
            "of samples for each forget sample."
        )
    if len(alternates) != len(train_dataset) or not all(len(own) for own in alternates):
        raise DataError(
            f"alternates_dataset has {sum(map(bool, map(len, alternates)))} lists with answers for "
            f"{len(train_dataset)} forget samples: each needs at least one."
        )


def drawn(losses: Sequence[float], count: int, seed: int) -> list[float]:
    """``count`` values with the distribution of ``losses``: its evenly spaced quantiles in random order."""
    quantiles = np.quantile(np.asarray(losses), (np.arange(count) + 0.5) / count)
    return [float(quantiles[i]) for i in np.random.default_rng(abs(seed)).permutation(count)]


@dataclass(frozen=True)
class _Tokens:
    """A sample's tokens: all of them as a set, those of its answer in order."""

    words: frozenset[int]
    answer: tuple[int, ...]

    def likeness(self, other: _Tokens) -> float:
        return len(self.words & other.words) / max(1, len(self.words | other.words))


def _tokens(batch: Batch) -> Iterator[tuple[str, _Tokens]]:
    ids = batch["input_ids"]
    rows = (part.tolist() for part in (ids, batch.get("attention_mask", torch.ones_like(ids)), batch["labels"]))
    for key, ids, there, labels in zip(sample_keys(batch), *rows, strict=True):
        answer = tuple(token for token in labels[1:] if token != IGNORE)
        yield key, _Tokens(frozenset(token for token, real in zip(ids, there, strict=True) if real), answer)


def counterparts(answer: Sequence[int], other: Sequence[int], losses: Sequence[float]) -> list[float]:
    """The loss of the token of ``other`` that stands in the place of each token of ``answer``.

    Tokens that both have, in the same order, are counterparts; between them, what one has instead of what the other
    has: there every token gets the mean loss. Where the other has nothing, the mean loss of its whole answer.
    """
    values = [float(np.mean(losses))] * len(answer)
    for kind, a, b, c, d in _edits(tuple(other), tuple(answer)):
        if kind == "equal":
            values[c:d] = losses[a:b]
        elif kind == "replace":
            values[c:d] = [float(np.mean(losses[a:b]))] * (d - c)
    return values


@lru_cache(maxsize=1 << 15)  # the same at every refresh
def _edits(other: tuple[int, ...], answer: tuple[int, ...]) -> Sequence[tuple[str, int, int, int, int]]:
    return SequenceMatcher(None, other, answer, autojunk=False).get_opcodes()


def _levels(model: nn.Module, batches: Iterable[Batch], name: str) -> list[float]:
    """The mean losses of all samples with an answer."""
    found = [own[0] for _, own in _measured(model, batches, each_token=False) if own]
    if not found:
        raise _no_answer(name)
    return found


def _no_answer(name: str) -> DataError:
    return DataError(
        f"{name} has samples without any answer token (every label is -100): forget_until has nothing to measure there."
    )


@torch.no_grad()
def _measured(
    model: nn.Module, batches: Iterable[Batch], *, each_token: bool
) -> Iterator[tuple[str, tuple[float, ...]]]:
    """Key and loss of every sample: its mean, or that of each answer token; nothing where it has no answer."""
    with evaluating(model):
        for batch in batches:
            levels, mask = answer_levels(model, batch), answer_mask(batch["labels"])
            values = levels if each_token else sample_nll(levels, batch["labels"])[:, None]
            for key, own, keep in zip(sample_keys(batch), values.double().cpu(), mask.cpu(), strict=True):
                yield key, tuple((own[keep] if each_token else own[: bool(keep.any())]).tolist())
