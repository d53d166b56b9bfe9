"""Rows into tables of the user's: what fits arrives as it was given, what does not is named before a row is sent."""

from __future__ import annotations

import datetime as dt
import decimal
import math
import uuid
from collections.abc import Iterator
from functools import partial
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from checkpoint.errors import RowsRefused, SinkMismatch, StoreError, StoreUnavailable
from checkpoint.postgres.connection import Connection
from checkpoint.postgres.sql import Statements
from dedup.core.rows import ArrowRows
from dedup.core.steps import Merge
from dedup.postgres import PostgresStore, fit, merges, sinks
from dedup.postgres.connection import connect
from fixtures.fix_postgres import database
from fixtures.variants import of_which
from kit.pg_help import epoch, rows
from kit.pg_run import run

UTC = dt.UTC
TEXT = pa.string()
OF_A_TIME = pa.struct([("at", pa.timestamp("us", "UTC")), ("m", pa.map_(TEXT, TEXT))])
A_UUID = uuid.UUID("12345678-1234-5678-1234-567812345678")


@pytest.fixture(scope="module")
def session(maker: Connection, postgres_server: str, migrated: str) -> Iterator[Connection]:
    """In a database with the tables of the state: one of them is looked into for a sink."""
    with database(postgres_server, template=migrated, maker=maker) as dsn, connect(dsn) as made:
        yield made


@pytest.fixture
def connection(session: Connection) -> Iterator[Connection]:
    """The one session of these tests; what a test writes is taken back."""
    with session.transaction(force_rollback=True):
        yield session


def write(connection: Connection, table: str, what: pa.Table) -> int:
    """As the transaction does."""
    with connection.transaction():
        return merges.append(connection, Statements("dedup"), table, ArrowRows(what))


