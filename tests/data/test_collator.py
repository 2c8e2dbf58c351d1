"""Batches hold exactly the samples' tokens; what is filled in is masked out of attention and labels."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rosu_llm import ForgetRetainCollator, ForgetRetainDataset
from rosu_llm.errors import DataError
from tests.models import samples


def unpadded(batch: dict[str, Any], pad: int) -> list[dict[str, list[int]]]:
    """The rows without padding, having checked what the padding is."""
    rows = []
    for ids, mask, labels in zip(batch["input_ids"], batch["attention_mask"], batch["labels"], strict=True):
        length = int(mask.sum())
        assert mask.tolist() == [1] * length + [0] * (len(mask) - length)
        assert ids[length:].tolist() == [pad] * (len(mask) - length)
        assert labels[length:].tolist() == [-100] * (len(mask) - length)
        rows.append({"input_ids": ids[:length].tolist(), "labels": labels[:length].tolist()})
    return rows


@pytest.mark.parametrize("pad", [0, 59])
def test_plain_samples_come_back_out_of_a_plain_batch(pad: int) -> None:
    data = samples(6, seed=4)
    batch = ForgetRetainCollator(pad)(data)
    assert unpadded(batch, pad) == data
    assert all(v.dtype == torch.long and v.shape == (6, max(len(s["input_ids"]) for s in data)) for v in batch.values())


def test_the_two_parts_are_padded_each_to_its_own_longest() -> None:
    forget, retain = samples(4, seed=1, longest=9), samples(5, seed=2, shortest=12, longest=20)
    dataset = ForgetRetainDataset(forget, retain, retain_per_forget=2)
    batch = ForgetRetainCollator(3)([dataset[i] for i in range(4)])
    assert set(batch) == {"forget", "retain"}
    assert unpadded(batch["forget"], 3) == forget
    assert unpadded(batch["retain"], 3) == [retain[j] for i in range(4) for j in dataset.partners(i)]
    assert batch["forget"]["input_ids"].shape[1] == max(len(s["input_ids"]) for s in forget)


def test_a_single_retain_sample_need_not_be_in_a_list() -> None:
    a, b = samples(2, seed=1)
    batch = ForgetRetainCollator()([{"forget": a, "retain": b}])
    assert unpadded(batch["retain"], 0) == [b]


@pytest.mark.parametrize("part", ["forget", "retain"])
def test_one_part_alone_makes_a_batch_of_one_part(part: str) -> None:
    data = samples(2, seed=1)
    batch = ForgetRetainCollator()([{part: s} for s in data])
    assert set(batch) == {part}
    assert unpadded(batch[part], 0) == data


def test_samples_without_labels_are_learned_whole() -> None:
    batch = ForgetRetainCollator()([{"input_ids": [5, 6, 7]}, {"input_ids": [8]}])
    assert batch["labels"].tolist() == [[5, 6, 7], [8, -100, -100]]


def test_tensors_are_as_good_as_lists() -> None:
    data = samples(3, seed=8)
    tensors = [{k: torch.tensor(v) for k, v in s.items()} for s in data]
    a, b = ForgetRetainCollator()(data), ForgetRetainCollator()(tensors)
    assert all(torch.equal(a[k], b[k]) for k in a)


def test_a_pad_token_inside_a_sample_is_still_attended() -> None:
    batch = ForgetRetainCollator(0)([{"input_ids": [5, 0, 6], "labels": [5, 0, 6]}])
    assert batch["attention_mask"].tolist() == [[1, 1, 1]]
    assert batch["labels"].tolist() == [[5, 0, 6]]


@pytest.mark.parametrize("longest", [1, 5, 100])
def test_longer_samples_are_cut_on_the_right(longest: int) -> None:
    data = samples(6, seed=4)
    expected = [{k: v[:longest] for k, v in s.items()} for s in data]
    assert unpadded(ForgetRetainCollator(0, max_length=longest)(data), 0) == expected


def test_nothing_cannot_be_collated() -> None:
    with pytest.raises(DataError, match="empty list"):
        ForgetRetainCollator()([])
