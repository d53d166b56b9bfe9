"""The parts of the Delta store on their own: key index, seen positions, statistics, fitting rows, names."""

from __future__ import annotations

import datetime as dt
import json
import math
import os
import subprocess
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs as pafs
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoint.errors import RowsRefused, SinkMismatch
from checkpoint.holders import is_alive, this_process
from checkpoint.position import GrowingRanges, Ranges
from dedup.core.keys import key_words
from dedup.delta.files import FileWriter, partition_text, statistics
from dedup.delta.fit import check_schema, conform, fits, writable
from dedup.delta.key_files import HELD
from dedup.delta.keys import KeyIndex
from dedup.delta.storage import consumer_name, safe_name
from dedup.delta.tables import commit, dataset, part_reached, part_version, reached, seq_of, seq_of_part, version_of

pytestmark = pytest.mark.delta

KEY = (
    st.binary(min_size=16, max_size=16)
    | st.integers(0, 5).map(lambda n: bytes(15) + bytes([n]))
    | st.integers(0, 5).map(lambda n: bytes([n]) * 16)
)


def keys_of(values: list[bytes]) -> pa.Array:
    """A column of keys."""
    return pa.array(values, pa.binary(16))


@pytest.mark.full
@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.lists(KEY, max_size=30), st.booleans()), max_size=12), st.lists(KEY, max_size=20), st.sampled_from([4, 10**9]))
def test_the_key_index_answers_like_a_dictionary(batches: list[tuple[list[bytes], bool]], asked: list[bytes], spill: int) -> None:
    """Any keys, in any batches, repeats included, in memory and in files: known is what the first one had, or the first held one."""
    index, truth = KeyIndex(flush_rows=spill, run_rows=2 * spill), dict[bytes, tuple[int, bool]]()
    for number, (keys, held) in enumerate(batches):
        payload = [number * 1000 + i for i in range(len(keys))]
        taken = {key for key in keys if key not in truth or (held and not truth[key][1])}
        truth |= {key: (payload[keys.index(key)], held) for key in taken}
        assert index.add(keys_of(keys), np.array(payload, dtype=np.int64), HELD if held else 1) == len(taken)
    every = [*asked, *truth]
    known, payload_found, held_found = index.probe(keys_of(every))
    assert known.tolist() == [k in truth for k in every]
    assert payload_found.tolist() == [truth.get(k, (0, False))[0] for k in every]
    assert held_found.tolist() == [truth.get(k, (0, False))[1] for k in every]
    assert len(index) == len(truth)


@pytest.mark.full
def test_the_key_index_stays_few_runs_and_26_bytes_a_key() -> None:
    """Many small batches merge into logarithmically many runs."""
    index, dice = KeyIndex(flush_rows=10**6), np.random.default_rng(1)
    for _ in range(300):
        index.add(keys_of([dice.bytes(16) for _ in range(100)]), np.zeros(100, np.int64), 1)
    assert len(index) == 30_000 and len(index._tail) <= 12
    assert sum(a.nbytes for r in index._tail for a in (r.rows.high, r.rows.low, r.rows.payload, r.rows.day)) == 26 * 30_000


def test_a_spilled_run_leaves_no_file_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file has no name any more while it is open: a killed process cannot leave it."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    index = KeyIndex(flush_rows=10)
    for n in range(4):
        index.add(keys_of([bytes([n, i]) * 8 for i in range(20)]), np.arange(20), 1)
    assert len(index._stored) == 4 and os.listdir(tmp_path) == []
    assert index.probe(keys_of([bytes([2, 7]) * 8]))[1].tolist() == [7]


def test_keys_of_another_length_or_null_are_refused() -> None:
    """A key is 16 bytes."""
    for values in ([b"short"], [None]):
        with pytest.raises(ValueError, match=r"16 bytes|null"):
            KeyIndex().probe(pa.array(values, pa.binary()))


def test_halves_sort_as_the_bytes_do() -> None:
    """Also of a slice, a chunked column, and of variable-length bytes."""
    dice = np.random.default_rng(2)
    values = [dice.bytes(16) for _ in range(50)]
    for column in (keys_of(values), keys_of([bytes(16), *values])[1:], pa.chunked_array([values[:20], values[20:]], pa.binary())):
        high, low = key_words(column)
        assert [values[i] for i in np.lexsort((low, high))] == sorted(values)


