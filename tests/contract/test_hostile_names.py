"""Names and values made to hurt - consumers, topics, keys, headers, tables, schemas - are names and values, and never SQL or paths."""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

from checkpoint.errors import ConfigError
from checkpoint.position import Partition
from checkpoint.postgres.sql import quoted
from deadletter.selection import Selection
from dedup import Consumer, DeadLetters, DeltaStore, PostgresStore, decode
from dedup.core.store import Store
from dedup.reprocessing.letters import reprocess
from kit.orders import assert_proven, batch, consumer, event, flatten, letters
from kit.pg_run import run
from kit.places import SINK, DeltaPlace, Place, PostgresPlace

FRESH = itertools.count()
"""Numbers the examples: they share a database or a folder, and each has positions and keys of its own."""

EXAMPLES = int(os.environ.get("DEDUP_EXAMPLES", 0))
"""More of them, others each time; 0: six, the same each time."""

PATIENT = settings(
    phases=(Phase.explicit, Phase.generate),
    max_examples=EXAMPLES or 6,
    deadline=None,
    derandomize=not EXAMPLES,
    suppress_health_check=list(HealthCheck),
)

NAMES = st.one_of(
    st.sampled_from(
        [
            '"; drop table orders; --',
            "'; drop schema dedup cascade; --",
            "a.b.c",
            "%s %(id)s {schema} {child}",
            "../../etc/passwd",
            "$(touch /tmp/x) `id` \\ \\0",
            "ä ö ß 𝄞 \u202e \ufeff",
            "  two  spaces ",
            "con/nul:*?<>|",
            "x" * 200,
            "é" * 120,
            "line\nbreak\ttab\r",
            "NULL",
        ]
    ),
    st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0"), min_size=1, max_size=40),
)
"""What somebody may call a thing. No NUL: PostgreSQL's text cannot hold it, and no broker has it in a name."""

VALUES = st.dictionaries(
    st.text(st.characters(exclude_categories=("Cs",)), max_size=20), st.one_of(st.none(), st.binary(max_size=40)), max_size=4
)
"""Headers."""


def hostile_consumer(store: Store, name: str, query: str = "q") -> Any:
    """Writes what it gets; raises for an amount of 13."""
    made = consumer(store, name=name, budget=None, query=query)

    def handler(rows: pa.Table, tx: Any) -> None:
        flat = flatten(rows)
        if 13 in flat["amount"].to_pylist():
            raise ValueError(f"cannot: {rows['key'].to_pylist()}")
        tx.write(flat, "orders")

    made._handler = handler
    return made


@pytest.mark.full
@PATIENT
@given(name=NAMES, topic=NAMES, source=NAMES, key=NAMES, headers=VALUES)
@example(name="𠮷野家", topic="\U0003ffff", source="𠮷", key="𠮷\U0010ffff", headers={"𠮷": "𠮷".encode()})
@example(name="x" * 200, topic="t." + "x" * 245, source="s" * 255, key="k" * 5_000, headers={"": b"", "h" * 1_000: b"\xff" * 1_000})
@example(name="\\", topic="\\t", source="\\\\", key="\\x41", headers={"\\": b"\\", "a\\b": None, "\\x41": b"", "\\101": b"a"})
def test_any_name_and_value_comes_back_as_it_was(
    place: Place, name: str, topic: str, source: str, key: str, headers: dict[str, bytes | None]
) -> None:
    """Whatever a consumer, topic, broker, key or header is called: effect once, a letter with exact bytes, reprocessed, proven."""
    store = place.store()
    if isinstance(place, DeltaPlace) and len(name.encode()) > 200:
        with pytest.raises(ConfigError):
            hostile_consumer(store, name)(batch(event(0, key)), 0)
        return
    number = 2 * next(FRESH)
    key, topic, query = f"{number} {key}", f"{number}{topic}", str(number)
    where = {"source": source, "topic": topic, "properties": [{"key": k, "value": v} for k, v in headers.items()], "key": key.encode()}
    rows = batch(event(number, key, 1, **where), event(number + 1, key + "!", 13, **where))
    first = hostile_consumer(store, name, query)
    before = len(place.read())
    report = first(rows, 0)
    assert (report.processed, report.dead_lettered) == (1, 1)
    assert hostile_consumer(store, name, query)(rows, 0).redelivered == 2
    assert Partition(source, topic, 0) in set(store.head(name).checkpoints)
    assert len(place.read()) == before + 1 and {"id": key, "amount": 1} in place.read()
    (letter,) = letters(store, consumer=name, topic=topic, source=source, first=number)
    shown = {h["key"]: h["value"] for h in letter["properties"]}
    assert shown == {k.replace("\0", "␀"): v for k, v in headers.items()} or shown == headers
    assert letter["body"] == json.dumps({"id": key + "!", "amount": 13}).encode() and letter["event_key"] == key.encode()
    edited = json.dumps({"id": key + "!", "amount": 12}).encode()
    DeadLetters(store).edit(letter["id"], body=edited, by=name[:50], reason=topic)
    assert reprocess(Selection(consumer=name, topic=topic, ids=(letter["id"],)), first).reprocessed == 1
    assert store.history(letter["id"]).to_pylist()[-1]["reason"] in (topic, None, "")
    assert_proven(store, name)
    store.close()


