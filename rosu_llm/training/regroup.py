"""A window's samples in micro-batches of similar length, so that little of them is padding.

The loss of a window is its sum over all answer tokens by their number (``window_tokens``), however it is cut into
micro-batches. So its samples may be sorted by length and cut again, by the number of tokens with padding: into as many
micro-batches as were collated, of as few tokens as that allows, so that memory shrinks and nothing is launched more
often; or into micro-batches of ``micro_batch_tokens``.

A third answer of the samples (``alternate``) stays beside them and counts as one more row, since it takes part in the
same pass. What has to be known of the samples for all that, and where their answers are, is read from the device once
per window.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as functional
from torch import Tensor

from ..data.batching import plan_batches
from ..data.pairing import ForgetRetainDataset
from ..errors import ConfigError, DataError
from ..losses.language import ALTERNATE, IGNORE, POSITIONS, Positions
from ..losses.registry import Batch


class _Row(NamedTuple):
    """Of one sample: where it ends, the columns that predict its answer tokens, and whether there is padding in it."""

    end: int
    answers: list[int]
    gaps: bool


_Rows = list[_Row]


def regroup(parts: Mapping[str, Sequence[Batch]], tokens: int | None, join: bool = False) -> dict[str, list[Batch]]:
    """The micro-batches of every part of a window, cut again; each knows where its answers are (``answer_positions``).

    Args:
        parts: as they were collated. One that holds more than tensors with a row per sample stays as it is.
        tokens: how many a micro-batch may have, with padding. None: as few as leave their number as it is; 0: leave
            all as they are.
        join: the model is to be handed every micro-batch as one row without padding.
    """
    regular = {part: batches for part, batches in parts.items() if _regular(batches)}
    third = {part: _third(batches) for part, batches in regular.items() if ALTERNATE in batches[0]}
    known = _read({**regular, **{f"{part} {ALTERNATE}": batches for part, batches in third.items()}})
    result: dict[str, list[Batch]] = {}
    for part, batches in parts.items():
        if part not in known:
            if join:
                raise DataError(
                    f"padding_free=True: the {part} batches hold more than tensors with a row per sample, and cannot "
                    "become one row. Leave padding_free out."
                )
            result[part] = list(batches)
            continue
        rows, others = known[part], known.get(f"{part} {ALTERNATE}")
        if tokens == 0 or (tokens is None and len(batches) == 1):
            result[part], first = [], 0
            for batch in batches:
                own = slice(first, first + len(batch["input_ids"]))
                result[part].append(_located(batch, rows[own], others and others[own], join))
                first = own.stop
        else:
            result[part] = _cut(batches, rows, others, tokens, join)
    return result


def _third(batches: Sequence[Batch]) -> list[Batch]:
    return [batch[ALTERNATE] for batch in batches]


def _size(batch: Batch) -> int:
    """Tokens of a pass over the batch, with padding: its third answers are as wide as its answers there."""
    rows, width = batch["input_ids"].shape
    return int(2 * rows * max(width, batch[ALTERNATE]["input_ids"].shape[1]) if ALTERNATE in batch else rows * width)


def check_budget_of_tokens(tokens: int | None, dataset: Any) -> None:
    """Raise if a sample alone has more tokens than a micro-batch may have."""
    if not tokens or not isinstance(dataset, ForgetRetainDataset):
        return
    longest = max(_length(part[i]) for part in (dataset.forget, dataset.retain) for i in range(len(part)))
    later = getattr(dataset.forget, "every_alternate", ())  # third answers of all epochs, beside an answer each
    longest = max([longest, *(2 * len(other["input_ids"]) for other in later)])
    if longest > tokens:
        raise ConfigError(
            f"micro_batch_tokens={tokens} is less than the longest sample has, {longest} tokens: raise it to at least "
            f"{longest}, or shorten samples with max_length."
        )


def _length(sample: Mapping[str, Any]) -> int:
    """Tokens of a pass over one sample."""
    own = len(sample["input_ids"])
    return 2 * max(own, len(sample[ALTERNATE]["input_ids"])) if ALTERNATE in sample else own


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
            if name == ALTERNATE:
                if len(value["input_ids"]) != rows:
                    return False
                continue
            if not isinstance(value, Tensor) or value.dim() == 0 or len(value) != rows:
                return False
            if name in ("attention_mask", "labels") and value.shape != (rows, length):
                return False
            if not _per_token(name, batches) and value.shape[1:] != first[name].shape[1:]:
                return False
    return ALTERNATE not in first or _regular(_third(batches))


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
                answers_at = [at - 1 for at, yes in enumerate(labelled) if yes and at]
                found[part].append(_Row(end, answers_at, not all(own[:end])))
    return found


def _cut(batches: Sequence[Batch], rows: _Rows, others: _Rows | None, tokens: int | None, join: bool) -> list[Batch]:
    lengths, joined, enough = [row.end for row in rows], _joined(batches), tokens or max(map(_size, batches))
    third = None
    if others is not None:
        third = _joined(_third(batches))
        lengths, enough = [max(a, b.end) for a, b in zip(lengths, others, strict=True)], enough // 2
    if tokens is None:
        enough = _even(lengths, enough, len(batches))
    result: list[Batch] = []
    for chosen in plan_batches(lengths, batch_size=len(rows), batch_tokens=enough):
        micro = _chosen(joined, chosen, rows)
        if third is not None and others is not None:
            micro[ALTERNATE] = _chosen(third, chosen, others)
        result.append(_located(micro, [rows[row] for row in chosen], others and [others[row] for row in chosen], join))
    return result


def _even(lengths: Sequence[int], enough: int, count: int) -> int:
    """The fewest tokens per micro-batch that need no more than ``count`` of them; at most ``enough``."""
    few = max(lengths) - 1
    while enough - few > 1:
        middle = (few + enough) // 2
        if len(plan_batches(lengths, batch_size=len(lengths), batch_tokens=middle)) <= count:
            enough = middle
        else:
            few = middle
    return enough


#: All rows of a part by name, and whether they have a value per token.
_Joined = dict[str, tuple[Tensor, bool]]


def _joined(batches: Sequence[Batch]) -> _Joined:
    width = max(batch["input_ids"].shape[1] for batch in batches)
    found: _Joined = {}
    for name in (name for name in batches[0] if name != ALTERNATE):
        values, per_token = [batch[name] for batch in batches], _per_token(name, batches)
        if per_token:
            fill = IGNORE if name == "labels" else 0
            values = [functional.pad(value, (0, width - value.shape[1]), value=fill) for value in values]
        found[name] = torch.cat(values), per_token
    return found


def _chosen(joined: _Joined, chosen: Sequence[int], rows: _Rows) -> dict[str, Any]:
    """Some rows, as wide as the longest of them."""
    length = max(rows[row].end for row in chosen)
    index = torch.tensor(chosen).to(joined["input_ids"][0].device)
    return {name: value[index, :length] if per_token else value[index] for name, (value, per_token) in joined.items()}


def _located(batch: Batch, rows: _Rows, others: _Rows | None, join: bool) -> dict[str, Any]:
    device, length = batch["input_ids"].device, batch["input_ids"].shape[1]
    if join and any(row.gaps for row in rows):
        raise DataError(
            "padding_free=True needs samples without padding inside or in front of them, and a collated batch has "
            "some: pad on the right (tokenizer.padding_side='right'), or leave padding_free out."
        )
    places = [(i, column) for i, row in enumerate(rows) for column in row.answers]
    index = torch.tensor(places, dtype=torch.int64).reshape(-1, 2).t().to(device)
    present = torch.cat([torch.arange(i * length, i * length + row.end) for i, row in enumerate(rows)])
    sequences = sum(bool(row.answers) for row in rows)
    found = Positions(index[0], index[1], len(places), sequences, present.to(device), join)
    located = {**batch, POSITIONS: found}
    return located if others is None else {**located, ALTERNATE: _located(batch[ALTERNATE], others, None, join)}
