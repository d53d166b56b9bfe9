"""What is done in another way for few rows, or without a copy, gives what the general way gives."""

from __future__ import annotations

from collections.abc import Sequence
from unittest.mock import patch

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoint.records import BATCHES
from deadletter.letter import HISTORY, table_of
from dedup import verify
from dedup.core import index
from dedup.core import rows as arrow_frames
from dedup.core.index import INDEX_COLUMNS, Keys
from dedup.core.keys import key_words
from dedup.core.planning import Order
from dedup.core.rows import ArrowFrames, picked, taken

POSITIONS = pa.schema(zip(INDEX_COLUMNS[:5], (pa.string(), pa.string(), pa.int32(), pa.int64(), pa.int64()), strict=True))

PLACES = st.tuples(st.sampled_from(["a", "b", ""]), st.sampled_from(["t", "u v", "ü"]), st.integers(-1, 12))

ROWS = st.lists(st.tuples(PLACES, st.integers(0, 3), st.integers(0, 1)), max_size=12)

WHOLE = st.sampled_from([bytes(16), b"\0" * 15 + b"\1", b"\1" + b"\0" * 15, b"\xff" * 16])

KEY = st.one_of(st.none(), WHOLE)

RANGES = st.lists(st.fixed_dictionaries({"first": st.integers(0, 9), "last": st.integers(10, 19)}), max_size=2)


def table(rows: Sequence[tuple[tuple[str, str, int], int, int]]) -> pa.Table:
    """Positions."""
    return pa.Table.from_pylist([dict(zip(POSITIONS.names, (*place, n, p), strict=True)) for place, n, p in rows], schema=POSITIONS)


@given(rows=ROWS)
def test_partitions_of_few_rows_are_those_of_many(rows: list[tuple[tuple[str, str, int], int, int]]) -> None:
    """Which partition a row belongs to does not depend on how many there are."""
    few, many = index._places_of_few(table(rows)), index._places_of_many(table(rows))
    assert few[0] == many[0] == tuple(sorted({place for place, *_ in rows}))
    assert few[1].tolist() == many[1].tolist()


@given(rows=ROWS, lives=st.lists(st.integers(0, 2), min_size=12, max_size=12))
def test_lives_are_told_by_partition_and_incarnation(rows: list[tuple[tuple[str, str, int], int, int]], lives: list[int]) -> None:
    """Each row of a page of records is counted for its own life of its own partition."""
    codes, found = verify._lives(table(rows).append_column("incarnation", pa.array(lives[: len(rows)], pa.int64())))
    assert [found[code] for code in codes.tolist()] == [(place, life) for (place, *_), life in zip(rows, lives, strict=False)]
    assert len(set(found)) == len(found)


@given(count=st.integers(0, 6), cut=st.integers(0, 6), rows=st.lists(st.integers(0, 5), max_size=6))
def test_rows_are_picked_as_taken(count: int, cut: int, rows: list[int]) -> None:
    """A slice of neighbours is what taking them one by one would give, also of a table in several pieces."""
    whole = pa.table({"n": list(range(6)), "b": [b"x" * n for n in range(6)]})
    whole = pa.concat_tables([whole.slice(0, cut), whole.slice(cut)])
    for chosen in (np.array(rows, dtype=np.int64), np.arange(min(cut, 6 - count), min(cut, 6 - count) + count)):
        assert picked(whole, chosen).to_pylist() == whole.take(pa.array(chosen, pa.int64())).to_pylist()


@given(rows=st.lists(st.integers(0, 5), max_size=8), most=st.integers(1, 40))
def test_rows_of_more_than_one_piece_are_those_of_one(rows: list[int], most: int) -> None:
    """Of a table that is too large for one piece the same rows come, in the same order."""
    whole = pa.concat_tables([pa.table({"n": [n], "b": [b"x" * n]}) for n in range(6)])
    chosen = np.array(rows, dtype=np.int64)
    with patch.object(arrow_frames, "LARGEST", most):
        found = taken(whole, chosen)
    assert found.to_pylist() == whole.take(pa.array(chosen)).to_pylist()


