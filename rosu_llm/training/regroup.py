"""A window's samples in micro-batches of similar length, so that little of them is padding.

The loss of a window is its sum over all answer tokens by their number (``window_tokens``), however it is cut into
micro-batches. So its samples may be sorted by length and cut again, by the number of tokens with padding: as many as
the largest collated micro-batch has, so that no pass takes more memory than it did, or ``micro_batch_tokens``.

What has to be known of the samples for that, and where their answers are, is read from the device once per window.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor

from ..data.batching import plan_batches
from ..data.pairing import ForgetRetainDataset
from ..errors import ConfigError
from ..losses.language import IGNORE, POSITIONS, Positions
from ..losses.registry import Batch

#: For every row of a part: where it ends, and the columns that predict its answer tokens.
_Rows = list[tuple[int, list[int]]]


def regroup(parts: Mapping[str, Sequence[Batch]], tokens: int | None) -> dict[str, list[Batch]]:
    """The micro-batches of every part of a window, cut again; each knows where its answers are (``answer_positions``).

    Args:
        parts: as they were collated. One that holds more than tensors with a row per sample stays as it is.
        tokens: how many a micro-batch may have, with padding. None: as many as the largest has now; 0: leave all as
            they are.
    """
    known = _read({part: batches for part, batches in parts.items() if _regular(batches)})
    result: dict[str, list[Batch]] = {}
    for part, batches in parts.items():
        if part not in known:
            result[part] = list(batches)
        elif tokens == 0 or (tokens is None and len(batches) == 1):
            rows = iter(known[part])
            result[part] = [_located(b, [next(rows) for _ in b["input_ids"]]) for b in batches]
        else:
            result[part] = _cut(batches, known[part], tokens or max(b["input_ids"].numel() for b in batches))
    return result


def check_budget_of_tokens(tokens: int | None, dataset: Any) -> None:
    """Raise if a sample alone has more tokens than a micro-batch may have."""
    if not tokens or not isinstance(dataset, ForgetRetainDataset):
        return
    longest = max(len(part[i]["input_ids"]) for part in (dataset.forget, dataset.retain) for i in range(len(part)))
    if longest > tokens:
        raise ConfigError(
            f"micro_batch_tokens={tokens} is less than the longest sample has, {longest} tokens: raise it to at least "
            f"{longest}, or shorten samples with max_length."
        )


def _regular(batches: Sequence[Batch]) -> bool:
    """Whether every value is a tensor with a row per sample, and those per token fit together."""
    first = batches[0]
    if "input_ids" not in first:
        return False
    for batch in batches:
        rows, length = batch["input_ids"].shape[:2]
        if batch.keys() != first.keys() or batch["input_ids"].dim() != 2:
            return False
        for name, value in batch.items():
            if not isinstance(value, Tensor) or value.dim() == 0 or len(value) != rows:
                return False
            if name in ("attention_mask", "labels") and value.shape != (rows, length):
                return False
            if not _per_token(name, batches) and value.shape[1:] != first[name].shape[1:]:
                return False
    return True


def _per_token(name: str, batches: Sequence[Batch]) -> bool:
    return all(batch[name].dim() == 2 and batch[name].shape == batch["input_ids"].shape for batch in batches)


def _read(parts: Mapping[str, Sequence[Batch]]) -> dict[str, _Rows]:
    """What has to be known of every row; the host waits once for all of it."""
    flat: list[Tensor] = []
    for batches in parts.values():
        for batch in batches:
            answers = batch["labels"] != IGNORE
            used = batch["attention_mask"].bool() | answers if "attention_mask" in batch else torch.ones_like(answers)
            flat.append(torch.stack([used, answers]).reshape(-1))
    near = torch.cat(flat).cpu() if flat else torch.empty(0)
    found: dict[str, _Rows] = {}
    for part, batches in parts.items():
        found[part] = []
        for batch in batches:
            rows, length = batch["input_ids"].shape
            (used, answers), near = near[: 2 * rows * length].view(2, rows, length), near[2 * rows * length :]
            for own, labelled in zip(used.tolist(), answers.tolist(), strict=True):
                end = max((at + 1 for at, yes in enumerate(own) if yes), default=length)
                found[part].append((end, [at - 1 for at, yes in enumerate(labelled) if yes and at]))
    return found


def _cut(batches: Sequence[Batch], rows: _Rows, tokens: int) -> list[Batch]:
    width = max(batch["input_ids"].shape[1] for batch in batches)
    joined: dict[str, Tensor] = {}
    for name in batches[0]:
        values = [batch[name] for batch in batches]
        if _per_token(name, batches):
            fill = IGNORE if name == "labels" else 0
            values = [functional.pad(value, (0, width - value.shape[1]), value=fill) for value in values]
        joined[name] = torch.cat(values)
    result: list[Batch] = []
    for chosen in plan_batches([end for end, _ in rows], batch_size=len(rows), batch_tokens=tokens):
        length = max(rows[row][0] for row in chosen)
        index = torch.tensor(chosen).to(joined["input_ids"].device)
        micro = {
            name: value[index, :length] if _per_token(name, batches) else value[index] for name, value in joined.items()
        }
        result.append(_located(micro, [rows[row] for row in chosen]))
    return result


def _located(batch: Batch, rows: _Rows) -> dict[str, Any]:
    places = [(row, column) for row, (_, columns) in enumerate(rows) for column in columns]
    index = torch.tensor(places, dtype=torch.int64).reshape(-1, 2).t().to(batch["input_ids"].device)
    found = Positions(index[0], index[1], len(places), sum(bool(columns) for _, columns in rows))
    return {**batch, POSITIONS: found}