GOOD: list[tuple[str, pa.Array, list[Any]]] = [
    ("boolean", pa.array([True, None]), [True, None]),
    ("smallint", pa.array([1, -32768], pa.int64()), [1, -32768]),
    ("integer", pa.array([1, 2**31 - 1], pa.int64()), [1, 2**31 - 1]),
    ("integer", pa.array([7], pa.uint8()), [7]),
    ("bigint", pa.array([1, None], pa.int32()), [1, None]),
    ("bigint", pa.array([decimal.Decimal(12)], pa.decimal128(5, 0)), [12]),
    ("real", pa.array([1.5], pa.float32()), [1.5]),
    ("double precision", pa.array([1.5, math.inf, None]), [1.5, math.inf, None]),
    ("double precision", pa.array([3], pa.int64()), [3.0]),
    ("numeric", pa.array([decimal.Decimal("-0.0500"), None], pa.decimal128(38, 4)), [decimal.Decimal("-0.0500"), None]),
    ("numeric(10,2)", pa.array([decimal.Decimal("12.5")], pa.decimal128(5, 1)), [decimal.Decimal("12.50")]),
    ("numeric(10,2)", pa.array([12.5, 0.1]), [decimal.Decimal("12.50"), decimal.Decimal("0.10")]),
    ("numeric", pa.array([0.1, 1e-7]), [decimal.Decimal("0.1"), decimal.Decimal("1E-7")]),
    ("numeric", pa.array([0.1, None], pa.float32()), [decimal.Decimal("0.1"), None]),
    ("numeric(40,2)", pa.array([decimal.Decimal("1.2400"), None]), [decimal.Decimal("1.24"), None]),
    ("numeric(40,2)[]", pa.array([[decimal.Decimal("1.2400"), None]]), [[decimal.Decimal("1.24"), None]]),
    ("numeric", pa.array([2**63], pa.uint64()), [decimal.Decimal(2**63)]),
    ("numeric(40,0)", pa.array([5], pa.int64()), [decimal.Decimal(5)]),
    ("numeric(10,2)", pa.array([5, -7, None], pa.int64()), [decimal.Decimal("5.00"), decimal.Decimal("-7.00"), None]),
    ("numeric(38,0)", pa.array([2**64 - 1], pa.uint64()), [decimal.Decimal(2**64 - 1)]),
    ("numeric(30,20)", pa.array([3], pa.int8()), [decimal.Decimal(3)]),
    ("numeric", pa.array([decimal.Decimal(10**40)], pa.decimal256(45, 0)), [decimal.Decimal(10**40)]),
    ("text", pa.array(["a\tb\n\\.ä\U0001f600", "", None]), ["a\tb\n\\.ä\U0001f600", "", None]),
    ("text", pa.array(["x"], pa.large_string()), ["x"]),
    ("text", pa.array(["x", None, "x"]).dictionary_encode(), ["x", None, "x"]),
    ("varchar(3)", pa.array(["äöü"]), ["äöü"]),
    ("char(3)", pa.array(["a"]), ["a  "]),
    ("mood", pa.array(["ok", None]), ["ok", None]),
    ("email", pa.array(["a@b"]), ["a@b"]),
    ("json", pa.array(['{"a": 1}']), [{"a": 1}]),
    ("jsonb", pa.array(['{"a": 1}', None]), [{"a": 1}, None]),
    ("jsonb", pa.array([{"a": 1, "b": ["ä"]}, None]), [{"a": 1, "b": ["ä"]}, None]),
    ("jsonb", pa.array([[1, 2], []]), [[1, 2], []]),
    ("jsonb", pa.array([[("a", [[("b", 1)]])], None], pa.map_(TEXT, pa.list_(pa.map_(TEXT, pa.int64())))), [{"a": [{"b": 1}]}, None]),
    ("jsonb", pa.array([[(1, "a")]], pa.map_(pa.int64(), TEXT)), [[[1, "a"]]]),
    (
        "json",
        pa.array([{"at": dt.datetime(2024, 1, 2, tzinfo=UTC), "m": None}], OF_A_TIME),
        [{"at": "2024-01-02T00:00:00+00:00", "m": None}],
    ),
    ("bytea", pa.array([b"\0\xff", b"", None]), [b"\0\xff", b"", None]),
    ("bytea", pa.array([b"ab"], pa.binary(2)), [b"ab"]),
    ("uuid", pa.array([A_UUID.bytes, None], pa.binary(16)), [A_UUID, None]),
    ("uuid", pa.array([str(A_UUID), None, A_UUID.hex.upper()]), [A_UUID, None, A_UUID]),
    ("date", pa.array([dt.date(1, 1, 1), dt.date(9999, 12, 31)]), [dt.date(1, 1, 1), dt.date(9999, 12, 31)]),
    ("timestamptz", pa.array([0], pa.timestamp("s", "Asia/Tokyo")), [dt.datetime(1970, 1, 1, tzinfo=UTC)]),
    ("timestamptz", pa.array([1_001], pa.timestamp("us")), [dt.datetime(1970, 1, 1, 0, 0, 0, 1001, tzinfo=UTC)]),
    ("timestamp", pa.array([0, None], pa.timestamp("us", "Asia/Tokyo")), [dt.datetime(1970, 1, 1), None]),
    ("timestamp", pa.array([5_000], pa.timestamp("ns")), [dt.datetime(1970, 1, 1, 0, 0, 0, 5)]),
    ("time", pa.array([dt.time(1, 2, 3, 4)]), [dt.time(1, 2, 3, 4)]),
    ("interval", pa.array([dt.timedelta(days=-1, seconds=1)]), [dt.timedelta(days=-1, seconds=1)]),
    ("integer[]", pa.array([[1, None], [], None], pa.list_(pa.int64())), [[1, None], [], None]),
    ("text[]", pa.array([['a "b" {,}', None]]), [['a "b" {,}', None]]),
    ("bytea[]", pa.array([[b"\0"]]), [[b"\0"]]),
    ("timestamptz[]", pa.array([[0], None], pa.list_(pa.timestamp("us", "UTC"))), [[dt.datetime(1970, 1, 1, tzinfo=UTC)], None]),
    ("varchar[]", pa.array([["a"], []]), [["a"], []]),
    ("uuid[]", pa.array([[A_UUID.bytes, None]], pa.list_(pa.binary(16))), [[A_UUID, None]]),
    ("inet", pa.array(["10.0.0.1", None]), None),  # type: ignore[list-item]
    ("timestamp(3)", pa.array([1_000, None], pa.timestamp("us")), [dt.datetime(1970, 1, 1, 0, 0, 0, 1_000), None]),
    ("interval day to second(0)", pa.array([dt.timedelta(seconds=61)]), [dt.timedelta(seconds=61)]),
    ("oid", pa.array([2**32 - 1, None]), [2**32 - 1, None]),
    ("integer[][]", pa.array([[[1, 2], [3, None]], None]), [[[1, 2], [3, None]], None]),
    ("email[]", pa.array([["a@b"]]), ["{a@b}"]),
    ("text", pa.nulls(2), [None, None]),
    ("integer[]", pa.nulls(1), [None]),
]


