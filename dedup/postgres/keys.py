"""Reservations: ask for known keys in one round trip, then COPY the new ones.

Promises that if several transactions want one key at the same time, the first to commit gets it, and the others learn of it: they meet in
the unique index of one table. After a rotation some transactions write the table before it alone. So until they have ended the others write
both, that one first, and a key is theirs if it was new in both.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import psycopg
import pyarrow as pa
import pyarrow.compute as pc

from checkpoint.postgres.connection import Connection
from checkpoint.postgres.sql import Statements, quoted
from deadletter.store import KEYS
from dedup.core.store import Meanwhile
from dedup.postgres import wire
from dedup.postgres.key_filter import KnownFilter, Packed, Tables, tables_now

SOME = 256
"""Keys that are looked through for a new one."""


def look_up(connection: Connection, sql: Statements, phase: int, keys: pa.Table) -> pa.Table:
    """Those of these keys that are reserved or held by a letter (KEYS).

    Args:
        phase: of the transaction. What a purge has given up since is asked all the same: the floors that were read do not tell of it.
    """
    if not keys.num_rows:
        return KEYS.empty_table()
    return _known(connection, sql, tables_now(connection, sql, phase), wire.keys_of(keys["key"]))


def _known(connection: Connection, sql: Statements, tables: Tables, keys: wire.Keys) -> pa.Table:
    return wire.known_table(_probe(connection, _asking(sql, "known_keys", tables), keys))


def _asking(sql: Statements, name: str, tables: Tables, apart: Collection[int] = ()) -> bytes:
    """A statement that asks all tables: those of `apart`, which are packed, for keys of their own."""
    near = tables._replace(packed=tuple(table for table in tables.packed if table.number not in apart))
    child, reserved = _child(sql, tables.current.id), _reserved(sql, near, "k.key", "k.head").replace("%", "%%")
    each = " ".join(_apart(sql, table) for table in tables.packed if table.number in apart)
    held = sql.composed("keys_of_letters", child, reserved_d=_of_letter(sql, tables).replace("%", "%%"))
    return sql.composed(name, child, reserved_k=reserved, held=held.decode(), apart=each)


def _apart(sql: Statements, table: Packed) -> str:
    """Ask one packed table for its own keys."""
    found = _in_page(sql, table, "k.key", "k.head").replace("%", "%%")
    keys = f"%(keys_{table.number})s::uuid[], %(heads_{table.number})s::bigint[]"
    return f"union all select k.key, r.hash from unnest({keys}) k (key, head) cross join lateral ({found}) r"


def _of_letter(sql: Statements, tables: Tables) -> str:
    return _reserved(sql, tables, "d.key", f"{quoted(sql.schema)}.key_head(d.key)")


def _reserved(sql: Statements, tables: Tables, key: str, head: str) -> str:
    """The payload hashes of a key, as SQL: from all tables, named one by one, and their parent, where a person may have written."""
    rows = [f"{quoted(sql.schema)}.reservation", *(_child(sql, number) for number in tables.asked)]
    each = [f"select int8send(t.payload_hash) as hash from only {table} t where t.key = {key}" for table in rows]
    return "(" + " union all ".join([*each, *(_in_page(sql, table, key, head) for table in tables.packed)]) + ")"


def _in_page(sql: Statements, table: Packed, key: str, head: str) -> str:
    """The same from one packed table: of the one page that may have the key. Bytes found across two keys of it are not the key."""
    schema = quoted(sql.schema)
    page = f"select p.keys, p.hashes from only {schema}.reservation_page_{table.number:06d} p where p.page = ({head} >> {table.shift})::int"
    return (
        "select h.hash from (select case when mod(f.at, 16) = 1 then substring(f.hashes from f.at / 2 + 1 for 8) "
        f"when f.at > 0 then {schema}.hash_in_page(f.keys, f.hashes, {key}) end as hash "
        f"from (select g.keys, g.hashes, position(uuid_send({key}) in g.keys) as at from ({page}) g) f) h where h.hash is not null"
    )


def _probe(connection: Connection, statement: bytes, keys: wire.Keys, apart: Mapping[int, wire.Keys] = MappingProxyType({})) -> bytes:
    values = _arrays("", keys)
    for number, mine in apart.items():
        values |= _arrays(f"_{number}", mine)
    with connection.cursor(binary=True) as cursor:
        row = cursor.execute(statement, values).fetchone()
    assert row is not None
    return bytes(row[0])


def _arrays(name: str, keys: wire.Keys) -> dict[str, bytes]:
    return {f"keys{name}": wire.uuid_array(keys), f"heads{name}": wire.int8_array(wire.heads_of(keys))}


@dataclass(frozen=True)
class Probe:
    """A question that the server is at work on: which of these keys are known."""

    tables: Tables  # as they are for this transaction
    order: npt.NDArray[np.int64]
    wanted: wire.Keys  # sorted
    answer: Future[bytes]
    known_filter: KnownFilter
    filtered: bool  # in the tables of rows only those were looked up that the filter does not rule out


def begin_probe(connection: Connection, sql: Statements, phase: int, keys: pa.Array, known_filter: KnownFilter) -> Probe:
    """Ask for these keys; the connection is busy until the answer is there. `phase` as for `look_up`."""
    tables, wanted = tables_now(connection, sql, phase), wire.keys_of(keys)
    order = wire.order_of(wanted)  # one order for all: nobody waits in a circle
    wanted = wanted[order]
    maybe = known_filter.may_know(connection, tables, wanted)
    apart = {number: wanted[some] for number, some in maybe.pages.items() if some.any()}
    there = tables._replace(packed=tuple(t for t in tables.packed if t.number in apart or t.number not in maybe.pages))
    statement = _asking(sql, "known_keys" if maybe.rows is None else "likely_keys", there, apart)
    beside = ThreadPoolExecutor(1, "dedup probe")
    answer = beside.submit(_probe, connection, statement, wanted if maybe.rows is None else wanted[maybe.rows], apart)
    beside.shutdown(wait=False)
    return Probe(tables, order, wanted, answer, known_filter, maybe.rows is not None)


def reserve_probed(connection: Connection, sql: Statements, asked: Probe, keys: pa.Table, meanwhile: Meanwhile | None = None) -> pa.Table:
    """Reserve those of the keys that were asked for which are not known; returns the known ones (KEYS).

    Waits while another transaction holds one of them, and wins it if that one fails.

    Args:
        meanwhile: called with the keys known so far, while the server takes the others.

    Crash: before the commit nothing is reserved.
    """
    wanted = asked.wanted
    hashes = keys["payload_hash"].to_numpy()[asked.order]
    answer = _once_each(wire.known_table(asked.answer.result()))
    new = ~wire.among(wanted, wire.keys_of(answer["key"]))
    if not new.any():
        return answer
    with ThreadPoolExecutor(1, "dedup reserve") as beside:
        taken = beside.submit(_take, connection, sql, asked.tables, wanted[new], hashes[new])
        if meanwhile is not None:
            meanwhile(answer)
        asked.known_filter.add(asked.tables.current, wanted[new])
        raced = taken.result()
    if len(raced) and asked.filtered:
        asked.known_filter.surprised()
    return pa.concat_tables([answer, *_raced(connection, sql, asked.tables, raced, hashes[wire.among(wanted, raced)])])


def _once_each(found: pa.Table) -> pa.Table:
    """Each key once (KEYS): where two tables take reservations, one key is in both, and each of them is asked."""
    keys = wire.keys_of(found["key"])
    order = wire.order_of(keys)
    repeated = np.append(False, keys[order][1:] == keys[order][:-1])
    return found if not repeated.any() else found.take(order[~repeated[: len(order)]])


def some_new(keys: pa.Table, known: pa.Table) -> list[bytes]:
    """New ones among the first of these keys (KEYS)."""
    some = keys["key"].slice(0, SOME)
    new: list[bytes] = some.filter(pc.invert(pc.is_in(some, value_set=known["key"].combine_chunks()))).to_pylist()
    return new


def keep(connection: Connection, sql: Statements, ids: Sequence[str]) -> None:
    """Reserve again what these letters held before they were reprocessed, where a purge has dropped the reservation.

    Crash: undone with the transaction.
    """
    tables = tables_now(connection, sql)
    for number in _written(tables):
        statement = sql.of("keep_keys", _child(sql, number), reserved_d=_of_letter(sql, tables))
        connection.execute(statement, {"ids": list(ids)})
        others = tuple(other for other in tables.asked if other != number)
        tables = tables._replace(asked=others)  # the next one is written what this one has just been


def _raced(connection: Connection, sql: Statements, tables: Tables, keys: wire.Keys, hashes: Any) -> Iterator[pa.Table]:
    """Those that others have (KEYS). One that was freed since it was found taken is reserved after all."""
    while len(keys):
        found = _known(connection, sql, tables, keys)
        yield found
        free = ~wire.among(keys, wire.keys_of(found["key"]))
        keys, hashes = keys[free], hashes[free]
        raced = _take_free(connection, sql, tables, keys, hashes) if len(keys) else keys
        keys, hashes = raced, hashes[wire.among(keys, raced)]


def _written(tables: Tables) -> list[int]:
    """The tables that take new reservations, in the order in which all write them."""
    closing, number = tables.current.closing, tables.current.id
    return [number] if closing is None else [closing, number]


def _child(sql: Statements, number: int) -> str:
    return f"{quoted(sql.schema)}.reservation_{number:06d}"


def _take(connection: Connection, sql: Statements, tables: Tables, keys: wire.Keys, hashes: Any) -> wire.Keys:
    """Write the reservations; returns those that another transaction committed since the probe."""
    try:
        with connection.transaction():
            for number in _written(tables):
                statement = f"copy {_child(sql, number)} (key, payload_hash) from stdin (format binary)".encode()
                with connection.cursor().copy(statement) as copy:
                    copy.write(wire.COPY_HEADER)
                    copy.write(wire.copy_rows(keys, hashes))
                    copy.write(wire.COPY_END)
    except psycopg.errors.UniqueViolation:
        return _take_free(connection, sql, tables, keys, hashes)
    return keys[:0]


def _take_free(connection: Connection, sql: Statements, tables: Tables, keys: wire.Keys, hashes: Any) -> wire.Keys:
    """Write those reservations that are free; returns the others.

    A key that is free in the first of two tables alone is somebody else's who wrote the second one and a newer table. It stays in neither.
    """
    mine, lost = keys, True
    while lost:
        with connection.transaction() as attempt:
            asked = wire.among(keys, mine)
            first, mine = _take_in_all(connection, sql, tables, keys[asked], hashes[asked])
            if lost := len(mine) < first:
                raise psycopg.Rollback(attempt)
    raced: wire.Keys = keys[~wire.among(keys, mine)]
    return raced


def _take_in_all(connection: Connection, sql: Statements, tables: Tables, keys: wire.Keys, hashes: Any) -> tuple[int, wire.Keys]:
    """How many keys were free in the first table, and those that were free in all of them."""
    counts, mine = [], keys
    for number in _written(tables):
        free = wire.among(keys, mine)
        mine = _take_one_by_one(connection, sql.of("reserve_one_by_one", _child(sql, number)), keys[free], hashes[free])
        counts.append(len(mine))
    return counts[0], mine


def _take_one_by_one(connection: Connection, statement: bytes, keys: wire.Keys, hashes: Any) -> wire.Keys:
    with connection.cursor(binary=True) as cursor:
        row = cursor.execute(statement, {"keys": wire.uuid_array(keys), "hashes": wire.int8_array(hashes)}).fetchone()
    assert row is not None
    return np.frombuffer(bytes(row[0]), dtype="V16")
