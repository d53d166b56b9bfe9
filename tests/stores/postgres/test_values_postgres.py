"""Types that only PostgreSQL has: what the server would round, cut or misread without a word is its event's dead letter."""

from __future__ import annotations

import datetime as dt
import ipaddress
from decimal import Decimal
from typing import Any
from zoneinfo import ZoneInfo

import psycopg
import pyarrow as pa
import pytest

from checkpoint.errors import SinkMismatch, StoreError
from contract.test_values import create, read
from dedup.pipeline.handlers import Event
from fixtures.variants import of_which
from kit.foreach_kit import bare
from kit.orders import batch, letters, orders
from kit.places import PostgresPlace

pytestmark = pytest.mark.postgres

T = dt.datetime(2024, 5, 6, 7, 8, 9, 100_000)
FINE = T.replace(microsecond=123_456)
HOUR = dt.timedelta(hours=1)
EAST = dt.timezone(dt.timedelta(hours=5, minutes=30))
BAD = "refused"

TYPES = """
    create domain stamp as timestamp(0);
    create domain stamp2 as stamp;
    create domain sure as stamp2 check (value > '2000-01-01');
    create domain short as varchar(3);
    create type mood as enum ('ok', 'bad');
"""

CASES: list[tuple[str, Any, str]] = [
    ("timestamp(1)", T, "2024-05-06 07:08:09.1"),
    ("timestamp(1)", FINE, BAD),
    ("timestamp(0)", dt.date(2024, 5, 6), "2024-05-06 00:00:00"),
    ("timestamptz(3)", FINE.replace(microsecond=123_000), "2024-05-06 07:08:09.123+00"),
    ("timestamptz(3)", FINE, BAD),
    ("timestamp(3)[]", [T, FINE], BAD),
    ("timestamp(3)[]", [T, None], '{"2024-05-06 07:08:09.1",NULL}'),
    ("time(0)", dt.time(1, 2, 3), "01:02:03"),
    ("time(0)", dt.time(1, 2, 3, 4), BAD),
    ("timetz", dt.time(12), "12:00:00+00"),
    ("timetz", dt.time(12, tzinfo=EAST), "12:00:00+05:30"),
    ("timetz", "12:00", "12:00:00+00"),
    ("timetz", "12:00:00+05", "12:00:00+05"),
    ("timetz", "noon", BAD),
    ("timetz", "12:00:00.1234567", BAD),
    ("timetz", dt.time(12, tzinfo=ZoneInfo("Europe/Berlin")), BAD),
    ("timetz", dt.time(12, tzinfo=dt.timezone(dt.timedelta(hours=23))), BAD),
    ("timetz(2)", dt.time(12, 0, 0, 120_000, EAST), "12:00:00.12+05:30"),
    ("timetz(2)", dt.time(12, 0, 0, 123_000, EAST), BAD),
    ("interval(0)", HOUR, "01:00:00"),
    ("interval(0)", HOUR / 7, BAD),
    ("interval day to second", HOUR / 3_600_000, "00:00:00.001"),
    ("interval hour to minute", HOUR / 60, "00:01:00"),
    ("interval hour to minute", HOUR / 3_600, BAD),
    ("interval hour", HOUR / 60, BAD),
    ("interval second(2)", HOUR / 3_600_000, BAD),
    ("interval day", HOUR * 24, BAD),
    ("interval day", HOUR * 0, "00:00:00"),
    ("stamp", FINE, BAD),
    ("stamp2", T.replace(microsecond=0), "2024-05-06 07:08:09"),
    ("stamp2", T, BAD),
    ("sure", T.replace(microsecond=0), "2024-05-06 07:08:09"),
    ("sure", dt.datetime(1999, 1, 1), BAD),
    ("sure", "2024-05-06", BAD),
    ("short", "abc", "abc"),
    ("short[]", ["abc", "abcd"], BAD),
    ("short[]", ["abc"], "{abc}"),
    ("name", "x" * 63, "x" * 63),
    ("name", "x" * 64, BAD),
    ("name", "ä" * 32, BAD),
    ('"char"', "a", "a"),
    ('"char"', "ab", BAD),
    ('"char"', "é", BAD),
    ("oid", 2**32 - 1, str(2**32 - 1)),
    ("oid", -1, BAD),
    ("oid", "-1", BAD),
    ("oid", 2**32, BAD),
    ("oid", Decimal(5), BAD),
    ("xid", -5, BAD),
    ("xid8", 2**63, str(2**63)),
    ("xid8", -1, BAD),
    ("cid", 2**32, BAD),
    ("regclass", 1259, "pg_class"),
    ("regclass", "pg_class", "pg_class"),
    ("regclass", "no_such_table", BAD),
    ("regclass", "a.b.c.d", BAD),
    ("regclass", -1, BAD),
    ("regtype", "no_such_type", BAD),
    ("regrole", "no_such_role", BAD),
    ("cidr", 10, BAD),
    ("cidr", "10.0.0.0/8", "10.0.0.0/8"),
    ("cidr", ipaddress.ip_network("10.0.0.0/8"), "10.0.0.0/8"),
    ("cidr", "10.0.0.1/8", BAD),
    ("inet", 10, BAD),
    ("bit(3)", 101, BAD),
    ("bit(3)", "101", "101"),
    ("bit(3)", "1010", BAD),
    ("varbit(3)", 1, BAD),
    ("varbit(3)", "1111", BAD),
    ("money", 5, "$5.00"),
    ("money", 10**17, BAD),
    ("money", 1.5, BAD),
    ("tsvector", 5, BAD),
    ("tsvector", "a:1 b:2", "'a':1 'b':2"),
    ("tsvector", "'a", BAD),
    ("tsquery", "a &", BAD),
    ("jsonpath", "$.a", '$."a"'),
    ("jsonpath", "$.[", BAD),
    ("jsonpath", '$ ? (@ like_regex "a" flag "x")', BAD),
    ("hstore", "a=>1", '"a"=>"1"'),
    ("hstore", "a=>", BAD),
    ("hstore", "a", BAD),
    ("ltree", "a.b", "a.b"),
    ("ltree", "a..b", BAD),
    ("ltree[]", ["a", "b c"], BAD),
    ("xml", "<a>", BAD),
    ("mood", "ok", "ok"),
    ("mood", "worse", BAD),
    ("mood[]", ["ok"], "{ok}"),
    ("int4range", "[1,5)", "[1,5)"),
    ("int4range", "[5,1)", BAD),
    ("point", "(1,2)", "(1,2)"),
    ("macaddr", "nonsense", BAD),
    ("jsonb", "no json", BAD),
    ("jsonb", '{"a": 1}', '{"a": 1}'),
    ("jsonb", '"\\u0000"', BAD),
    ("json", "{", BAD),
    ("integer[][]", [[1, 2], [3, None]], "{{1,2},{3,NULL}}"),
    ("integer[][]", [[1, 2], [3]], BAD),
    ("integer[][]", [[1, 2.5]], BAD),
    ("integer[][]", [], "{}"),
    ("varchar(2)[][]", [["a"], ["bcd"]], BAD),
    ("integer[]", [[1], [2]], BAD),
]
"""Type, value, and the text of what is stored; BAD: the event is parked."""