def test_an_interval_in_an_array_is_the_same_as_one_in_a_column(connection: Connection) -> None:
    """A duration has no days in either: 24 hours are not always a day."""
    connection.execute("create table t (v interval, many interval[])")
    took = dt.timedelta(hours=30, microseconds=1)
    write(connection, "t", pa.table({"v": [took], "many": [[took, None]]}))
    assert connection.execute("select v::text, many[1]::text, many[2] from t").fetchone() == ("30:00:00.000001", "30:00:00.000001", None)


@pytest.mark.parametrize(("kind", "values", "wanted"), GOOD, ids=[f"{k}-{v.type}" for k, v, _ in GOOD])
def test_values_arrive_as_they_were_given(connection: Connection, kind: str, values: pa.Array, wanted: list[Any] | None) -> None:
    """Every supported pair of types, by whichever encoder, from arrays with an offset, too."""
    _types(connection)
    connection.execute(f"create table t (n int, v {kind})".encode())
    table = pa.table({"v": pa.concat_arrays([values, values]), "n": range(2 * len(values))}).slice(len(values))
    assert write(connection, "t", table) == len(values)
    got = [row[0] for row in connection.execute("select v from t order by n")]
    assert got == wanted if wanted is not None else list(map(str, got)) == ["10.0.0.1", "None"]


@pytest.mark.full
@pytest.mark.parametrize(("kind", "values", "wanted"), GOOD, ids=[f"{k}-{v.type}" for k, v, _ in GOOD])
def test_both_encoders_write_the_same_rows(connection: Connection, kind: str, values: pa.Array, wanted: Any) -> None:
    """pgpq's binary COPY and psycopg's text COPY are told apart by speed only."""
    _types(connection)
    seen = []
    for fast in (True, False):
        connection.execute(f"drop table if exists t; create table t (n int, v {kind})".encode())
        table = sinks.describe(connection, Statements("dedup"), "t")
        given = pa.table({"v": values, "n": range(len(values))})
        plans = sinks.plans_for(table, given.schema)
        fitted = sinks.fitted(table, plans, given)
        if not fast:
            plans = {name: fit.CastPlan(plan.cast, False) for name, plan in plans.items()}
        sinks.send(connection, table, plans, fitted)
        seen.append(connection.execute("select n, v::text from t order by n").fetchall())
    assert seen[0] == seen[1]


def _types(connection: Connection) -> None:
    connection.execute("create type mood as enum ('ok', 'bad'); create domain email as text check (value like '%@%')")