def test_a_topic_with_nul_is_a_clear_stop(postgres: str) -> None:
    """No broker has such a name, and PostgreSQL cannot hold it: the batch is refused in words, and nothing of it is there."""
    place = PostgresPlace(postgres)
    place.create_sink()
    with pytest.raises(Exception, match=r"NUL|\\x00|0x00") as refused:
        consumer(place.store())(batch(event(0, "a", topic="a\0b")), 0)
    assert place.read() == [], refused


@PATIENT
@given(table=NAMES, column=NAMES)
def test_any_table_and_column_name_is_a_name(postgres: str, table: str, column: str) -> None:
    """In PostgreSQL a quoted name goes to the table of that name and no other, whatever stands in it; unquoted, it is refused."""
    name, other = table.encode()[:63].decode("utf-8", "ignore"), column.encode()[:60].decode("utf-8", "ignore")
    run(postgres, f"create schema if not exists hostile; drop table if exists hostile.{quoted(name)}".encode())
    run(postgres, f"create table hostile.{quoted(name)} ({quoted(other)} text)".encode())
    before, number = tables_of(postgres), 2 * next(FRESH)
    who = f"{table}{number}"  # a new consumer each time: the table was created again
    made = Consumer(who, PostgresStore(postgres), idempotence_key="data.id", decode=decode.json(SINK), query=str(next(FRESH)))
    made.foreach_batch(lambda rows, tx: tx.write(flatten(rows).select(["id"]).rename_columns([other]), f"hostile.{quoted(name)}"))
    where = {"topic": str(number)}
    made(batch(event(0, f"{number}one", **where), event(1, f"{number}{table}", **where)), 0)
    found = run(postgres, f"select * from hostile.{quoted(name)}".encode())
    assert sorted(found) == sorted([(f"{number}one",), (f"{number}{table}",)])
    assert tables_of(postgres) - before == set() or all(schema == "dedup" for schema, _ in tables_of(postgres) - before)
    assert before <= tables_of(postgres)
    made.store.close()


def tables_of(dsn: str) -> set[tuple[str, str]]:
    return set(run(dsn, "select schemaname, tablename from pg_tables where schemaname not in ('pg_catalog', 'information_schema')"))


@pytest.mark.full
@PATIENT
@example(schema="line\nbreak\ttab\r\v\x85")
@given(schema=NAMES)
def test_any_schema_name_is_a_name(postgres: str, schema: str) -> None:
    """State in a schema of any name works, purge and rotation included, and touches no other schema."""
    name = schema.encode()[:63].decode("utf-8", "ignore")
    if name.startswith("pg_"):
        return
    run(postgres, 'create table if not exists "orders" (id text, amount bigint)')
    store = PostgresStore(postgres, schema=name)
    made = consumer(store)
    before = tables_of(postgres)
    assert made(batch(event(0, "a"), event(1, "b", -1)), 0).dead_lettered == 1
    store.rotate_reservations()
    assert made(batch(event(2, "a")), 1).duplicates == 1
    assert_proven(store)
    assert {s for s, _ in tables_of(postgres) - before} <= {name} and before <= tables_of(postgres)
    store.close()
    run(postgres, f"drop schema {quoted(name)} cascade".encode())


@PATIENT
@given(name=st.one_of(NAMES, st.sampled_from(["100%", "a b", "a#b?c=d&e", "ü[1]", "=", "a;b'c\""])))
def test_any_folder_name_of_a_sink_is_a_name(tmp_path: Path, name: str) -> None:
    """A Delta sink in a folder of any name gets its rows there, once, and nothing appears beside it."""
    from deltalake import DeltaTable

    folder = name.replace("/", "_").replace("\\", "_").encode()[:100].decode("utf-8", "ignore")
    if not folder.strip(". ") or not folder.isprintable():  # delta-rs itself refuses control characters, and takes \\ for /
        return
    root = tmp_path / str(len(list(tmp_path.iterdir())))
    root.mkdir()
    place = str(root / folder)
    Path(place).mkdir()
    DeltaTable.create(place, schema=SINK)
    store = DeltaStore(str(root / "state"), tables={"orders": place})
    made = consumer(store)
    assert made(batch(event(0, "a"), event(1, "b")), 0).processed == 2
    assert made(batch(event(0, "a"), event(1, "b")), 0).redelivered == 2
    assert sorted(DeltaTable(place).to_pyarrow_table()["id"].to_pylist()) == ["a", "b"]
    assert sorted(p.name for p in root.iterdir()) == sorted([folder, "state"])
    assert_proven(store)
