"""The rows of a batch that are merged leave in a sink what they would leave one by one."""

from __future__ import annotations

import copy
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoint.errors import RowsMisfit
from dedup.core.merges import merges
from dedup.core.rows import ArrowRows, PlainRows, Rows
from dedup.core.steps import Merge

KINDS = {"k": pa.string(), "v": pa.int64(), "a": pa.int64(), "b": pa.int64(), "gone": pa.bool_()}

Sink = dict[str, dict[str, Any]]


def table(rows: Rows) -> pa.Table:
    """Of rows with the same columns."""
    plain = rows.plain()
    return rows.arrow() if plain is None else pa.table({name: pa.array(plain.column(name), KINDS[name]) for name in plain.names})


def is_older(one: int | None, other: int | None) -> bool:
    """Without a value a row is older than any other."""
    return other is not None and (one is None or one < other)


def merge_one(sink: Sink, row: dict[str, Any], how: Merge, dead: dict[str, int | None]) -> None:
    """As a MERGE with one source row; `dead`: how new the deletions of this batch were."""
    key, old, values = row["k"], sink.get(row["k"]), {name: value for name, value in row.items() if name != "gone"}
    if how.newer_by and key in dead and is_older(row["v"], dead[key]):
        return
    gone = how.delete_when is not None and bool(row["gone"])
    if gone:
        dead[key] = row.get("v")
    if old is not None and how.newer_by and not is_older(old["v"], row["v"]):
        return
    if gone:
        sink.pop(key, None)
    else:
        sink[key] = {**(old or dict.fromkeys("kvab")), **values}


@st.composite
def batches(draw: st.DrawFn) -> tuple[Merge, list[dict[str, Any]]]:
    """How to merge, and rows of one or two keys with the same or other columns."""
    newer, deletes, uniform = draw(st.booleans()), draw(st.booleans()), draw(st.booleans())
    rows = []
    for _ in range(draw(st.integers(1, 7))):
        row: dict[str, Any] = {"k": draw(st.sampled_from("xy"))}
        if newer:
            row["v"] = draw(st.none() | st.integers(1, 4))
        if deletes:
            row["gone"] = draw(st.booleans())
        for name in "ab":
            if uniform or draw(st.booleans()):
                row[name] = draw(st.integers(0, 9))
        rows.append(row)
    return Merge(("k",), "v" if newer else None, "gone" if deletes else None), rows


@settings(max_examples=600, deadline=None)
@given(batches(), st.booleans(), st.none() | st.integers(0, 5))
def test_a_batch_leaves_what_its_rows_leave_one_by_one(made: tuple[Merge, list[dict[str, Any]]], there: bool, value: int | None) -> None:
    """Of equally new rows the first one counts, and what follows a deletion has nothing of the deleted row."""
    how, rows = made
    one: Sink = {"x": {"k": "x", "v": value, "a": 100, "b": 200}} if there else {}
    many, dead = copy.deepcopy(one), dict[str, int | None]()
    for row in rows:
        merge_one(one, row, how, dead)
    for turn in merges(PlainRows(rows), how, table, lambda _: {}):
        assert len(set(turn["k"].to_pylist())) == turn.num_rows
        for row in turn.to_pylist():
            merge_one(many, row, how, {})
    assert many == one


def test_texts_in_views_are_keys_like_others() -> None:
    """Arrow cannot take rows of them, and nobody who merges should have to know."""
    rows = pa.table({"k": pa.array(["x", "y", "x"], pa.string_view()), "a": [1, 2, 3]})
    (turn,) = merges(ArrowRows(rows), Merge(("k",)), lambda some: some.arrow(), lambda _: {})
    assert turn.to_pylist() == [{"k": "y", "a": 2}, {"k": "x", "a": 3}]


@pytest.mark.parametrize("newer_by", [None, "a"])
def test_a_key_that_cannot_be_compared_is_the_tables_fault(newer_by: str | None) -> None:
    """No event is parked for it: the error stops the stream and names the column and its type."""
    rows = pa.table({"k": [{"in": 1}, {"in": 2}], "a": [1, 2]})
    with pytest.raises(RowsMisfit, match=r"keys=\['k'\]: 'k' is struct<in: int64>"):
        merges(ArrowRows(rows), Merge(("k",), newer_by), lambda some: some.arrow(), lambda _: {})