BAD: list[tuple[str, pa.Array, str]] = [
    ("integer", pa.array([2**31]), 'ALTER COLUMN "v" TYPE bigint'),
    ("integer", pa.array(["1"]), 'ALTER COLUMN "v" TYPE text'),
    ("integer", pa.array([1.0]), 'ALTER COLUMN "v" TYPE double precision'),
    ("bigint", pa.array([2**63], pa.uint64()), r'ALTER COLUMN "v" TYPE numeric\(20\)'),
    ("real", pa.array([0.1]), 'ALTER COLUMN "v" TYPE double precision'),
    ("double precision", pa.array([2**53 + 1]), 'ALTER COLUMN "v" TYPE bigint'),
    ("numeric(10,2)", pa.array([decimal.Decimal("1.234")]), r'ALTER COLUMN "v" TYPE numeric\(4,3\)'),
    ("numeric(40,2)", pa.array([None, decimal.Decimal("1.239")]), "row 1 is finer than numeric.*TYPE numeric"),
    ("numeric(40,2)[]", pa.array([[decimal.Decimal("1.239")]]), "row 0 is finer than numeric"),
    ("jsonb", pa.array([{"a": [b"\0"]}]), "does not go"),
    ("jsonb", pa.array([{"a": 1.0}, {"a": math.nan}]), "row 1 cannot be JSON: JSON has no nan"),
    ("jsonb", pa.array([[("a", 1), ("a", 2)]], pa.map_(TEXT, pa.int64())), "row 0 cannot be JSON: two keys"),
    ("jsonb", pa.array([{"at": 2**58}], OF_A_TIME), "row 0 cannot be JSON"),
    ("numeric(3,0)", pa.array([1000]), 'ALTER COLUMN "v" TYPE bigint'),
    ("varchar(3)", pa.array(["abcd"]), r'ALTER COLUMN "v" TYPE varchar\(4\)'),
    ("text", pa.array(["ok", "a\0b"]), "row 1 holds a NUL"),
    ("text", pa.array([1]), 'ALTER COLUMN "v" TYPE bigint'),
    ("text", pa.array([b"a"]), 'ALTER COLUMN "v" TYPE bytea'),
    ("uuid", pa.array([None, "nonsense"]), "row 1 is not a UUID"),
    ("date", pa.array([0], pa.timestamp("us", "UTC")), 'ALTER COLUMN "v" TYPE timestamptz'),
    ("timestamptz", pa.array([1], pa.timestamp("ns", "UTC")), "lose data"),
    ("integer[]", pa.array([["a"]]), r"does not go"),
    ("point", pa.array([1.5]), "does not go"),
    ("timestamp(3)", pa.array([0, 1_001], pa.timestamp("us")), "row 1 is finer than timestamp.*TYPE timestamp"),
    ("timestamptz(0)", pa.array([1], pa.timestamp("us", "UTC")), "row 0 is finer.*TYPE timestamptz"),
    ("time(2)", pa.array([dt.time(1, 2, 3, 4)]), "row 0 is finer.*TYPE time"),
    ("interval hour to minute", pa.array([dt.timedelta(seconds=61)]), "row 0 is finer.*TYPE interval"),
    ("name", pa.array(["x" * 64]), "64 bytes.*TYPE text"),
    ('"char"', pa.array(["ab"]), "2 bytes.*TYPE text"),
    ("oid", pa.array([-1]), "-1 is out of range"),
    ("cidr", pa.array([10]), "does not go"),
    ("bit(3)", pa.array([101]), "does not go"),
]


@pytest.mark.parametrize(("kind", "values", "told"), BAD, ids=[f"{k}-{v.type}-{n}" for n, (k, v, _) in enumerate(BAD)])
def test_what_does_not_fit_is_refused_before_any_row_is_sent(connection: Connection, kind: str, values: pa.Array, told: str) -> None:
    """The error names the column and the ALTER TABLE that would make room, and is RowsRefused just where other values would have fitted."""
    connection.execute(f"create table t (v {kind})".encode())
    fits = True
    try:
        write(connection, "t", pa.table({"v": values.slice(0, 0)}))
    except SinkMismatch:
        fits = False
    with connection.transaction():
        with pytest.raises(SinkMismatch, match=told) as raised:
            merges.append(connection, Statements("dedup"), "t", ArrowRows(pa.table({"v": values})))
        assert isinstance(raised.value, RowsRefused) == fits
        assert "column 'v'" in str(raised.value) and "nothing was sent" in str(raised.value)
        assert connection.execute("select count(*) from t").fetchone() == (0,), "the transaction is not aborted"


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("timestamptz[]", pa.array([[253_433_664_000_000_000]], pa.list_(pa.timestamp("us", "UTC")))),
        ("timestamp", pa.array([-(2**63)], pa.timestamp("us"))),
    ],
    ids=["a year of five digits in an array", "the earliest time of Arrow"],
)
def test_a_value_that_the_client_cannot_send_is_the_fault_of_its_row(connection: Connection, kind: str, values: pa.Array) -> None:
    """It is RowsRefused, as if the server had refused it, and the transaction goes on."""
    connection.execute(f"create table t (v {kind})".encode())
    with pytest.raises(RowsRefused, match='"t" has a value that cannot be sent'):
        write(connection, "t", pa.table({"v": values}))
    assert connection.execute("select count(*) from t").fetchone() == (0,)