def prepared(postgres: str) -> tuple[PostgresPlace, dict[str, str]]:
    """A database with these types, and a sink `late` with a column of each; type -> column."""
    place = PostgresPlace(postgres)
    place.execute(TYPES)
    kinds = list(dict.fromkeys(kind for kind, _, _ in CASES))
    for extension in ("hstore", "ltree"):
        try:
            place.execute(f"create extension {extension}")
        except psycopg.Error:  # this server has no contrib
            kinds = [kind for kind in kinds if extension not in kind]
    columns = {kind: f"c{number}" for number, kind in enumerate(kinds)}
    create(place, "late", {"n": "bigint"} | {column: kind for kind, column in columns.items()})
    return place, columns


@pytest.mark.full
def test_each_type_of_the_server_keeps_its_value_or_parks_its_event(postgres: str) -> None:
    """Nothing is rounded, cut, wrapped or misread: such an event is parked alone, with column, value and type, and others are stored."""
    place, columns = prepared(postgres)
    given = [case for case in CASES if case[0] in columns]
    made, calls = bare(place.store(), budget=None), []

    @made.foreach(into="late")
    def book(event: Event, tx: Any) -> dict[str, Any]:
        calls.append(event.sequence_number)
        kind, value, _ = given[event.sequence_number]
        return {"n": event.sequence_number, columns[kind]: value}

    made(batch(*orders(range(len(given)))), 0)
    names = list(columns.values())
    rows = place.execute("select n, " + ", ".join(f"{name}::text" for name in names) + " from late")
    stored = {row[0]: dict(zip(names, row[1:], strict=True)) for row in rows}
    found = {number: stored[number][columns[kind]] if number in stored else BAD for number, (kind, _, _) in enumerate(given)}
    wrong = [(kind, value, found[number]) for number, (kind, value, told) in enumerate(given) if found[number] != told]
    assert not wrong
    for letter in letters(place.store()):
        kind, value, _ = given[letter["sequence_number"]]
        assert f"column '{columns[kind]}" in letter["error_message"], (kind, value, letter["error_message"])
        assert f"({type(value).__name__})" in letter["error_message"] or kind.endswith("]"), (kind, value, letter["error_message"])
    assert len(calls) < 10 * len(given), "the bad rows are known, and not searched for"


