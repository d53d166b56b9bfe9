"""The order of sequences: which are blocked, and who waits behind whom.

Promises that nobody overtakes and nobody waits for ever: whoever parks behind a letter or releases one holds the sequence's row.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from checkpoint.postgres.dsn import Connection
from checkpoint.postgres.sqlfiles import Statements
from dedup.store import SEQUENCES


def blocked(connection: Connection, sql: Statements, sequences: pa.Array | pa.ChunkedArray) -> pa.Table:
    """SEQUENCES of those that are blocked. Their rows stay locked: waits for whoever is releasing one."""
    if not len(sequences):
        return SEQUENCES.empty_table()
    rows = connection.execute(sql["blocked"], {"sequences": [uuid.UUID(bytes=s) for s in sequences.to_pylist()]}).fetchall()
    return pa.Table.from_pylist([dict(zip(SEQUENCES.names, row, strict=True)) for row in rows], schema=SEQUENCES)


def parked(connection: Connection, sql: Statements, letters: pa.Table, consumer: str) -> None:
    """Block the sequences of letters that were just parked. Those that come in behind older ones are put in their place.

    Crash: undone with the transaction.
    """
    there = letters.filter(letters["sequence"].is_valid())
    if not there.num_rows:
        return
    sequences = _distinct(there["sequence"])
    known = set(_lock(connection, sql, sequences, consumer))
    behind = [
        letter for letter, s in zip(there["id"].to_pylist(), there["sequence"].to_pylist(), strict=True) if uuid.UUID(bytes=s) in known
    ]
    _settle(connection, sql, sequences, behind)


def changed(connection: Connection, sql: Statements, ids: Sequence[str], sequences: Sequence[uuid.UUID]) -> None:
    """Put the sequences of letters that have changed in order again.

    Args:
        sequences: what `lock` returned before the letters changed.

    Crash: undone with the transaction.
    """
    if sequences:
        _settle(connection, sql, sequences, ids)


def lock(connection: Connection, sql: Statements, ids: Sequence[str], consumer: str) -> list[uuid.UUID]:
    """Lock the sequences of these letters; returns them. Waits for whoever parks behind one of them.

    Crash: undone with the transaction.
    """
    sequences = [row[0] for row in connection.execute(sql["sequences_of"], {"ids": list(ids)})]
    _lock(connection, sql, sequences, consumer)
    return sequences


def _distinct(column: Any) -> list[uuid.UUID]:
    return sorted({uuid.UUID(bytes=value) for value in column.to_pylist()})


def _lock(connection: Connection, sql: Statements, sequences: Sequence[uuid.UUID], consumer: str) -> list[uuid.UUID]:
    if not sequences:
        return []
    rows = connection.execute(sql["lock_sequences"], {"sequences": list(sequences), "consumer": consumer}).fetchall()
    return [row[0] for row in rows if row[0] is not None]


def _settle(connection: Connection, sql: Statements, sequences: Sequence[uuid.UUID], ids: Sequence[str]) -> None:
    if ids:
        connection.execute(sql["link_letters"], {"ids": list(ids)})
    connection.execute(sql["settle_sequences"], {"sequences": list(sequences)})