@pytest.mark.full
def test_rows_of_more_than_two_gibibytes_are_taken() -> None:
    """Arrow itself refuses to take a single row of them. The pieces share one buffer, so that they need no memory."""
    piece = pa.table({"n": [0, 1], "b": [b"x" * 2**28] * 2})
    whole = pa.concat_tables([piece] * 5)
    assert taken(whole, np.array([9, 0, 9])).column("n").to_pylist() == [1, 0, 1]


@settings(deadline=None)
@given(rows=ROWS, gone=ROWS)
def test_rejected_rows_go_from_few_rows_as_from_many(
    rows: list[tuple[tuple[str, str, int], int, int]], gone: list[tuple[tuple[str, str, int], int, int]]
) -> None:
    """`tx.reject` returns the same rest, in the same order, whether it loops or joins; a null is no position."""
    given_rows, positions = table([*rows, *gone[:2]]), table(gone)
    nothing = pa.table([pa.nulls(1, f.type) for f in POSITIONS], schema=POSITIONS)
    given_rows, positions = pa.concat_tables([given_rows, nothing]), pa.concat_tables([positions, nothing])
    few = ArrowFrames().without(given_rows, positions)
    with patch.object(arrow_frames, "FEW", -1):
        assert few.to_pylist() == ArrowFrames().without(given_rows, positions).to_pylist()


@given(keys=st.lists(KEY, max_size=6), cut=st.integers(0, 6), fixed=st.booleans())
def test_keys_are_read_as_numbers(keys: list[bytes | None], cut: int, fixed: bool) -> None:
    """Of either type, with nulls or without, in pieces or not: the halves of each key, zero for null."""
    column = pa.array(keys, pa.binary(16) if fixed else pa.binary())
    for some, of in ((pa.chunked_array([column[:cut], column[cut:]]), keys), (column, keys), (column[cut:], keys[cut:])):
        high, low = key_words(some)
        assert [(h << 64) + n for h, n in zip(high.tolist(), low.tolist(), strict=True)] == [int.from_bytes(k or b"", "big") for k in of]


@given(keys=st.sets(WHOLE, max_size=4), asked=st.lists(WHOLE, max_size=6))
def test_keys_are_found_by_their_halves_as_in_tables(keys: set[bytes], asked: list[bytes]) -> None:
    """Nobody has to make a table of keys to look them up."""
    there = sorted(keys)
    found = Keys(*key_words(pa.array(there, pa.binary(16))), np.arange(len(there)))
    at, payload = found.find(pa.table({"key": pa.array(asked, pa.binary(16))}))
    again, same = found.find_words(*key_words(pa.array(asked, pa.binary(16))))
    assert at.tolist() == again.tolist() == [there.index(k) if k in keys else -1 for k in asked]
    assert payload.tolist() == same.tolist() == [max(row, 0) for row in at.tolist()]


@given(
    records=st.lists(
        st.fixed_dictionaries(
            {"source": st.text(max_size=3), "batch_id": st.integers(0, 2**62), "seen": RANGES, "late": RANGES},
            optional={"query_id": st.text(max_size=3), "other": st.integers()},
        ),
        max_size=3,
    )
)
def test_a_table_of_rows_is_that_of_pyarrow(records: list[dict[str, object]]) -> None:
    """Values, nulls, types and what may be null are those of `Table.from_pylist`."""
    for schema in (BATCHES, HISTORY):
        made = table_of(records, pa.struct(list(schema)))
        assert made.equals(pa.Table.from_pylist(records, schema=schema)) and made.schema == schema


@given(sequences=st.lists(KEY, max_size=6), fixed=st.booleans(), behind=st.integers(0, 5))
def test_sequences_are_told_apart(sequences: list[bytes | None], fixed: bool, behind: int) -> None:
    """Rows of one sequence wait behind each other, rows without one never; what is asked for is sorted."""
    order = Order(pa.array(sequences, pa.binary(16) if fixed else pa.binary()), len(sequences))
    rows = np.arange(len(sequences))
    assert order.asked(rows).to_pylist() == sorted({s for s in sequences if s is not None})
    if behind < len(sequences):
        order.block_behind(np.array([behind]))
        blocker = sequences[behind]
        assert order.waits(rows).tolist() == [row > behind and s == blocker is not None for row, s in enumerate(sequences)]
