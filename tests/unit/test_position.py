"""Ranges against Python's own sets: the same answers, and one representation for one set."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpoint import Partition, Range, Ranges
from checkpoint.position import overlapping
from dedup.reprocessing import from_log

BIG = 2**63 - 1

numbers = st.sets(st.integers(0, 40))
pairs = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 8)).map(lambda p: (p[0], p[0] + p[1])))


def as_set(ranges: Ranges) -> set[int]:
    return {n for r in ranges.items for n in range(r.first, r.last + 1)}


def assert_canonical(ranges: Ranges) -> None:
    """Sorted, not empty, and with at least one missing number between neighbours."""
    assert all(r.first <= r.last for r in ranges.items)
    assert all(a.last + 1 < b.first for a, b in zip(ranges.items, ranges.items[1:], strict=False))


@given(numbers)
def test_of_numbers_holds_exactly_these_numbers(values: set[int]) -> None:
    """Numbers in any order, with repeats, give the set of them in its one form."""
    ranges = Ranges.of_numbers(sorted(values, key=lambda n: n % 7) * 2)
    assert as_set(ranges) == values
    assert len(ranges) == len(values)
    assert_canonical(ranges)


@given(pairs)
def test_of_pairs_is_their_union(closed: list[tuple[int, int]]) -> None:
    """Closed pairs in any order, overlapping or adjacent, give their union in its one form."""
    ranges = Ranges.of(closed)
    assert as_set(ranges) == {n for first, last in closed for n in range(first, last + 1)}
    assert_canonical(ranges)


@given(numbers)
def test_one_set_is_one_value(values: set[int]) -> None:
    """Two ways to build a set give equal values, so that batch records can be compared."""
    assert Ranges.of((n, n) for n in values) == Ranges.of_numbers(list(values))


@given(numbers, numbers)
def test_set_operations_agree_with_sets(left: set[int], right: set[int]) -> None:
    """Union, intersection and difference are those of Python's sets, in the one form."""
    a, b = Ranges.of_numbers(list(left)), Ranges.of_numbers(list(right))
    for ours, theirs in ((a | b, left | right), (a & b, left & right), (a - b, left - right)):
        assert as_set(ours) == theirs
        assert_canonical(ours)


@pytest.mark.full
@given(numbers, numbers)
def test_difference_and_intersection_part_a_set(left: set[int], right: set[int]) -> None:
    """What is in the other set and what is not make up the whole, as every coverage proof assumes."""
    a, b = Ranges.of_numbers(list(left)), Ranges.of_numbers(list(right))
    assert (a - b) | (a & b) == a
    assert not ((a - b) & b)


@given(numbers, st.lists(st.integers(-5, 45)))
def test_contains_agrees_with_in(values: set[int], asked: list[int]) -> None:
    """The vectorised question has the answers of `in`, number by number."""
    ranges = Ranges.of_numbers(list(values))
    assert ranges.contains(np.array(asked, dtype=np.int64)).tolist() == [n in values for n in asked]


@given(pairs, pairs)
def test_what_is_touched_is_told(known: list[tuple[int, int]], asked: list[tuple[int, int]]) -> None:
    """A range is touched where it shares a number with the set."""
    ranges, columns = Ranges.of(known), np.array(asked, dtype=np.int64).reshape(-1, 2)
    there = as_set(ranges)
    assert ranges.touched(columns[:, 0], columns[:, 1]).tolist() == [any(n in there for n in range(a, b + 1)) for a, b in asked]


@given(pairs)
def test_an_overlap_is_seen(closed: list[tuple[int, int]]) -> None:
    """Any two of them that share a number, wherever they stand in the list."""
    columns = np.array(closed, dtype=np.int64).reshape(-1, 2)
    assert overlapping(columns[:, 0], columns[:, 1]) == (sum(b - a + 1 for a, b in closed) != len(Ranges.of(closed)))


@given(pairs, st.integers(0, 60))
def test_gaps_are_what_is_missing(closed: list[tuple[int, int]], until: int) -> None:
    """Between the first number and a later one, also one that lies before the last range."""
    ranges = Ranges.of(closed)
    there = as_set(ranges)
    assert as_set(ranges.gaps(until)) == (set(range(min(there), until + 1)) - there if there else set())


