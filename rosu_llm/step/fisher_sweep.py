"""A sweep: steps that collect squared gradients, and a last one that dampens the weights by them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from ..errors import ConfigError, DataError
from ..geometry.methods.others.ssd import SSD
from ..geometry.slots import FISHER
from ..space import ParameterSpace
from ..space.fisher import Dampened, add_square, dampen, measure

logger = logging.getLogger(__name__)

#: Runs forward and backward of some micro-batches and returns their loss over all processes.
Pass = Callable[[str, Sequence[Callable[[], Tensor]]], float]


class FisherSweep:
    """The sums of one run.

    Args:
        rule: says what is squared, and how weights are dampened.
        space: where weights and gradients live; the sums are in its memory, and so in checkpoints.
    """

    def __init__(self, rule: SSD, space: ParameterSpace) -> None:
        self._rule, self._space = rule, space
        #: How many squares each sum holds.
        self.counts: dict[str, int] = {"forget": 0, "retain": 0}

    def collect(self, window: Mapping[str, Sequence[Callable[[], Tensor]]], run: Pass) -> dict[str, float]:
        """Add the squares of a window; returns its mean losses, of parts that have samples."""
        losses: dict[str, float] = {}
        for part, slot in FISHER.items():
            closures = list(window.get(part, ()))
            groups = [closures] if self._rule.fisher == "window" else [[closure] for closure in closures]
            found = []
            for group in groups if closures else ():
                self._space.begin()
                found.append(run(part, group))
                add_square(self._space, slot)
            self.counts[part] += len(found)
            if found:
                losses[part] = sum(found) / len(found)
        return losses

    def finish(self) -> Dampened:
        """Dampen the weights; raises, with the weights as they were, where α chooses none or all."""
        alpha, scale = self._rule.ssd_alpha, self._rule.ssd_lambda
        for part, count in self.counts.items():
            if not count:
                raise DataError(
                    f"The sweep met no {part} sample with an answer token: check label masking and max_steps."
                )
        found = measure(self._space, self.counts, alpha, scale)
        if found.selected in (0, found.informed):
            what, effect = ("no weight", "forgotten") if found.selected == 0 else ("every weight", "spared")
            others = ", ".join(f"{other:g} selects {count:,}" for other, count in found.others.items())
            raise ConfigError(
                f"ssd_alpha={alpha:g} selects {what} of the {found.informed:,} that have forget information, so "
                f"nothing would be {effect}. The weights were left as they were. Of other values: {others}."
            )
        dampen(self._space, self.counts, alpha, scale)
        logger.info(
            "ssd dampened %s of %s weights that have forget information, to %.1f %% on average",
            f"{found.selected:,}",
            f"{found.informed:,}",
            100.0 * found.kept,
        )
        return found
