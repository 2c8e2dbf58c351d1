"""A third answer for every forget sample: a refusal, or another plausible answer.

A sample may have several; which of them accompanies it is a function of the epoch alone, so that a resumed run, another
number of workers or another rank order sees the same one, and all of them can be listed before the first step.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from ..errors import DataError
from .alternates import listed_alternates
from .pairing import Epoch, Sample, Samples
from .sources import Pairs, read_rows, read_text

#: How many refusals are drawn for every sample, at most: as many as AltPO has alternates.
REFUSALS_PER_SAMPLE = 5
#: The list of refusals that comes with the package.
SHIPPED = "refusals.txt"


class WithAlternates(Epoch, Dataset[dict[str, Any]]):
    """Samples with another answer to their question beside them, under ``alternate``.

    Args:
        samples: tokenised samples (``input_ids``, ``labels``).
        alternates: for each sample a list of samples with the same question; they are taken in turn, one per epoch.
    """

    def __init__(self, samples: Samples, alternates: Sequence[Sequence[Sample]]) -> None:
        super().__init__()
        if len(samples) != len(alternates) or not all(len(own) for own in alternates):
            filled = sum(len(own) > 0 for own in alternates)
            raise DataError(f"{len(samples)} forget samples have {filled} lists of alternate answers: each needs one.")
        for number in range(len(samples)):
            ids = list(samples[number]["input_ids"])
            if any(list(other["input_ids"]) == ids for other in alternates[number]):
                raise DataError(
                    f"An alternate answer of forget sample {number + 1} is its own answer, token for token: there is "
                    "nothing to prefer. Give another one, or raise max_length if it was cut."
                )
        self.samples, self.alternates = samples, alternates

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, Any]:
        own = self.alternates[index]
        return {**self.samples[index], "alternate": own[self.epoch % len(own)]}

    @property
    def every_alternate(self) -> list[Sample]:
        """Those of all epochs."""
        return [one for own in self.alternates for one in own]


def read_refusals(path: str | None) -> list[str]:
    """The lines of a text file that are not empty; None reads those that come with the package."""
    if path is None:
        text = files("rosu_llm.data").joinpath(SHIPPED).read_text(encoding="utf-8")
        return [line.strip() for line in text.splitlines() if line.strip()]
    file = Path(path).expanduser()
    if not file.is_file():
        raise DataError(
            f"refusals={path!r} is not a file: give a text file with one refusal per line, or leave it out for the "
            "list that comes with rosu-llm."
        )
    found = [line.strip() for line in read_text(file).splitlines() if line.strip()]
    if not found:
        raise DataError(f"refusals={path!r} holds no line of text: write one refusal per line.")
    return found


def drawn_refusals(questions: Sequence[str | None], refusals: Sequence[str], seed: int) -> list[Pairs]:
    """For every question some of the refusals, drawn by seed and position."""
    count, found = min(REFUSALS_PER_SAMPLE, len(refusals)), []
    for number, question in enumerate(questions):
        chosen = np.random.default_rng([abs(seed), number]).permutation(len(refusals))[:count]
        found.append([(question, refusals[i]) for i in chosen])
    return found


def read_alternates(path: str, asked: Pairs) -> list[Pairs]:
    """For each (question, answer) pair the alternate answers in a file that 'rosu data alternates' wrote.

    Its fields are always ``question`` and ``alternates``, whatever those of the forget data are called.
    """
    rows = read_rows(path)
    lists = listed_alternates(rows, path, "alternates")
    by_question = {pairs[0][0]: [answer for _, answer in pairs] for pairs in lists}
    found: list[Pairs] = []
    for number, (question, answer) in enumerate(asked, 1):
        if question not in by_question:
            raise DataError(
                f"alternates={path!r} has no row for the question of forget row {number}, {str(question)[:60]!r}: make "
                "it from the same data ('rosu data alternates MODEL --data FILE --output FILE')."
            )
        check_differs(by_question[question], answer, f"Forget row {number}, {str(question)[:60]!r}")
        found.append([(question, other) for other in by_question[question]])
    return found


def check_differs(alternates: Sequence[str], answer: str, where: str) -> None:
    """Raise for an alternate answer that is the answer itself."""
    if any(other.strip() == answer.strip() for other in alternates):
        raise DataError(
            f"{where}: an alternate answer is the answer itself, {answer[:60]!r}, so there is nothing to prefer: drop "
            "it, or generate the alternates anew with another --seed."
        )