PAIRS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 6)).map(lambda p: (p[0], p[0] + p[1])), max_size=6)


@settings(max_examples=200, deadline=None)
@given(st.lists(PAIRS, max_size=8), st.integers(0, 60), st.integers(0, 20))
def test_seen_positions_answer_like_ranges(batches: list[list[tuple[int, int]]], first: int, width: int) -> None:
    """Batches in order, overlapping, or from the past: the same set as the union of all."""
    seen, truth = GrowingRanges(), Ranges()
    for pairs in batches:
        seen.add(pairs)
        truth = truth | Ranges.of(pairs)
    assert seen.whole() == truth
    assert seen.within(first, first + width) == truth & Ranges.of([(first, first + width)])


TEXT = st.text(st.characters(codec="utf-8") | st.sampled_from("a\U0010ffff"), max_size=40)


@pytest.mark.full
@settings(max_examples=200, deadline=None)
@given(st.lists(st.none() | TEXT, min_size=1, max_size=5))
def test_string_bounds_never_exclude_a_value(values: list[str | None]) -> None:
    """Cut to 32 characters, the lower bound stays below and the upper one above, by bytes; or there is none."""
    told = json.loads(statistics(pa.table({"s": pa.array(values, pa.string())})))
    there = [v.encode() for v in values if v is not None]
    assert told["nullCount"]["s"] == len(values) - len(there)
    for value in there:
        assert told["minValues"]["s"].encode() <= value
        assert "s" not in told["maxValues"] or told["maxValues"]["s"].encode() >= value
    assert len(told["minValues"].get("s", "")) <= 32


@pytest.mark.parametrize("text", ["𠮷野家", "ab\U00040441", "\U0010ffff", "𝄞", "é", '\\u00e9 "'])
def test_a_filter_of_delta_rs_finds_every_text(tmp_path: Path, text: str) -> None:
    """What is written with our statistics is found by the text it holds, characters above U+1FFFF included."""
    table = pa.table({"s": [text]})
    empty = DeltaTable.create(str(tmp_path), table.schema)
    adds = list(FileWriter(str(tmp_path), None, table.schema, str(tmp_path)).write(table))
    commit(empty, adds, {}, exact=False)
    assert DeltaTable(str(tmp_path)).to_pyarrow_dataset().to_table(filter=pc.field("s") == text).num_rows == 1


def test_numbers_times_and_nested_columns_have_the_bounds_of_the_protocol() -> None:
    """Exact decimals, milliseconds rounded outward, nulls of a parent counted in its children; no bounds for NaN, booleans, bytes."""
    at = dt.datetime(2024, 1, 1, 0, 0, 0, 123456)
    table = pa.table(
        {
            "i": [3, None, -1],
            "m": pa.array([Decimal("12345678901234567.8901"), None, Decimal("-0.0001")], pa.decimal128(30, 4)),
            "utc": pa.array([at] * 3, pa.timestamp("us", "UTC")),
            "wall": pa.array([at] * 3, pa.timestamp("us")),
            "old": pa.array([-1500] * 3, pa.timestamp("us", "UTC")),
            "d": pa.array([dt.date(2024, 2, 29)] * 3),
            "nan": [1.0, math.nan, 2.0],
            "inf": [1.0, math.inf, 2.0],
            "zero": [-0.0, 0.0, 0.0],
            "b": [True, False, None],
            "raw": [b"a", None, b"c"],
            "s": [{"x": 1, "y": {"z": "q"}}, None, {"x": None, "y": None}],
            "l": [[1], None, []],
            "none": pa.nulls(3, pa.int64()),
        }
    )
    text = statistics(table, -1)
    assert "12345678901234567.8901" in text and "-0.0001" in text
    told = json.loads(text)
    assert told["numRecords"] == 3
    low, high, nulls = told["minValues"], told["maxValues"], told["nullCount"]
    assert (low["i"], high["i"], low["d"], high["d"]) == (-1, 3, "2024-02-29", "2024-02-29")
    assert (low["utc"], high["utc"]) == ("2024-01-01T00:00:00.123Z", "2024-01-01T00:00:00.124Z")
    assert (low["wall"], high["wall"]) == ("2024-01-01T00:00:00.123", "2024-01-01T00:00:00.124")
    assert (low["old"], high["old"]) == ("1969-12-31T23:59:59.998Z", "1969-12-31T23:59:59.999Z")
    assert math.copysign(1, low["zero"]) == -1 and math.copysign(1, high["zero"]) == 1
    assert not {"nan", "inf", "b", "raw", "l", "none"} & (set(low) | set(high))
    assert (low["s"], high["s"], nulls["s"]) == ({"x": 1, "y": {"z": "q"}}, {"x": 1, "y": {"z": "q"}}, {"x": 2, "y": {"z": 2}})
    assert (nulls["b"], nulls["raw"], nulls["l"], nulls["none"], nulls["nan"]) == (1, 1, 1, 3, 0)


