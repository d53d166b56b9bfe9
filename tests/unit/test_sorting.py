"""Rows in the order of their keys, however many of them share a half or all of it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dedup.core.keys import TIES, by_key

WORD = st.integers(0, 2**64 - 1)


@given(st.lists(st.tuples(st.integers(0, 30) | WORD, st.integers(0, 3) | WORD), max_size=60))
def test_rows_are_in_the_order_of_both_halves_and_equal_rows_stay_in_their_own(pairs: list[tuple[int, int]]) -> None:
    """Exactly the order of numpy's stable sort by both halves."""
    high, low = (np.array([pair[half] for pair in pairs], dtype=np.uint64) for half in (0, 1))
    assert by_key(high, low).tolist() == np.lexsort((low, high)).tolist()


@pytest.mark.parametrize("duplicates", [0, 1, 100, 10_000 // TIES - 1, 10_000 // TIES + 1, 5_000])
def test_few_and_many_duplicates_among_hashes(duplicates: int) -> None:
    """The same on both sides of the share from which on all rows are sorted by both halves, also for first halves that are equal."""
    draw = np.random.default_rng(7)
    high, low = (draw.integers(0, 2**64, 10_000, dtype=np.uint64) for _ in range(2))
    high[draw.integers(0, 10_000, duplicates)] = high[draw.integers(0, 10_000, duplicates)]
    again = draw.integers(0, 10_000, duplicates // 2)
    high[again], low[again] = high[0], low[0]
    assert by_key(high, low).tolist() == np.lexsort((low, high)).tolist()