@given(pairs, st.integers(1, 6))
def test_few_ranges_hold_all_numbers_and_few_others(closed: list[tuple[int, int]], count: int) -> None:
    """The narrowest gaps are closed, as many as there are ranges too many."""
    ranges = Ranges.of(Range(*pair) for pair in closed)
    found, gaps = ranges.at_most(count), sorted(b.first - a.last - 1 for a, b in zip(ranges.items, ranges.items[1:], strict=False))
    assert_canonical(found)
    assert len(found.items) == min(count, len(ranges.items)) and as_set(found) >= as_set(ranges)
    assert len(as_set(found)) - len(as_set(ranges)) == sum(gaps[: max(0, len(ranges.items) - count)])


def test_a_gap_that_no_signed_number_holds_is_not_the_narrowest() -> None:
    """Positions use all of 64 bits."""
    far = Ranges([-BIG, BIG - 5, BIG - 1], [-BIG, BIG - 5, BIG - 1])
    assert list(far.at_most(2).items) == [Range(-BIG, -BIG), Range(BIG - 5, BIG - 1)]


@given(numbers)
def test_only_the_empty_set_is_false(values: set[int]) -> None:
    """A set is true as soon as it holds one number, zero included."""
    assert bool(Ranges.of_numbers(list(values))) == bool(values)


def test_largest_sequence_numbers_do_not_overflow() -> None:
    """A broker may count up to 2**63 - 1; sets that touch it stay right."""
    ranges = Ranges.of([(0, 0), (BIG - 1, BIG)])
    assert Ranges.of_numbers([BIG, 0, BIG - 1]) == ranges
    assert ranges.contains(np.array([BIG, BIG - 2], dtype=np.int64)).tolist() == [True, False]
    assert ranges - Ranges.of([(BIG, BIG)]) == Ranges.of((Range(0, 0), Range(BIG - 1, BIG - 1)))


def test_a_long_range_costs_no_memory_per_number() -> None:
    """A range of all numbers is one item, whose size is counted and not enumerated."""
    everything = Ranges.of([(0, BIG - 1)])
    assert (everything & Ranges.of([(5, 6), (9, 9)])).items == (Range(5, 6), Range(9, 9))
    assert len(everything) == BIG


def test_a_range_that_ends_before_it_starts_is_refused() -> None:
    """A reversed pair is a mistake of the caller, not an empty set."""
    with pytest.raises(ValueError, match="5-4 ends before it starts"):
        Ranges.of([(5, 4)])


def test_sets_read_as_people_write_them() -> None:
    """Messages name ranges in the short form."""
    assert str(Ranges.of([(1, 3), (7, 7)])) == "[1-3, 7]"
    assert str(Partition("kafka", "orders", 3)) == "kafka/orders/3"


def test_partitions_sort_by_source_topic_number() -> None:
    """Partitions sort by number, not by its digits, so that locks are always taken in one order."""
    assert sorted([Partition("a", "t", 10), Partition("a", "t", 9), Partition("a", "s", 11)])[0].partition == 11
    assert Partition("a", "t", 9) < Partition("a", "t", 10)


@pytest.mark.full
@given(st.sets(st.integers(0, 60)), st.sets(st.integers(0, 60)))
def test_a_difference_is_that_of_the_sets(left: set[int], right: set[int]) -> None:
    """What is taken away is exactly what the other holds, however the ranges lie, and the answer is in the one form there is."""
    assert Ranges.of_numbers(list(left)) - Ranges.of_numbers(list(right)) == Ranges.of_numbers(sorted(left - right))


@given(pairs)
def test_windows_hold_all_ranges_and_join_neighbours(some: list[tuple[int, int]]) -> None:
    """No number is left out or there twice, no window spans more than fits into memory, and what fits together is read at once."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(from_log, "WINDOW", 10)
        windows = list(from_log.windows(Ranges.of(some)))
    assert sorted(n for window in windows for n in as_set(window)) == sorted(as_set(Ranges.of(some)))
    spans = [from_log.span_of(window) for window in windows]
    assert all(span.last - span.first < 10 for span in spans)
    firsts = [window.items[0] for window in windows[1:]]
    assert all(min(first.last, first.first + 9) - span.first >= 10 for span, first in zip(spans, firsts, strict=False))