def day(number: int) -> pa.Array:
    """One date, as days since 1970."""
    return pa.array([number], pa.int32()).cast(pa.date32())


OUTSIDE = [-719_528, 6_680_000, 2**31 - 1, -(2**31)]
"""Dates that Delta keeps and Python does not: before the year 1 or behind 9999."""


@pytest.mark.parametrize("number", OUTSIDE)
def test_dates_that_python_does_not_know_have_no_bounds(number: int) -> None:
    """Such a column is written without bounds, also within a struct, and the others have theirs."""
    inside = pa.StructArray.from_arrays([day(number), day(0)], ["d", "e"])
    told = json.loads(statistics(pa.table({"d": day(number), "e": day(0), "s": inside})))
    bounds = {"e": "1970-01-01", "s": {"e": "1970-01-01"}}
    assert told["minValues"] == told["maxValues"] == bounds and told["nullCount"] == {"d": 0, "e": 0, "s": {"d": 0, "e": 0}}


@pytest.mark.parametrize("number", OUTSIDE)
def test_dates_that_python_does_not_know_partition_no_table(tmp_path: Path, number: int) -> None:
    """Such a row is refused as its own fault, with the column's name; as a plain value it is written and read back."""
    rows = pa.table({"id": [1], "day": day(number)})
    with pytest.raises(RowsRefused, match="is partitioned by day, where dedup writes the years 1 to 9999 only"):
        FileWriter(str(tmp_path), None, rows.schema, "t", ("day",)).write(rows)
    empty = DeltaTable.create(str(tmp_path / "plain"), rows.schema)
    commit(empty, FileWriter(str(tmp_path / "plain"), None, rows.schema, "t").write(rows), {}, exact=True)
    assert DeltaTable(str(tmp_path / "plain")).to_pyarrow_table().equals(rows)


def test_only_the_first_columns_get_bounds() -> None:
    """Leaf columns are counted, as the table's property says."""
    told = json.loads(statistics(pa.table({"s": [{"a": 1, "b": 2}], "c": [3]}), indexed=2))
    assert told["minValues"] == {"s": {"a": 1, "b": 2}} and told["nullCount"] == {"s": {"a": 0, "b": 0}}


def test_a_file_with_nan_carries_no_bounds_that_hide_it(tmp_path: Path) -> None:
    """Readers that look for NaN believe a row group's bounds, which leave it out."""
    schema = pa.schema([("x", pa.float64()), ("n", pa.int64())])
    (add,) = FileWriter(str(tmp_path), None, schema, "t").write(pa.table({"x": [1.0, math.nan], "n": [1, 2]}, schema=schema))
    group = pq.ParquetFile(tmp_path / add.path).metadata.row_group(0)
    assert group.column(0).statistics is None and group.column(1).statistics.max == 2


SINK = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        pa.field("m", pa.decimal128(10, 2)),
        pa.field("at", pa.timestamp("us", "UTC")),
        pa.field("s", pa.struct([pa.field("a", pa.int32(), nullable=False), pa.field("b", pa.string())])),
    ]
)