def test_a_value_of_a_merge_that_the_client_cannot_send_names_the_sink(connection: Connection) -> None:
    """Not the table that the rows are staged in."""
    connection.execute("create table t (k int primary key, v timestamp)")
    given_rows = ArrowRows(pa.table({"k": [1], "v": pa.array([-(2**63)], pa.timestamp("us"))}))
    with pytest.raises(RowsRefused, match='"t" has a value that cannot be sent'), connection.transaction():
        merges.merge(connection, Statements("dedup"), "t", given_rows, Merge(("k",)))


def test_columns_are_matched_by_name_and_all_that_is_wrong_is_named_at_once(connection: Connection) -> None:
    """Missing, additional, misspelled, generated and null columns, in one error."""
    connection.execute(
        "create table t (id int not null, made int generated always as (id * 2) stored, number int generated always as identity,"
        ' at timestamptz not null default now(), "Mixed" text, plain text)'
    )
    assert write(connection, "t", pa.table({"plain": ["x"], "id": [4]})) == 1
    assert connection.execute("select id, made, number, plain from t").fetchall() == [(4, 8, 1, "x")]
    with pytest.raises(SinkMismatch) as raised:
        write(connection, "t", pa.table({"made": [1], "mixed": ["x"], "extra": [1.5], "when": pa.array([0], pa.timestamp("us", "UTC"))}))
    said = str(raised.value)
    for part in (
        'ALTER TABLE "public"."t" ADD COLUMN "extra" double precision;',
        'ALTER TABLE "public"."t" ADD COLUMN "when" timestamptz;',
        "it has no column 'mixed'. Did you mean 'Mixed'? If not: ALTER TABLE",
        "'made' is generated",
        'ALTER TABLE "public"."t" ALTER COLUMN "id" DROP NOT NULL;',
    ):
        assert part in said
    with pytest.raises(RowsRefused, match=r"2 rows have no 'id' \(the first is row 1\), which is NOT NULL"):
        write(connection, "t", pa.table({"id": [1, None, None]}))
    with pytest.raises(SinkMismatch, match="occurs twice"):
        write(connection, "t", pa.table([[1], [2]], names=["id", "id"]))
    with pytest.raises(SinkMismatch, match="no columns"):
        write(connection, "t", pa.table({}))


def test_an_empty_table_is_judged_like_a_full_one(connection: Connection) -> None:
    """No rows: the schema must fit all the same, so that a mistake shows at the first batch."""
    connection.execute("create table t (id int not null)")
    assert write(connection, "t", pa.table({"id": pa.array([], pa.int32())})) == 0
    with pytest.raises(SinkMismatch):
        write(connection, "t", pa.table({"id": pa.array([], pa.string())}))


def test_constraints_that_only_the_server_can_judge_are_named(connection: Connection) -> None:
    """CHECK, UNIQUE and domains: nothing of the rows stays, and the error names the constraint."""
    _types(connection)
    connection.execute('create table t (id int primary key, "A" int constraint "not less" check ("A" > 0), mail email)')
    for what, told in (
        ({"id": [1, 2], "A": [1, 0]}, 'DROP CONSTRAINT "not less"'),
        ({"id": [1, 1]}, r"tx\.merge with the columns of this key as keys="),
        ({"id": [1], "mail": ["nobody"]}, "email_check"),
    ):
        with pytest.raises(RowsRefused, match=told) as refused:
            write(connection, "t", pa.table(what))
        said = str(refused.value)
        assert "DROP" not in said or 0 < said.index("tx.reject") < said.index("DROP"), "the safe advice comes first; a key is never dropped"
    assert connection.execute("select count(*) from t").fetchone() == (0,)


