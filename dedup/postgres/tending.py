"""The upkeep that a consumer's own process does beside its batches: small portions, on a connection of its own.

The tables of reservations have the keys of all consumers. So what is purged is older than the longest retention that any of them has told,
and while one has told none, nothing is. That is counted back by the server's clock: the hosts of consumers have clocks of their own.

Each portion is a transaction, with the same functions as `dedup upkeep` calls, and the server ends one that takes too long. It holds an
advisory lock: one portion of the whole schema runs at a time. Nothing stays with the session between two portions, because a pooler may
give that to somebody else. Called by store.py.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

import psycopg

from checkpoint.postgres.connection import Connection, translating
from checkpoint.postgres.sql import Statements
from dedup.core.bloom import Bloom
from dedup.core.retention import PurgeBound
from dedup.postgres import stored_filter
from dedup.postgres.connection import Pool
from dedup.postgres.key_filter import about
from dedup.postgres.state import value

TABLES = 30
"""Tables of reservations that an upkeep keeps for a retention: each one costs every batch two locks, and a purge gives up a whole one."""

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


class _Elsewhere(Exception):
    """Another session has a portion in hand, or this turn was stopped."""


class PgUpkeepTurn:
    """One turn. Its connection is there while `portions` is open."""

    def __init__(self, consumer: str, retention: dt.timedelta, sql: Statements, connect: Connecting) -> None:
        self._consumer, self._retention, self._sql, self._connect = consumer, retention, sql, connect
        self._connection: Connection | None = None
        self._stopped, self._unsaid = False, list[str]()
        self.kept: tuple[str, ...] = ()

    def portions(self) -> Generator[str, None, None]:
        """For all consumers: rotate, purge, merge records, drop, pack, and make filters; then the messages of this one.

        Messages are looked for in all of the outbox. That comes last: where it takes longer than a portion may, the rest is done.
        Ends where another session has a portion in hand.

        Raises:
            StoreError: a portion failed; those before it are done.

        Crash: each portion is done or not, and the lock ends with it; the next turn goes on, of whatever process.
        """
        with self._connect() as connection, translating(f"The upkeep of {self._consumer!r}"), suppress(_Elsewhere):
            self._connection = connection
            yield from self._forgotten(connection)
            yield from self._packed(connection)
            yield from self._messages(connection)

    def stop(self) -> None:
        """Cancel the statement that runs now, if one does, and let no further portion begin."""
        self._stopped = True
        if self._connection is not None:
            with suppress(psycopg.Error):
                self._connection.cancel_safe(timeout=2.0)

    @contextmanager
    def _portion(self, connection: Connection) -> Iterator[None]:
        """The transaction of a portion. Raises _Elsewhere where another session has one in hand, or after a stop."""
        with connection.transaction():
            connection.execute(self._sql["set_local"], {"name": "statement_timeout", "value": f"{LONGEST}s"})
            if self._stopped or not value(connection, self._sql["take_upkeep"]):
                raise _Elsewhere
            yield

    def _done(self, connection: Connection, name: str, **parameters: object) -> Any:
        """What this statement returns, as a portion."""
        with self._portion(connection):
            return value(connection, self._sql[name], **parameters)

    def _messages(self, connection: Connection) -> Iterator[str]:
        old = {"consumer": self._consumer, "age": self._retention, "most": MESSAGES}
        while count := self._done(connection, "outbox_purge_some", **old):
            yield f"deleted {count} sent messages"

    def _forgotten(self, connection: Connection) -> Iterator[str]:
        if (began := self._rotated(connection)) is not None:
            yield f"began {began}"
            self._done(connection, "close_reservations")
        if count := self._purged(connection):
            yield f"gave up {count} tables of reservations"
        if not self._unsaid:
            yield from self._cleared(connection)

    def _rotated(self, connection: Connection) -> str | None:
        """The table that was begun, where one was due."""
        with self._portion(connection):
            retention, _, unsaid = self._common(connection)
            told = retention is not None and not unsaid
            due = told and value(connection, self._sql["rotation_due"], retention=retention, tables=TABLES)
            return value(connection, self._sql["rotate"]) if due else None

    def _purged(self, connection: Connection) -> int:
        """How many tables were given up: in one transaction with a look at what consumers have told."""
        with self._portion(connection):
            _, before, self._unsaid = self._common(connection)
            if self._unsaid:
                self.kept = (_UNSAID.format(", ".join(self._unsaid)),)
                return 0
            bounds = [PurgeBound(*row) for row in connection.execute(self._sql["purge_bounds"], {"before": before}).fetchall()]
            self.kept = tuple(told for bound in bounds if (told := bound.told(before)))
            return int(value(connection, self._sql["purge"], before=before, although_behind=[]))

    def _common(self, connection: Connection) -> Any:
        """The longest retention, the time that it goes back to, and the consumers that have told none."""
        row = connection.execute(self._sql["common_retention"], {}).fetchone()
        assert row is not None
        return None if row[0] is None else dt.timedelta(seconds=row[0]), *row[1:]

    def _cleared(self, connection: Connection) -> Iterator[str]:
        """What a purge leaves, also one that somebody else has begun."""
        for (name,) in connection.execute(self._sql["consumers"], {}).fetchall():
            if self._done(connection, "merge_batches", consumer=name):
                yield f"merged the old batch records of {name}"
        while self._done(connection, "purged_left") and (table := self._done(connection, "drop_purged")):
            yield f"dropped {table}"

    def _packed(self, connection: Connection) -> Iterator[str]:
        while (done := self._done(connection, "pack", portion=PACKED)) not in (None, "waiting"):
            yield f"packing: {done}"
        for (number,) in connection.execute(self._sql["without_filter"], {}).fetchall():
            with suppress(psycopg.errors.UndefinedTable):  # purged since
                yield from self._filtered(connection, number)

    def _filtered(self, connection: Connection, number: int) -> Iterator[str]:
        growing = stored_filter.growing(connection, self._sql, number, about(connection, self._sql, (), (number,)))
        with self._portion(connection):
            bloom = next(growing)
        while self._grew(connection, growing):
            yield f"read keys of packed table {number}"
        with self._portion(connection):
            kept = stored_filter.keep(connection, self._sql, number, bloom)
        yield f"the filter of packed table {number}: {kept}"

    def _grew(self, connection: Connection, growing: Iterator[Bloom]) -> bool:
        """Whether the filter has got more keys."""
        with self._portion(connection):
            return next(growing, None) is not None
