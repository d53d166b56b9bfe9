"""Reservations: ask for known keys in one round trip, then COPY the new ones.

Promises that if several transactions want one key at the same time, the first to commit gets it, and the others learn of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
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
from dedup.postgres.key_filter import Current, KnownFilter, current_table

SOME = 256
"""Keys that are looked through for a new one."""


def look_up(connection: Connection, sql: Statements, keys: pa.Table) -> pa.Table:
    """Those of these keys that are reserved or held by a letter (KEYS)."""
    if not keys.num_rows:
        return KEYS.empty_table()
    return wire.known_table(_probe(connection, sql["known_keys"], wire.keys_of(keys["key"])))


def _probe(connection: Connection, statement: bytes, keys: wire.Keys) -> bytes:
    with connection.cursor(binary=True) as cursor:
        row = cursor.execute(statement, {"keys": wire.uuid_array(keys)}).fetchone()
    assert row is not None
    return bytes(row[0])


@dataclass(frozen=True)
class Probe:
    """A question that the server is at work on: which of these keys are known."""

    current: Current  # the table for those that are not
    order: npt.NDArray[np.int64]
    wanted: wire.Keys  # sorted
    answer: Future[bytes]
    known_filter: KnownFilter
    filtered: bool  # only those were looked up that the filter does not rule out


def begin_probe(connection: Connection, sql: Statements, keys: pa.Array, known_filter: KnownFilter) -> Probe:
    """Ask for these keys; the connection is busy until the answer is there."""
    connection.execute(sql["share_reservations"], {})
    current, wanted = current_table(connection, sql), wire.keys_of(keys)
    order = wire.order_of(wanted)  # one order for all: nobody waits in a circle
    wanted = wanted[order]
    maybe = known_filter.may_know(current, wanted)
    beside = ThreadPoolExecutor(1, "dedup probe")
    if maybe is None:
        answer = beside.submit(_probe, connection, sql["known_keys"], wanted)
    else:
        answer = beside.submit(_probe, connection, sql.of("likely_keys", _child(sql, current)), wanted[maybe])
    beside.shutdown(wait=False)
    return Probe(current, order, wanted, answer, known_filter, maybe is not None)


def reserve_probed(connection: Connection, sql: Statements, asked: Probe, keys: pa.Table, meanwhile: Meanwhile | None = None) -> pa.Table:
    """Reserve those of the keys that were asked for which are not known; returns the known ones (KEYS).

    Waits while another transaction holds one of them, and wins it if that one fails.

    Args:
        meanwhile: called with the keys known so far, while the server takes the others.

    Crash: before the commit nothing is reserved.
    """
    wanted = asked.wanted
    hashes = keys["payload_hash"].to_numpy()[asked.order]
    answer = wire.known_table(asked.answer.result())
    new = ~wire.among(wanted, wire.keys_of(answer["key"]))
    if not new.any():
        return answer
    with ThreadPoolExecutor(1, "dedup reserve") as beside:
        taken = beside.submit(_take, connection, sql, _child(sql, asked.current), wanted[new], hashes[new])
        if meanwhile is not None:
            meanwhile(answer)
        asked.known_filter.add(asked.current, wanted[new])
        raced = taken.result()
    if len(raced) and asked.filtered:
        asked.known_filter.surprised()
    return pa.concat_tables([answer, *_raced(connection, sql, _child(sql, asked.current), raced, hashes[wire.among(wanted, raced)])])


def some_new(keys: pa.Table, known: pa.Table) -> list[bytes]:
    """New ones among the first of these keys (KEYS)."""
    some = keys["key"].slice(0, SOME)
    new: list[bytes] = some.filter(pc.invert(pc.is_in(some, value_set=known["key"].combine_chunks()))).to_pylist()
    return new


def keep(connection: Connection, sql: Statements, ids: Sequence[str]) -> None:
    """Reserve again what these letters held before they were reprocessed, where a purge has dropped the reservation.

    Crash: undone with the transaction.
    """
    connection.execute(sql["share_reservations"], {})
    connection.execute(sql.of("keep_keys", _child(sql, current_table(connection, sql))), {"ids": list(ids)})


def _raced(connection: Connection, sql: Statements, child: str, keys: wire.Keys, hashes: Any) -> Iterator[pa.Table]:
    """Those that others have (KEYS). One that was freed since it was found taken is reserved after all."""
    while len(keys):
        found = wire.known_table(_probe(connection, sql["known_keys"], keys))
        yield found
        free = ~wire.among(keys, wire.keys_of(found["key"]))
        keys, hashes = keys[free], hashes[free]
        raced = _take_free(connection, sql, child, keys, hashes) if len(keys) else keys
        keys, hashes = raced, hashes[wire.among(keys, raced)]


def _child(sql: Statements, current: Current) -> str:
    return f"{quoted(sql.schema)}.reservation_{current.id:06d}"


def _take(connection: Connection, sql: Statements, child: str, keys: wire.Keys, hashes: Any) -> wire.Keys:
    """Write the reservations; returns those that another transaction committed since the probe."""
    statement = f"copy {child} (key, payload_hash) from stdin (format binary)".encode()
    try:
        with connection.transaction(), connection.cursor().copy(statement) as copy:
            copy.write(wire.COPY_HEADER)
            copy.write(wire.copy_rows(keys, hashes))
            copy.write(wire.COPY_END)
    except psycopg.errors.UniqueViolation:
        return _take_free(connection, sql, child, keys, hashes)
    return keys[:0]


def _take_free(connection: Connection, sql: Statements, child: str, keys: wire.Keys, hashes: Any) -> wire.Keys:
    statement = sql.of("reserve_one_by_one", child)
    with connection.cursor(binary=True) as cursor:
        row = cursor.execute(statement, {"keys": wire.uuid_array(keys), "hashes": wire.int8_array(hashes)}).fetchone()
    assert row is not None
    mine = np.frombuffer(bytes(row[0]), dtype="V16")
    raced: wire.Keys = keys[~wire.among(keys, mine)]
    return raced