def contrib(postgres: str) -> PostgresPlace:
    """A database with ltree."""
    place = PostgresPlace(postgres)
    try:
        place.execute("create extension ltree")
    except psycopg.Error:
        pytest.skip("this server has no contrib")
    return place


def test_a_merged_text_that_the_server_cannot_read_is_parked_wherever_it_stands(postgres: str) -> None:
    """In a key, in what says which row is newer, in another column, in a row that a later one replaces: its own event, and no other."""
    place = contrib(postgres)
    create(place, "latest", {"t": "ltree primary key", "r": "pg_lsn", "w": "tsvector", "n": "int"})
    texts = [("a", "0/1", "x"), ("a..b", "0/2", "x"), ("a", "later", "x"), ("a", "0/3", "'x"), ("a", "0/4", "y"), ("b", "0/1", "'")]
    made, calls = bare(place.store(), budget=None), []

    @made.foreach()
    def book(event: Event, tx: Any) -> None:
        calls.append(event.sequence_number)
        key, newer, other = texts[event.sequence_number]
        tx.merge({"t": key, "r": newer, "w": other, "n": event.sequence_number}, "latest", keys="t", newer_by="r")

    report = made(batch(*orders(range(len(texts)))), 0)
    assert (report.processed, report.dead_lettered) == (2, 4)
    told = {letter["sequence_number"]: letter["error_message"] for letter in letters(place.store())}
    wrong = {
        1: "'t' is ltree, and 'a..b'",
        2: "'r' is pg_lsn, and 'later'",
        3: "'w' is tsvector, and \"'x\"",
        5: "'w' is tsvector",
    }
    assert told.keys() == wrong.keys() and all(text in told[number] for number, text in wrong.items())
    assert read(place, "latest", ["n"]) == [(4,)]
    assert len(calls) <= 3 * len(texts)


TABLES_FAULT = {
    "a trigger that looks into no table": "create function f() returns trigger language plpgsql as "
    "'begin perform 1 from nowhere; return new; end'; "
    "create trigger t before insert on late for each row execute function f()",
    "a check of a domain that may not be run": "create function f(t tsvector) returns bool language plpgsql as "
    "'begin perform 1 from nowhere; return true; end'; "
    "create domain d as tsvector check (f(value)); alter table late alter w type d",
}
"""What is wrong with the table -> statements that make it so."""


