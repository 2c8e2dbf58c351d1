"""Pairs are a function of (seed, epoch, index) alone and use every retain sample equally often."""

from __future__ import annotations

import copy
import pickle
import random
from collections import Counter

import pytest
import torch
from torch.utils.data import DataLoader

from rosu_llm import ForgetRetainCollator, ForgetRetainDataset
from rosu_llm.errors import DataError
from tests.models import samples


def numbered(count: int, start: int = 0) -> list[dict[str, list[int]]]:
    """Samples that say which one they are."""
    return [{"input_ids": [start + i], "labels": [start + i]} for i in range(count)]


def drawn(dataset: ForgetRetainDataset, epochs: int) -> list[int]:
    """Retain indices in the order a run without shuffling sees them."""
    result = []
    for epoch in range(epochs):
        dataset.set_epoch(epoch)
        for i in range(len(dataset)):
            result += [s["input_ids"][0] for s in dataset[i]["retain"]]
    return result


def test_items_hold_the_forget_sample_and_its_partners() -> None:
    forget, retain = numbered(5, start=100), numbered(7)
    dataset = ForgetRetainDataset(forget, retain, retain_per_forget=3)
    assert len(dataset) == 5
    for i in range(5):
        item = dataset[i]
        assert item["forget"] is forget[i]
        assert [s["input_ids"][0] for s in item["retain"]] == dataset.partners(i)
        assert len(item["retain"]) == 3


@pytest.mark.parametrize(
    ("forget", "retain", "per"), [(5, 7, 1), (7, 5, 1), (4, 6, 3), (3, 1, 2), (6, 6, 6), (2, 50, 4)]
)
def test_every_retain_sample_is_drawn_equally_often(forget: int, retain: int, per: int) -> None:
    """After any number of items, counts differ by at most one; after whole decks they are equal."""
    dataset = ForgetRetainDataset(numbered(forget), numbered(retain), retain_per_forget=per, seed=3)
    seen = drawn(dataset, epochs=retain)
    assert set(Counter(seen).values()) == {forget * per}
    for end in range(1, len(seen) + 1):
        counts = Counter(seen[:end])
        assert max(counts.values()) - min(counts.get(j, 0) for j in range(retain)) <= 1


def test_pairs_do_not_depend_on_the_order_of_access_or_on_what_was_seen_before() -> None:
    reference = ForgetRetainDataset(numbered(9), numbered(4), retain_per_forget=2, seed=5)
    expected = {}
    for epoch in range(4):
        reference.set_epoch(epoch)
        for i in range(9):
            expected[epoch, i] = reference.partners(i)
    keys = list(expected)
    random.Random(0).shuffle(keys)
    used = ForgetRetainDataset(numbered(9), numbered(4), retain_per_forget=2, seed=5)
    for epoch, i in keys:
        used.set_epoch(epoch)
        fresh = ForgetRetainDataset(numbered(9), numbered(4), retain_per_forget=2, seed=5)
        fresh.set_epoch(epoch)
        assert used.partners(i) == fresh.partners(i) == expected[epoch, i]


def test_pairs_consume_no_global_random_state() -> None:
    dataset = ForgetRetainDataset(numbered(9), numbered(20))
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    drawn(dataset, 2)
    assert torch.equal(torch.rand(3), expected)


def test_copies_in_other_processes_agree() -> None:
    dataset = ForgetRetainDataset(numbered(6), numbered(11), seed=2)
    dataset.set_epoch(3)
    expected = [dataset.partners(i) for i in range(6)]
    for other in (copy.deepcopy(dataset), pickle.loads(pickle.dumps(dataset))):
        assert [other.partners(i) for i in range(6)] == expected


def test_the_number_of_workers_does_not_change_the_batches() -> None:
    dataset = ForgetRetainDataset(samples(7, seed=1), samples(9, seed=2), retain_per_forget=2)
    dataset.set_epoch(1)
    batches = [
        list(DataLoader(dataset, batch_size=2, collate_fn=ForgetRetainCollator(), num_workers=workers))
        for workers in (0, 2)
    ]
    for a, b in zip(*batches, strict=True):
        for part in ("forget", "retain"):
            assert all(torch.equal(a[part][k], b[part][k]) for k in a[part])


def test_another_epoch_and_another_seed_pair_differently() -> None:
    forget, retain = numbered(20), numbered(20)
    orders = set()
    for seed in (0, 1, 2):
        dataset = ForgetRetainDataset(forget, retain, seed=seed)
        for epoch in range(3):
            dataset.set_epoch(epoch)
            orders.add(tuple(dataset.partners(i)[0] for i in range(20)))
    assert len(orders) == 9


def test_epochs_continue_the_deck_instead_of_starting_over() -> None:
    """With fewer forget than retain samples, ten epochs of two reach all twenty retain samples."""
    dataset = ForgetRetainDataset(numbered(2), numbered(20))
    assert sorted(drawn(dataset, 10)) == list(range(20))


def test_counting_from_the_end_finds_the_same_pairs() -> None:
    dataset = ForgetRetainDataset(numbered(3), numbered(5))
    assert dataset[-1] == dataset[2]


@pytest.mark.parametrize(("forget", "retain", "missing"), [([], [1], "forget"), ([1], [], "retain")])
def test_an_empty_part_is_refused_by_name(forget: list[int], retain: list[int], missing: str) -> None:
    with pytest.raises(DataError, match=f"The {missing} data set is empty"):
        ForgetRetainDataset(forget, retain)


def test_a_stream_is_refused() -> None:
    with pytest.raises(DataError, match="forget"):
        ForgetRetainDataset(iter([1, 2]), [1])


@pytest.mark.parametrize("per", [0, -1])
def test_retain_per_forget_is_at_least_one(per: int) -> None:
    with pytest.raises(DataError, match=f"retain_per_forget={per}"):
        ForgetRetainDataset([1], [1], retain_per_forget=per)