@pytest.mark.parametrize("kind", ["bigint", "point"])
def test_rows_that_a_trigger_drops_are_noticed(connection: Connection, kind: str) -> None:
    """The server takes the COPY and keeps fewer rows: not written. By both encoders; triggers that keep rows are fine."""
    connection.execute(f"create table t (a int, v {kind})".encode())
    connection.execute(
        "create function odd() returns trigger language plpgsql as 'begin if new.a % 2 = 0 then return null; end if; return new; end';"
        " create trigger drops before insert on t for each row execute function odd()"
    )
    values = pa.array([1, 2, 3]) if kind == "bigint" else pa.array(["(1,2)"] * 3)
    with connection.transaction():
        with pytest.raises(RowsRefused, match=r"2 of 3 rows.*BEFORE INSERT trigger"):
            merges.append(connection, Statements("dedup"), "t", ArrowRows(pa.table({"a": [1, 2, 3], "v": values})))
        assert connection.execute("select count(*) from t").fetchone() == (0,), "nothing of them is kept"
    assert write(connection, "t", pa.table({"a": [1, 3], "v": values[:2]})) == 2


@pytest.mark.parametrize("state", of_which(2, ["OR001", "45000", "38000", "2F002"]))
def test_an_error_of_a_trigger_is_the_rows_fault_whatever_its_state(connection: Connection, state: str) -> None:
    """Triggers raise SQLSTATEs of their own, and those of other languages than SQL: rows are refused, appended or merged."""
    connection.execute(
        "create table t (k int primary key); create function no() returns trigger language plpgsql as "
        f"'begin raise exception ''no such order'' using errcode = ''{state}''; end'; "
        "create trigger no before insert on t for each row when (new.k > 1) execute function no()".encode()
    )
    for write_ in (merges.append, partial(merges.merge, how=Merge(("k",)))):
        with pytest.raises(RowsRefused, match="no such order"), connection.transaction():
            write_(connection, Statements("dedup"), "t", ArrowRows(pa.table({"k": [1, 2]})))
    assert write(connection, "t", pa.table({"k": [1]})) == 1


def test_a_row_that_a_policy_forbids_is_the_rows_fault(connection: Connection) -> None:
    """Row-level security refuses one row with the state of a missing right; a missing right itself stays the table's fault."""
    connection.execute("create table t (k int primary key); alter table t enable row level security; create policy p on t using (k < 2)")
    with pytest.raises(RowsRefused, match="row-level security"), connection.transaction():
        connection.execute("create role tenant; grant select, insert, update on t to tenant; grant usage on schema dedup to tenant")
        connection.execute("grant select on all tables in schema dedup to tenant; set local role tenant")
        merges.merge(connection, Statements("dedup"), "t", ArrowRows(pa.table({"k": [1, 2]})), Merge(("k",)))


def test_a_table_that_copy_may_not_write_to_names_the_ways_out(connection: Connection) -> None:
    """COPY refuses a table with policies for this role, whatever they allow; a merge goes by them."""
    connection.execute("create table t (k int primary key); alter table t enable row level security; create policy p on t using (true)")
    connection.execute("create role writer; grant select, insert, update on t to writer; grant usage on schema dedup to writer")
    connection.execute("grant select on all tables in schema dedup to writer; set local role writer")
    with pytest.raises(SinkMismatch, match=r"tx\.merge.*BYPASSRLS.*DISABLE ROW LEVEL SECURITY"):
        write(connection, "t", pa.table({"k": [1]}))
    assert merges.merge(connection, Statements("dedup"), "t", ArrowRows(pa.table({"k": [1]})), Merge(("k",))) == 1


def test_rows_that_take_too_long_name_the_limit(connection: Connection) -> None:
    """The server ends the COPY at the role's statement_timeout, again and again: the error says what to raise, or what to lower."""
    connection.execute("create table t (a int default pg_sleep(1)::text::int, b int); set statement_timeout = '50ms'")
    with pytest.raises(StoreUnavailable, match=r"statement_timeout.*max_events_per_transaction"):
        write(connection, "t", pa.table({"b": [1]}))