def test_rows_are_brought_into_the_sinks_columns_by_name() -> None:
    """Other order, narrower types, missing nullable columns, structs by name, other zones: the same values."""
    at = dt.datetime(2024, 1, 1, 12, tzinfo=dt.UTC)
    rows = pa.table(
        {
            "s": pa.array([{"b": "x", "a": 1}, {"a": 2}], pa.struct([("b", pa.large_string()), ("a", pa.int8())])),
            "at": pa.array([at, None], pa.timestamp("ms", "Europe/Berlin")),
            "id": pa.array([1, 2], pa.int32()),
        }
    )
    assert check_schema(rows.schema, SINK, "t", uri="/lake/t") == ["id", "at", "s"]
    fitted = conform(rows, SINK, "t", uri="/lake/t")
    assert fitted.schema == SINK
    assert fitted.to_pylist() == [
        {"id": 1, "m": None, "at": at, "s": {"a": 1, "b": "x"}},
        {"id": 2, "m": None, "at": None, "s": {"a": 2, "b": None}},
    ]


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ({"m": pa.array([1], pa.decimal128(10, 2))}, "ALTER TABLE delta.`/lake/t` ALTER COLUMN `id` DROP NOT NULL"),
        ({"id": pa.array([1]), "s": pa.array([{"b": "x"}])}, "s is STRUCT"),
        ({"id": pa.array(["1"])}, "id is STRING and the sink has BIGINT. Cast them in the handler, or write into a new table."),
        ({"id": pa.array([1.5])}, "id is DOUBLE"),
        ({"id": pa.array([1], pa.uint64())}, "id is DECIMAL"),
        ({"id": pa.array([1]), "m": pa.array([1], pa.decimal128(12, 3))}, "m is DECIMAL"),
        (
            {"id": pa.array([1]), "m": pa.array([1], pa.decimal128(12, 3))},
            "Spark and dedup can): ALTER TABLE delta.`/lake/t` SET TBLPROPERTIES ('delta.enableTypeWidening' = 'true'); "
            "ALTER TABLE delta.`/lake/t` ALTER COLUMN `m` TYPE DECIMAL(12,3).",
        ),
        ({"id": pa.array([1]), "at": pa.array([1], pa.timestamp("us"))}, "at is TIMESTAMP_NTZ"),
        ({"id": pa.array([1]), "new": pa.array([b"x"])}, "ALTER TABLE delta.`/lake/t` ADD COLUMNS (`new` BINARY)"),
    ],
)
def test_a_schema_that_does_not_fit_is_told_with_the_statement_it_takes(rows: dict[str, Any], says: str) -> None:
    """Before any value is looked at."""
    with pytest.raises(SinkMismatch) as caught:
        check_schema(pa.table({"s": pa.array([{"a": 1}], pa.struct([("a", pa.int32())])), **rows}).schema, SINK, "t", uri="/lake/t")
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ({"id": pa.array([None], pa.int64())}, "forbids NULL in id, and 1 of 1"),
        ({"id": pa.array([1]), "at": pa.array([1], pa.timestamp("ns", "UTC"))}, "at does not fit"),
        ({"id": pa.array([1]), "s": pa.array([{"a": None, "b": "x"}], pa.struct([("a", pa.int32()), ("b", pa.string())]))}, "s.a"),
    ],
)
def test_a_value_that_does_not_fit_is_told_with_its_column(rows: dict[str, Any], says: str) -> None:
    """Nothing is rounded, cut or filled in."""
    with pytest.raises(SinkMismatch) as caught:
        conform(pa.table(rows), SINK, "t", uri="/lake/t")
    assert says in str(caught.value)


NUMBERS = [
    pa.int8(),
    pa.int16(),
    pa.int32(),
    pa.int64(),
    pa.uint8(),
    pa.uint16(),
    pa.uint32(),
    pa.float32(),
    pa.float64(),
    pa.decimal128(10, 0),
]


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(NUMBERS), st.sampled_from(NUMBERS), st.integers(-(2**40), 2**40))
def test_what_is_called_a_fit_keeps_every_number(source: pa.DataType, target: pa.DataType, number: int) -> None:
    """Where `fits` says yes, a value of the source type survives the way there and back."""
    if not fits(source, target):
        return
    try:
        value = pa.array([number if not pa.types.is_floating(source) else float(np.float32(number))], source)
    except (pa.ArrowInvalid, OverflowError):
        return  # no value of the source type
    assert value.cast(target, safe=True).cast(source, safe=True) == value


