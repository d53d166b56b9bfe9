"""Ranges as arrays answer as ranges do."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from checkpoint.position import Ranges
from dedup.spans import Spans, overlapping

PAIRS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 8)).map(lambda p: (p[0], p[0] + p[1])), max_size=12)


def arrays(pairs: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    found = np.array(pairs, dtype=np.int64).reshape(-1, 2)
    return found[:, 0], found[:, 1]


@given(PAIRS, PAIRS)
def test_a_union_is_the_union(one: list[tuple[int, int]], other: list[tuple[int, int]]) -> None:
    """In any order, overlapping, adjacent or far apart."""
    assert Spans.of(*arrays(one)).ranges() == Ranges.of(one)
    assert (Spans.of(*arrays(one)) | Spans.of(*arrays(other))).ranges() == Ranges.of(one) | Ranges.of(other)


@given(PAIRS, PAIRS, st.lists(st.integers(-2, 80), max_size=9))
def test_what_is_touched_and_contained_is_told(known: list[tuple[int, int]], asked: list[tuple[int, int]], numbers: list[int]) -> None:
    """A range is touched where it shares a position; a number is contained where it is in one."""
    spans, truth = Spans.of(*arrays(known)), Ranges.of(known)
    assert spans.touched(*arrays(asked)).tolist() == [bool(truth & Ranges.of([pair])) for pair in asked]
    assert spans.contains(np.array(numbers, dtype=np.int64)).tolist() == truth.contains(np.array(numbers, dtype=np.int64)).tolist()


@given(PAIRS)
def test_an_overlap_is_seen(pairs: list[tuple[int, int]]) -> None:
    """Any two of them that share a position, wherever they stand in the list."""
    assert overlapping(*arrays(pairs)) == (sum(b - a + 1 for a, b in pairs) != len(Ranges.of(pairs)))


@given(PAIRS, st.integers(0, 90))
def test_gaps_are_what_is_missing(pairs: list[tuple[int, int]], until: int) -> None:
    """Between the first position and a later one."""
    spans, truth = Spans.of(*arrays(pairs)), Ranges.of(pairs)
    last = max([until, *(b for _, b in pairs)])
    wanted = Ranges.of([(truth.items[0].first, last)]) - truth if truth else Ranges()
    assert spans.gaps(last).ranges() == wanted
