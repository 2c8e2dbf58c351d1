"""Several answers to one question in one row, so that it is read only once.

A row holds the tokens with which all samples begin, then the rest of each sample. The attention mask lets each answer
see the common beginning and itself, and its positions are those it has alone. The numbers equal those of separate rows
up to rounding in models whose tokens interact through attention only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from ...data.chat_format import IGNORE, Encoded


@dataclass(frozen=True)
class Packed:
    """A batch for the model."""

    inputs: dict[str, Tensor]  # the model's arguments
    rows: Tensor  # where each answer token is predicted, sample after sample
    columns: Tensor
    targets: Tensor  # these tokens
    counts: list[int]  # how many of them each sample has


def pack(batch: Sequence[Encoded], pad: int, *, share: bool, dtype: torch.dtype = torch.float32) -> Packed:
    """Rows of the samples; with ``share`` neighbours with the same prompt are put into one.

    Padding is told by the token, as in OpenUnlearning: where the padding token is the end-of-text token, those inside a
    prompt are hidden from attention as well, and the numbers depend on it.

    Args:
        dtype: of the attention mask where answers share a row.
    """
    groups = (
        [list(same) for _, same in groupby(batch, lambda sample: sample.prompt_ids)] if share else [[s] for s in batch]
    )
    ids, positions, branches = [], [], []
    rows, columns, targets = [], [], []
    for row, group in enumerate(groups):
        common = common_length(group)
        tokens, places, branch = list(group[0].input_ids[:common]), list(range(common)), [0] * common
        for number, sample in enumerate(group, 1):
            offset = len(tokens) - common  # from a place in the sample to its place in the row
            own = len(sample.input_ids) - common
            tokens += sample.input_ids[common:]
            places += range(common, common + own)
            branch += [number] * own
            for at, label in enumerate(sample.labels):
                if label != IGNORE:
                    rows.append(row)
                    columns.append(at - 1 if at - 1 < common else at - 1 + offset)
                    targets.append(label)
        ids.append(tokens)
        positions.append(places)
        branches.append(branch)
    inputs = {"input_ids": _padded(ids, pad)}
    if len(groups) == len(batch):
        inputs["attention_mask"] = inputs["input_ids"] != pad
    else:
        inputs["position_ids"] = _padded(positions, 0)
        inputs["attention_mask"] = _mask(inputs["input_ids"] != pad, _padded(branches, 0), dtype)
    counts = [sum(label != IGNORE for label in sample.labels) for sample in batch]
    return Packed(inputs, torch.tensor(rows), torch.tensor(columns), torch.tensor(targets), counts)


def common_length(group: Sequence[Encoded]) -> int:
    """How many tokens all samples begin with, answers not counted; a tokenizer may merge across the border."""
    length = min(len(sample.prompt_ids) for sample in group)
    first = group[0].input_ids
    for sample in group[1:]:
        while sample.input_ids[:length] != first[:length]:
            length -= 1
    return length


def packed_length(group: Sequence[Encoded]) -> int:
    """Tokens of the row that the samples share."""
    common = common_length(group)
    return common + sum(len(sample.input_ids) - common for sample in group)


def _mask(visible: Tensor, branches: Tensor, dtype: torch.dtype) -> Tensor:
    """rows × 1 × length × length: 0 where the second axis's token may see the third's, very low elsewhere."""
    length = visible.shape[1]
    earlier = torch.ones(length, length, dtype=torch.bool).tril()
    same = (branches[:, None, :] == 0) | (branches[:, None, :] == branches[:, :, None])
    allowed = earlier & same & visible[:, None, :]
    return torch.zeros(allowed.shape, dtype=dtype).masked_fill_(~allowed, torch.finfo(dtype).min).unsqueeze(1)


def _padded(rows: Sequence[Sequence[int]], value: int) -> Tensor:
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[value] * (longest - len(row))] for row in rows])
