"""What processes share among themselves."""

from __future__ import annotations

import pytest

from rosu_llm.training.ranks import Ranks


@pytest.mark.parametrize("world", [1, 2, 3, 5])
@pytest.mark.parametrize("count", [0, 1, 2, 6, 7])
def test_every_item_is_one_ranks_own_and_all_take_equally_many(world: int, count: int) -> None:
    items = list(range(count))
    shares = [list(Ranks(rank, world, lambda values: values).share(items)) for rank in range(world)]
    assert sorted(item for share in shares for item, own in share if own) == items
    assert len({len(share) for share in shares}) == 1
    assert all(item in items for share in shares for item, _ in share)


def test_alone_there_is_nothing_to_merge() -> None:
    assert Ranks(0, 1, lambda values: values).merge({"a": 1.0}) == {"a": 1.0}
