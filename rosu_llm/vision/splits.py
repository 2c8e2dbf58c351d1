"""What is forgotten, kept, held out for selection, and tested: the paper's two protocols, deterministic by seed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import ConfigError, DataError, unknown
from .images import Images

PROTOCOLS = ("classwise", "random")


@dataclass(frozen=True)
class Split:
    """Row numbers of the training images, ascending and disjoint, and of the test images.

    Attributes:
        forget, retain: of the training images.
        validation: training images that nobody trains on, for the selection of settings.
        test: of the test images.
        forgotten_class: its number, where one class is forgotten.
    """

    forget: Tensor
    retain: Tensor
    validation: Tensor
    test: Tensor
    forgotten_class: int | None = None


def make_split(
    train: Images,
    test: Images,
    *,
    protocol: str,
    seed: int,
    forget_class: int | None = None,
    forget_share: float = 0.1,
    validation_share: float = 0.0,
    validation_seed: int = 0,
    test_forgotten_class: bool = False,
) -> Split:
    """The split of a protocol.

    Args:
        protocol: ``classwise`` (all training images of one class) or ``random`` (a share of every class).
        seed: of the random choice; for ``classwise`` without ``forget_class`` the number of the class.
        forget_class: the class, for ``classwise``.
        forget_share: share of each class that ``random`` forgets.
        validation_share: share of each class that is set aside first, by ``validation_seed`` alone, so that every split
            and the model before unlearning agree about it.
        test_forgotten_class: whether a forgotten class stays in the test images.
    """
    if protocol not in PROTOCOLS:
        raise unknown("protocol", protocol, PROTOCOLS)
    if not 0.0 <= validation_share < 1.0:
        raise ConfigError(f"validation_share={validation_share} is no share of the images: give 0 to 0.5.")
    if forget_class is not None:
        _check_class(forget_class, train, f"forget_class={forget_class}")
    every = torch.arange(len(train))
    validation = stratified(train.labels, validation_share, validation_seed, stream=1)
    rest = every[~torch.isin(every, validation)]
    tested = torch.arange(len(test))
    if protocol == "random":
        if not 0.0 < forget_share < 1.0:
            raise ConfigError(f"forget_share={forget_share} leaves nothing to forget or to keep: give e.g. 0.1.")
        forget = rest[stratified(train.labels[rest], forget_share, seed, stream=2)]
        chosen = None
    else:
        if forget_class is None:
            _check_class(seed, train, f"seed {seed} is a class in class-wise forgetting, and class {seed}")
        chosen = seed if forget_class is None else forget_class
        forget = rest[train.labels[rest] == chosen]
        if not test_forgotten_class:
            tested = tested[test.labels != chosen]
    retain = rest[~torch.isin(rest, forget)]
    found = Split(forget, retain, validation, tested, chosen)
    for name in ("forget", "retain", "test"):
        if len(getattr(found, name)) == 0:
            raise DataError(
                f"The {name} split is empty (protocol={protocol!r}, {len(train)} training images of "
                f"{len(train.classes)} classes): give more images, another class, or a larger forget_share."
            )
    return found


def _check_class(number: int, train: Images, what: str) -> None:
    if not 0 <= number < len(train.classes):
        raise ConfigError(
            f"{what} does not exist: there are {len(train.classes)} classes, 0 ({train.classes[0]}) to "
            f"{len(train.classes) - 1} ({train.classes[-1]})."
        )


def stratified(labels: Tensor, share: float, seed: int, *, stream: int) -> Tensor:
    """Row numbers of ``share`` of every class, ascending; rounded to the nearest number in each class."""
    chosen = []
    for label in labels.unique().tolist():
        rows = (labels == label).nonzero().flatten()
        generator = torch.Generator().manual_seed((seed * 1_000_003 + int(label)) * 8 + stream & 0x7FFF_FFFF_FFFF_FFFF)
        count = int(share * len(rows) + 0.5)
        chosen.append(rows[torch.randperm(len(rows), generator=generator)[:count]])
    return torch.cat(chosen).sort().values if chosen else torch.empty(0, dtype=torch.int64)
