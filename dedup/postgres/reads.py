"""The part of PostgresStore that only reads: what people and `verify` ask for."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

import pyarrow as pa

from checkpoint.postgres.dsn import Connection
from checkpoint.postgres.sqlfiles import Statements
from dedup.postgres import reading, select, state
from dedup.postgres.outbox import PgOutbox
from dedup.store import Selection
from dedup.wanted import ALL, Wanted


class Reads:
    """Each method is one snapshot, takes no lock, and raises StoreError where the server cannot answer."""

    _sql: Statements

    def _connection(self, doing: str) -> AbstractContextManager[Connection]:
        """A connection outside any transaction."""
        raise NotImplementedError

    def outbox(self, consumer: str) -> PgOutbox:
        """The messages that this consumer has published."""
        return PgOutbox(consumer, self._sql, self._connection)

    def consumers(self) -> list[str]:
        """Names, sorted."""
        with self._connection("Reading the consumers") as connection:
            return [row[0] for row in connection.execute(self._sql["consumers"], {})]

    def batches(self, consumer: str, wanted: Wanted = ALL) -> pa.Table:
        """Batch records in seq order."""
        with self._connection(f"Reading the batch records of {consumer!r}") as connection:
            return reading.batches(connection, self._sql, consumer, wanted)

    def letters(self, selection: Selection, columns: Sequence[str] | None = None) -> pa.Table:
        """Dead letters in position order. Leave out `body` and `extras` where they are not needed: they may be large.

        Raises ConfigError where `selection.after` names no letter.
        """
        with self._connection("Reading dead letters") as connection:
            return select.letters(connection, self._sql, selection, columns)

    def groups(self, selection: Selection) -> pa.Table:
        """GROUPS of the selected letters, the largest first.

        By consumer, kind, status and fingerprint it is fast however many letters there are; with other conditions all matching letters
        are read.
        """
        with self._connection("Grouping dead letters") as connection:
            return select.groups(connection, self._sql, selection)

    def history(self, *letter_ids: str) -> pa.Table:
        """HISTORY of these letters, each one's oldest first."""
        with self._connection("Reading the history of letters") as connection:
            return select.history(connection, self._sql, letter_ids)

    def reserved(self, consumer: str) -> int | None:
        """How many reservations are kept; None where several consumers, or lives of one, share the tables."""
        with self._connection("Counting reservations") as connection:
            found = state.read(connection, self._sql, consumer)
            return reading.reserved(connection, self._sql, found.head.keyspace) if found else 0

    def require_letters(self, consumer: str) -> None:
        """Raise StoreRestored where tables were restored, all of them or some."""
        with self._connection(f"Checking the tables of {consumer!r}") as connection:
            found = [str(row[0]) for row in connection.execute(self._sql["restore_contradictions"], {"consumer": consumer})]
        state.refuse_restored(consumer, "; ".join(found) or None)

    def problems(self, consumer: str) -> list[str]:
        """Contradictions between the tables. Reads every reservation: minutes where there are billions."""
        with self._connection(f"Checking the tables of {consumer!r}") as connection:
            return reading.problems(connection, self._sql, consumer)