@pytest.mark.parametrize("fault", of_which(1, TABLES_FAULT))
def test_what_is_wrong_with_the_table_parks_nothing(postgres: str, fault: str) -> None:
    """An error that no text is the cause of stops the stream, whatever it says while a text is read, and whatever class it is of."""
    place = PostgresPlace(postgres)
    create(place, "late", {"n": "bigint", "w": "tsvector"})
    place.execute(TABLES_FAULT[fault])
    made = bare(place.store(), budget=None)

    @made.foreach(into="late")
    def book(event: Event, tx: Any) -> dict[str, Any]:
        return {"n": event.sequence_number, "w": "a"}

    with pytest.raises((SinkMismatch, StoreError), match=r"nowhere.* does not exist"):
        made(batch(*orders(range(3))), 0)
    assert letters(place.store()) == []


@pytest.mark.full
def test_an_error_that_says_the_words_of_another_blames_no_innocent(postgres: str) -> None:
    """Texts of events are in errors: one that looks like the server's words about another row does not park that one."""
    place = PostgresPlace(postgres)
    create(place, "late", {"n": "bigint", "w": "tsvector", "j": "jsonb", "x": "text"})
    place.execute(
        "create function f() returns trigger language plpgsql as "
        "$f$begin execute format('select %L::int', new.x); return new; end$f$;"
        "create trigger t before insert on late for each row execute function f()"
    )
    spoof = 'COPY late, line 1, column w: "x"'
    rows = [
        {"x": "1"},
        {"x": f"no number\n{spoof}"},
        {"w": f"'\n{spoof}"},
        {"j": f"no json\n{spoof}"},
        {"j": f'{{"a": "{spoof}", b}}'},
        {"x": "2"},
    ]
    made = bare(place.store(), budget=None)

    @made.foreach(into="late")
    def book(event: Event, tx: Any) -> dict[str, Any]:
        return {"n": event.sequence_number, "w": "a", "j": {}, "x": "1", **rows[event.sequence_number]}

    made(batch(*orders(range(len(rows)))), 0)
    assert [letter["sequence_number"] for letter in letters(place.store())] == [1, 2, 3, 4]


@pytest.mark.full
def test_a_handler_of_batches_is_searched_for_texts_that_the_server_cannot_read(postgres: str) -> None:
    """Dicts and Arrow tables of many events: whatever class the error is of, the bad text's event is found, and the others are kept."""
    place = contrib(postgres)
    create(place, "late", {"n": "bigint", "t": "ltree"})
    for number, rows in enumerate((lambda given: given, pa.Table.from_pylist)):
        made = bare(place.store(), name=f"c{number}", budget=None)

        @made.foreach_batch
        def load(events: pa.Table, tx: Any, rows: Any = rows) -> None:
            tx.write(rows([{"n": n, "t": "a..b" if n == 5 else "a"} for n in events["sequence_number"].to_pylist()]), "late")

        assert made(batch(*orders(range(8))), 0).dead_lettered == 1
        assert [letter["sequence_number"] for letter in letters(place.store(), consumer=f"c{number}")] == [5]


def test_texts_that_are_all_wrong_are_the_columns_fault_at_first(postgres: str) -> None:
    """A column whose type reads none of the texts of the first batch is the sink's mismatch, in the words of a value."""
    place = PostgresPlace(postgres)
    create(place, "late", {"n": "bigint", "w": "macaddr"})
    made = bare(place.store())

    @made.foreach(into="late")
    def book(event: Event, tx: Any) -> dict[str, Any]:
        return {"n": event.sequence_number, "w": "a"}

    with pytest.raises(SinkMismatch, match=r"No row of the first batch fits.*column 'w' is macaddr, and 'a' \(str\).*invalid input syntax"):
        made(batch(*orders(range(5))), 0)
    assert letters(place.store()) == []
