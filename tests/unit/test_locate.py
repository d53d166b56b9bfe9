"""Where positions stand in a batch: the quick way agrees with the general one."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from dedup.core.index import Columns, Index, Ranks, match

BIG = 2**63 - 1
numbers = st.one_of(st.integers(-3, 6), st.integers(2**40, 2**40 + 3), st.sampled_from([-BIG - 1, -BIG, BIG - 1, BIG]))
positions = st.lists(st.tuples(st.integers(0, 2), numbers, st.one_of(st.integers(0, 2), st.sampled_from([BIG, -BIG - 1]))), max_size=30)
asked = st.lists(st.tuples(st.integers(-1, 4), numbers, st.integers(-1, 3)), max_size=20)


def columns(rows: list[tuple[int, int, int]]) -> Columns:
    """Three columns of rows."""
    place, number, part = (np.array([row[i] for row in rows], dtype=np.int64) for i in range(3))
    return place, number, part


@given(positions, asked)
def test_search_finds_what_sorting_both_finds(rows: list[tuple[int, int, int]], wanted: list[tuple[int, int, int]]) -> None:
    """A position is found at the first row that has it, and one that the batch lacks is not found, however far apart the numbers are."""
    ordered = columns(sorted(rows))
    several = columns(wanted + rows[::2])
    expected = [sorted(rows).index(one) if one in rows else -1 for one in wanted + rows[::2]]
    assert match(ordered, several).tolist() == expected
    ranks = Ranks.of(ordered)
    if ranks is not None:
        assert ranks.find(several).tolist() == expected


NAMES = ("source", "topic", "partition", "sequence_number", "part")
KEPT = [*itertools.product("st", "uv", range(2), range(2), [0])]
names = st.sampled_from(["s", "t", "u", "v", "w", None])
places = st.tuples(names, names, st.sampled_from([0.0, 1.0, 2.0, None]), st.sampled_from([0.0, 1.0, 2.0, None]), st.just(0))


@given(st.lists(places, max_size=8), st.sampled_from([1, 100]))
def test_rows_without_a_whole_position_are_found_nowhere(asked: list[tuple[Any, ...]], times: int) -> None:
    """A null, as an outer join makes them, is no value of an event, among few rows and many; whole positions beside it are found."""
    table = pa.Table.from_pylist([dict(zip(NAMES, row, strict=True)) for row in KEPT])
    table = table.append_column("_key", pa.nulls(16, pa.binary(16))).append_column("_undecodable", [[False] * 16])
    index = Index.of(table, lambda: np.zeros(16, dtype=np.int64))
    types = [pa.string(), pa.string(), pa.float64(), pa.float64(), pa.int64()]  # pandas makes floats of numbers beside a null
    columns = [pa.array([row[i] for row in asked * times], type_) for i, type_ in enumerate(types)]
    found = index.locate(pa.table(columns, names=list(NAMES)))
    assert found.tolist() == [KEPT.index(row) if row in KEPT else -1 for row in asked * times]


def test_usual_positions_are_searched() -> None:
    """A batch of a few partitions is searched, not sorted; rows out of order and numbers too far apart are left to sorting."""
    assert Ranks.of(columns([(0, 2**40, 0), (0, 2**40 + 50_000, 0), (31, 5, 0)])) is not None
    assert Ranks.of(columns([(0, 1, 0), (0, 0, 0)])) is None
    assert Ranks.of(columns([(0, -BIG, 0), (0, BIG, 0)])) is None
    assert Ranks.of(columns([])) is None
