"""Pools of gloo ranks, one for each world size, shared by all tests of a session."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from .ranks import RankPool

OnRanks = Callable[..., list[Any]]


@pytest.fixture(scope="session")
def _pools() -> Iterator[dict[int, RankPool]]:
    pools: dict[int, RankPool] = {}
    yield pools
    for pool in pools.values():
        pool.close()


@pytest.fixture(scope="session")
def on_ranks(_pools: dict[int, RankPool]) -> OnRanks:
    """``on_ranks(world, function, *args)`` calls ``function(rank, world, *args)`` on ``world`` gloo ranks."""

    def run(world: int, function: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
        return _pools.setdefault(world, RankPool(world)).run(function, *args, **options)

    return run
