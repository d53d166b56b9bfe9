"""Length limits of CHAR and VARCHAR: what a row has to keep, and where a merge cannot compare."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from deltalake.schema import Field, PrimitiveType, Schema

from checkpoint.errors import SinkMismatch
from dedup.core.rows import ArrowRows
from dedup.core.steps import Merge
from dedup.delta.engine import DeltaRs
from dedup.delta.lengths import is_padded, length_rule
from dedup.delta.sinks import Sink, Sinks
from kit import delta_kit as kit
from kit.delta_kit import open_store

pytestmark = pytest.mark.delta


@pytest.mark.parametrize(
    ("kind", "rule"),
    [
        ("varchar(5)", "(`x` IS NULL OR length(`x`) <= 5)"),
        ("char(3)", "(`x` IS NULL OR length(`x`) <= 3)"),
        ("array<varchar(20)>", "(`x` IS NULL OR forall(`x`, e0 -> (e0 IS NULL OR length(e0) <= 20)))"),
        (
            "map<varchar(2),char(4)>",
            "(`x` IS NULL OR forall(map_keys(`x`), e0 -> (e0 IS NULL OR length(e0) <= 2)) "
            "AND forall(map_values(`x`), e0 -> (e0 IS NULL OR length(e0) <= 4)))",
        ),
        ("struct<a:decimal(10,2),b:varchar(5)>", "(`x` IS NULL OR (`x`.`b` IS NULL OR length(`x`.`b`) <= 5))"),
        ("struct<`a:``b`:char(1),c:interval day to second>", "(`x` IS NULL OR (`x`.`a:``b` IS NULL OR length(`x`.`a:``b`) <= 1))"),
        (
            "array<struct<a:map<string,array<char(2)>>>>",
            "(`x` IS NULL OR forall(`x`, e0 -> (e0 IS NULL OR (e0.`a` IS NULL OR forall(map_values(e0.`a`), "
            "e1 -> (e1 IS NULL OR forall(e1, e2 -> (e2 IS NULL OR length(e2) <= 2))))))))",
        ),
        ("struct<a:decimal(10,2),b:string collate UTF8_LCASE>", ""),
        ("string", ""),
    ],
)
def test_each_limit_is_asked_for_where_it_is(kind: str, rule: str) -> None:
    """A limit holds for the text it belongs to, at any depth; digits of other types are none, and NULL keeps to each limit."""
    assert length_rule("x", kind) == rule


@pytest.mark.parametrize("kind", ["", "array<varchar(3)", "varchar(3)>", "struct<a>", "struct<a:varchar(3)", "map<varchar(3)>", "{}"])
def test_a_type_that_cannot_be_read_is_an_error(kind: str) -> None:
    """No limit is left out in silence."""
    with pytest.raises(ValueError, match=r"unknown type|is missing|no name"):
        length_rule("x", kind)


def sink_of(folder: Path, kind: str) -> Sink:
    """A sink with a column `code` of this type, as Delta keeps it."""
    metadata = {"__CHAR_VARCHAR_TYPE_STRING": kind}
    fields = [Field("code", PrimitiveType("string"), metadata=metadata), Field("id", PrimitiveType("long"))]
    DeltaTable.create(str(folder / "orders"), Schema(fields))
    return Sinks(DeltaRs(None)).open("orders", str(folder / "orders"))


def test_a_sink_tells_its_limits_and_leaves_rows_to_spark(tmp_path: Path) -> None:
    """The condition is that of Delta's writer: what it would refuse is refused before the decision, spaces at the end included."""
    sink = sink_of(tmp_path, "varchar(20)")
    assert sink.constraints == {"the length limit of code": "(`code` IS NULL OR length(`code`) <= 20)"}
    assert sink.special == ("a length limit (code)",) and not sink.padded


def test_a_sink_with_a_limit_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    """The error names the column: a text that Spark refuses would stop the publication."""
    with pytest.raises(SinkMismatch, match=r"column code is struct<, and dedup cannot tell which lengths that allows"):
        sink_of(tmp_path, "struct<")


@pytest.mark.parametrize("how", [Merge(("code",)), Merge(("id",), "code")])
def test_a_merge_that_compares_char_is_refused_before_the_decision(tmp_path: Path, how: Merge) -> None:
    """No MERGE of Delta can be carried out there: the error says how to change the column, and nothing is decided."""
    assert sink_of(tmp_path, "char(3)").padded == {"code"} and is_padded("char(3)") and not is_padded("array<char(3)>")
    store, rows = open_store(tmp_path), ArrowRows(pa.table({"code": ["ab"], "id": [1]}))
    with store.begin(kit.NAME, kit.epoch(store)) as tx, pytest.raises(SinkMismatch) as told:
        tx.merge("orders", rows, how)
    assert "code of the sink 'orders' is of type CHAR" in str(told.value) and "ALTER COLUMN `code` TYPE STRING" in str(told.value)
