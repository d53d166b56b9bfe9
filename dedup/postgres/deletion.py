"""Deleting a consumer: one transaction decides, then its rows go in portions, each of them a transaction.

Promises that after the decision no instance of the consumer commits, whenever it comes back; that nothing can be begun under the name until
the last row is gone; and that a consumer which gets the name afterwards begins as a new one. Reservations name no consumer: they stay until
they are purged, and count for nobody. The steps are functions of the database (0010_consumer_deletions.sql). Called by the store.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import psycopg

from checkpoint.errors import StillHeld
from checkpoint.head import Holder, Present
from checkpoint.holders import this_process
from checkpoint.postgres.connection import Connection
from checkpoint.postgres.sql import Statements
from dedup.core.deletion import Allowed, Deletion, no_consumer, require, running, waits
from dedup.postgres import state
from dedup.postgres.epoch import TakeoverWait, take_epoch

PORTION = 20_000
"""Rows that go in one transaction: a second of the server or so, and no batch of another consumer waits for them."""

PATIENCE = 10.0
"""Seconds for which the decision waits for an open transaction of the consumer."""


class Deletes:
    """The part of `PostgresStore` that removes consumers."""

    _sql: Statements
    on_step: Callable[[str], None]

    def _connection(self, doing: str) -> AbstractContextManager[Connection]:
        """A connection outside any transaction."""
        raise NotImplementedError

    def consumers(self) -> list[str]:
        """Names, sorted."""
        raise NotImplementedError

    def present(self, consumer: str) -> list[Present]:
        """The processes that hold the consumer's epoch or share it."""
        raise NotImplementedError

    def delete_consumer(
        self,
        consumer: str,
        *,
        although_running: bool = False,
        although_waiting: bool = False,
        dry_run: bool = False,
        by: str,
        reason: str,
    ) -> Deletion:
        """Delete everything that is kept of a consumer, but for its reservations, which stay until they are purged. Sinks stay as they are.

        Needs the rights of `dedup_operate`. Batches of other consumers do not wait. Who decided it and why is kept in `consumer_deletion`.

        Args:
            although_running: also if an instance runs or may run. Its database session is ended if it has a transaction open, and it
                ends with `Fenced`.
            although_waiting: also with letters that are open or blocked, or messages that are not sent.
            dry_run: change nothing; returns what there is and what speaks against it.

        Raises:
            ConfigError: there is no such consumer. Refused: it runs, or something waits.
            StillHeld: a transaction of the consumer stays open.

        Crash: nothing has changed; or it is decided, no instance commits, and the next call deletes the rest.
        """
        with self._connection(f"Deleting {consumer!r}") as connection:
            allowed = Allowed(although_running, although_waiting)
            found = self._look(connection, consumer, dry_run=dry_run)
            if dry_run:
                return found
            require(found, allowed)
            if not found.under_way:
                found = self._decide(connection, found, allowed, by, reason)
            number = _number(connection, self._sql, consumer)
            while number is not None and self._portion(connection, number) not in (None, "consumer"):
                pass
        return found

    def _look(self, connection: Connection, consumer: str, *, dry_run: bool) -> Deletion:
        row = state.one(connection, self._sql, "deletion_contents", consumer=consumer)
        if row is None:
            raise no_consumer(consumer, self.consumers())
        parts = {
            "checkpoints": row["checkpoints"],
            "batch records": row["batches"],
            "dead letters": row["letters"],
            "messages": row["messages"],
            "decisions of people": row["actions"],
        }
        waiting = waits({"open or blocked dead letters": row["waiting"], "messages that are not sent": row["unsent"]})
        under_way = _number(connection, self._sql, consumer) is not None
        return Deletion(consumer, parts, running(self.present(consumer)), waiting, under_way, dry_run)

    def _decide(self, connection: Connection, found: Deletion, allowed: Allowed, by: str, reason: str) -> Deletion:
        """Look again where nobody can commit, and note the deletion; returns what there was.

        Crash: it is decided, or nothing has changed; the epoch may have been taken.
        """
        consumer = found.consumer
        if found.running:  # and it may: whoever has a transaction open is ended
            me = this_process()
            take_epoch(connection, self._sql, consumer, Holder(*me, "dedup consumer delete"), TakeoverWait(0, True, _tell_nobody))
        try:
            with connection.transaction():
                connection.execute(self._sql["set_local"], {"name": "lock_timeout", "value": f"{int(PATIENCE * 1000)}ms"})
                row = state.one(connection, self._sql, "lock_consumer", consumer=consumer)
                now = self._look(connection, consumer, dry_run=False)
                require(now, Allowed(allowed.running, allowed.waiting))
                self.on_step("decide_deletion")
                if row is not None and not now.under_way:
                    connection.execute(self._sql["begin_deletion"], {"id": row["id"], "by": by, "reason": reason})
        except psycopg.errors.LockNotAvailable as error:
            raise StillHeld(
                f"Consumer {consumer!r} is not deleted: a transaction of it has been open for more than {PATIENCE:.0f} s, of a batch or of "
                "somebody who works on its dead letters. Wait for its end, or stop it."
            ) from error
        return now

    def _portion(self, connection: Connection, number: int) -> str | None:
        """What went: "consumer" at last; None where somebody else was faster.

        Crash: the portion is gone or not.
        """
        self.on_step("delete_portion")
        done: str | None = state.call(connection, self._sql["delete_portion"], id=number, most=PORTION)
        return done


def _number(connection: Connection, sql: Statements, consumer: str) -> int | None:
    """Of the consumer of this name that is being deleted."""
    row = connection.execute(sql["deletion_under_way"], {"consumer": consumer}).fetchone()
    return int(row[0]) if row else None


def _tell_nobody(_seconds: float, _who: str) -> None:
    """Nobody waits."""
