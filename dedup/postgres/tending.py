"""The upkeep that a consumer's own process does beside its batches: small portions, on a connection of its own.

The tables of reservations have the keys of all consumers. So what is purged is older than the longest retention that any of them has told,
and while one has told none, nothing is. One session of the whole schema has the turn, by an advisory lock that ends with it. Each portion
is a transaction, the same functions as `dedup upkeep` calls, and the server ends one that takes too long. Called by store.py.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, suppress

import psycopg

from checkpoint.postgres.connection import Connection, translating
from checkpoint.postgres.sql import Statements
from dedup.core.retention import PurgeBound
from dedup.postgres import stored_filter
from dedup.postgres.connection import Pool
from dedup.postgres.key_filter import about
from dedup.postgres.state import value

TABLES = 30
"""Tables of reservations that an upkeep keeps: each one costs every batch two locks, and a purge gives up a whole one."""

PACKED = 500_000
"""Keys of one portion of packing: a second of the server or less, where the table has not more than 8 million."""

MESSAGES = 10_000
"""Messages of one portion, and a hundredth as many pages."""

LONGEST = 60
"""Seconds after which the server ends a portion."""

_UNSAID = (
    "no reservations are purged, since other consumers share the tables, and {} told no retention: start them with "
    "Limits(retention=...), or delete those that nobody runs (`dedup consumer delete`). `dedup upkeep --retention` asks none"
)

Connecting = Callable[[], AbstractContextManager[Connection]]


class PgTending:
    """The part of the store that a consumer's own upkeep needs."""

    _sql: Statements
    _pool: Pool

    def _connection(self, doing: str) -> AbstractContextManager[Connection]:
        """A connection outside any transaction."""
        raise NotImplementedError

    def tell_retention(self, consumer: str, retention: dt.timedelta | None, *, upkeep: bool) -> None:
        """Note how long this consumer needs its reservations (None: for ever): its tables are those of all consumers.

        Args:
            upkeep: whether its own processes carry it out.

        Crash: it is noted or not.
        """
        with self._connection(f"Noting the retention of {consumer!r}") as connection:
            connection.execute(self._sql["tell_retention"], {"consumer": consumer, "retention": retention, "upkeep": upkeep})

    def upkeep_turn(self, consumer: str, retention: dt.timedelta) -> PgUpkeepTurn:
        """What the consumer's own process does for its upkeep. Begins nothing yet."""
        return PgUpkeepTurn(consumer, retention, self._sql, self._pool.fresh)

    def holding_up(self) -> list[str]:
        """Consumers that have not told their retention, while another one's own upkeep waits for that."""
        with self._connection("Looking for retentions") as connection:
            return [name for (name,) in connection.execute(self._sql["holding_up"], {}).fetchall()]


class PgUpkeepTurn:
    """One turn. Its connection is there while `portions` is open."""

    def __init__(self, consumer: str, retention: dt.timedelta, sql: Statements, connect: Connecting) -> None:
        self._consumer, self._retention, self._sql, self._connect = consumer, retention, sql, connect
        self._connection: Connection | None = None
        self.kept: tuple[str, ...] = ()

    def portions(self) -> Generator[str, None, None]:
        """Messages of this consumer; then, for all consumers: rotate, purge, merge records, drop, pack, and make filters.

        Nothing where another session has the turn.

        Raises:
            StoreError: a portion failed; those before it are done.

        Crash: each portion is done or not, and the lock ends with the session; the next turn goes on, of whatever process.
        """
        with self._connect() as connection, translating(f"The upkeep of {self._consumer!r}"):
            self._connection = connection
            connection.execute(self._sql["set_session"], {"name": "statement_timeout", "value": f"{LONGEST}s"})
            if value(connection, self._sql["take_upkeep"]):
                yield from self._messages(connection)
                yield from self._forgotten(connection)
                yield from self._packed(connection)

    def stop(self) -> None:
        """Cancel the statement that runs now, if one does."""
        if self._connection is not None:
            with suppress(psycopg.Error):
                self._connection.cancel_safe(timeout=2.0)

    def _messages(self, connection: Connection) -> Iterator[str]:
        old = {"consumer": self._consumer, "before": _ago(self._retention), "most": MESSAGES}
        while count := value(connection, self._sql["outbox_purge_some"], **old):
            yield f"deleted {count} sent messages"

    def _forgotten(self, connection: Connection) -> Iterator[str]:
        retention, unsaid = connection.execute(self._sql["common_retention"], {}).fetchone() or (None, [])
        if unsaid or retention is None:
            self.kept = (_UNSAID.format(", ".join(unsaid)),)
            return
        before = _ago(retention)
        bounds = [PurgeBound(*row) for row in connection.execute(self._sql["purge_bounds"], {"before": before}).fetchall()]
        self.kept = tuple(told for bound in bounds if (told := bound.told(before)))
        if value(connection, self._sql["rotation_due"], age=retention / TABLES):
            yield f"began {value(connection, self._sql['rotate'])}"
            value(connection, self._sql["close_reservations"])
        if count := value(connection, self._sql["purge"], before=before, although_behind=[]):
            yield f"gave up {count} tables of reservations"
        yield from self._cleared(connection)

    def _cleared(self, connection: Connection) -> Iterator[str]:
        """What a purge leaves, also one that somebody else has begun."""
        for (name,) in connection.execute(self._sql["consumers"], {}).fetchall():
            if value(connection, self._sql["merge_batches"], consumer=name):
                yield f"merged the old batch records of {name}"
        while value(connection, self._sql["purged_left"]) and (table := value(connection, self._sql["drop_purged"])):
            yield f"dropped {table}"

    def _packed(self, connection: Connection) -> Iterator[str]:
        while (done := value(connection, self._sql["pack"], portion=PACKED)) not in (None, "waiting"):
            yield f"packing: {done}"
        for (number,) in connection.execute(self._sql["without_filter"], {}).fetchall():
            with suppress(psycopg.errors.UndefinedTable):  # purged since
                yield from self._filtered(connection, number)

    def _filtered(self, connection: Connection, number: int) -> Iterator[str]:
        growing = stored_filter.growing(connection, self._sql, number, about(connection, self._sql, (), (number,)))
        bloom = next(growing)
        for _ in growing:  # the same one, with more keys
            yield f"read keys of packed table {number}"
        yield f"the filter of packed table {number}: {stored_filter.keep(connection, self._sql, number, bloom)}"


def _ago(retention: dt.timedelta) -> dt.datetime:
    return dt.datetime.now(dt.UTC) - retention