def test_names_are_names_and_never_sql(connection: Connection) -> None:
    """Schemas, tables and columns with quotes, capitals and percent signs; a name that is none is a clear error."""
    connection.execute('create schema "S%s"; create table "S%s"."; drop table ""x""" ("a""; --%s" int, "My Col" text)')
    assert write(connection, '"S%s"."; drop table ""x"""', pa.table({'a"; --%s': [1], "My Col": ["x"]})) == 1
    for wrong in ("; drop table x", "My Table", "a.b.c.d", '"', ""):
        with pytest.raises(SinkMismatch, match=r"not a table name|no table"):
            write(connection, wrong, pa.table({"a": [1]}))
    with pytest.raises(SinkMismatch, match="no table 'missing'"):
        write(connection, "missing", pa.table({"a": [1]}))


def test_only_tables_are_written_to(connection: Connection) -> None:
    """Partitioned tables are tables, views are not; names follow the search_path."""
    connection.execute("create view v as select 1 as a; create schema other; create table other.t (a int) partition by range (a)")
    connection.execute("create table other.p partition of other.t for values from (0) to (10)")
    with pytest.raises(SinkMismatch, match="is a view"):
        write(connection, "v", pa.table({"a": [1]}))
    with pytest.raises(SinkMismatch, match="no table 't'"):
        write(connection, "t", pa.table({"a": [1]}))
    connection.execute("set search_path = other")
    assert write(connection, "t", pa.table({"a": [1]})) == 1
    with pytest.raises(SinkMismatch, match="no partition"):
        write(connection, "t", pa.table({"a": [11]}))


def test_a_missing_right_names_the_grant(postgres: str) -> None:
    """A role that may not insert."""
    role = f"r{uuid.uuid4().hex[:8]}"
    run(postgres, f"create role {role}; create table t (a int); grant select on t to {role}")
    run(postgres, f"grant usage on schema dedup to {role}; grant select on dedup.sink to {role}")
    with connect(postgres) as connection:
        connection.execute(f"set role {role}".encode())
        with pytest.raises(StoreError, match=r"permission denied for table t.*Grant"):
            write(connection, "t", pa.table({"a": [1]}))
    run(postgres, f"drop owned by {role}; drop role {role}")


def test_a_table_that_the_handler_has_just_made_is_found(postgres: str) -> None:
    """The catalog is read inside the transaction, temporary tables included."""
    store = PostgresStore(postgres)
    with store.begin("shop", epoch(store)) as tx, tx.attempt():
        tx.connection.execute("create temp table mine (a int)")
        assert tx.write("mine", rows(a=[1, 2])) == 2


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.fixed_dictionaries(
            {
                "i": st.none() | st.integers(-(2**63), 2**63 - 1),
                "f": st.none() | st.floats(allow_nan=False),
                "t": st.none() | st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])),
                "b": st.none() | st.binary(),
                "a": st.none()
                | st.lists(st.none() | st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])), max_size=3),
            }
        ),
        max_size=20,
    )
)
def test_any_rows_come_back(connection: Connection, given_rows: list[dict[str, Any]]) -> None:
    """Whatever the values, what is read is what was written, in order, by both encoders."""
    schema = pa.schema([("i", pa.int64()), ("f", pa.float64()), ("t", pa.string()), ("b", pa.binary()), ("a", pa.list_(pa.string()))])
    connection.execute("drop table if exists t; create table t (i bigint, f float8, t text, b bytea, a text[])")
    table = pa.Table.from_pylist(given_rows, schema=schema)
    write(connection, "t", table)
    described = sinks.describe(connection, Statements("dedup"), "t")
    plans = {name: fit.CastPlan(plan.cast, False) for name, plan in sinks.plans_for(described, schema).items()}
    if table.num_rows:
        sinks.send(connection, described, plans, table)
    back = [dict(zip(schema.names, row, strict=True)) for row in connection.execute("select * from t")]
    assert back == given_rows * 2