def test_delta_types_are_read_and_unknown_ones_are_told() -> None:
    """Nested types, decimals, both timestamps; a variant is told apart, and refused where it is NOT NULL."""
    from dedup.delta.fit import UnknownType

    text = json.dumps(
        {
            "fields": [
                {"name": "m", "type": "decimal(5,2)", "nullable": False},
                {"name": "l", "type": {"type": "array", "elementType": "timestamp_ntz", "containsNull": False}},
                {"name": "k", "type": {"type": "map", "keyType": "string", "valueType": "timestamp", "valueContainsNull": True}},
            ]
        }
    )
    schema, unknown = writable(text)
    assert unknown == {}
    assert schema.field("m") == pa.field("m", pa.decimal128(5, 2), nullable=False)
    assert schema.field("l").type.value_type == pa.timestamp("us") and not schema.field("l").type.value_field.nullable
    assert schema.field("k").type.item_type == pa.timestamp("us", "UTC")
    with pytest.raises(UnknownType, match="variant"):
        writable('{"fields": [{"name": "v", "type": "variant", "nullable": false}]}')
    assert writable('{"fields": [{"name": "v", "type": "variant"}]}') == (pa.schema([]), {"v": "variant"})


def test_partition_values_are_spelled_as_the_protocol_says() -> None:
    """One spelling per type; NULL and the empty string are one to Delta."""
    spelled = {True: "true", 7: "7", Decimal("1E+2"): "100", dt.date(2024, 1, 2): "2024-01-02", "a b": "a b", "": None, None: None}
    assert {k: partition_text(k) for k in spelled} == spelled


@given(st.text(min_size=1, max_size=20))
def test_a_folder_name_gives_back_the_consumer(name: str) -> None:
    """Any text, and nothing in it that a file system or Spark takes for something else."""
    folder = safe_name(name)
    assert consumer_name(folder) == name
    assert folder not in (".", "..") and not folder.startswith(("_", ".")) and not set(folder) & set("/\\=%: ")


def test_a_process_is_known_by_its_start() -> None:
    """Alive, stopped, ended and not yet waited for, gone, and unknowable."""
    me = this_process()
    assert is_alive(*me) is True
    assert is_alive("elsewhere", me.pid, me.started) is None and is_alive(me.host, me.pid, "") is None
    assert is_alive(me.host, me.pid, "another-boot/" + me.started.split("/", 1)[1]) is None
    code = "from checkpoint.holders import this_process; print(*this_process(), sep='|')"
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    host, pid, started = child.stdout.read().strip().split("|")
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert is_alive(host, int(pid), started) is False  # a zombie
    child.wait()
    assert is_alive(host, int(pid), started) is False
    child.stdout.close()


@given(st.lists(st.tuples(st.integers(0, 2**31 - 1), st.integers(0, 2**16 - 1)), min_size=2, max_size=2, unique=True), st.text(), st.text())
def test_a_part_of_a_decision_is_above_all_of_those_before(places: list[tuple[int, int]], one: str, other: str) -> None:
    """However many writes a decision has for one sink, and whoever made it: none of a later one looks as if it had been done."""
    (seq, part), (later, next_part) = sorted(places)
    versions = part_version(seq, one, part), part_version(later, one if seq == later else other, next_part)
    assert versions[0] < versions[1] < 2**63
    assert not part_reached(versions[0], versions[1]) and part_reached(versions[1], versions[0])
    assert [seq_of_part(v) for v in versions] == [seq, later]


@given(st.integers(1, 2**39 - 2), st.uuids(), st.uuids())
def test_a_version_names_one_decision(seq: int, one: UUID, other: UUID) -> None:
    """Another decision under the same number is not reached; a later one is above, whoever made it."""
    mine, theirs, later = version_of(seq, one.hex), version_of(seq, other.hex), version_of(seq + 1, other.hex)
    assert seq_of(mine) == seq and mine < later < 2**63 and reached(later, mine) and not reached(mine, later)
    assert reached(mine, mine) and (mine == theirs or not reached(mine, theirs))


def test_a_local_table_is_read_without_python_code_in_threads_of_arrow(tmp_path: Path) -> None:
    """Such threads abort a process that ends: the file system is Arrow's own, also below a folder with a blank in its name."""
    write_deltalake(str(tmp_path / "a table"), pa.table({"a": ["x", "y"]}))
    found = dataset(DeltaTable(str(tmp_path / "a table")))
    assert found.to_table()["a"].to_pylist() == ["x", "y"]
    assert "SubTreeFileSystem" in repr(found.filesystem) and not isinstance(found.filesystem.base_fs, pafs.PyFileSystem)
