"""A transaction of letters: it takes no epoch, stalls no stream, and is fenced against a reset only.

Called by reprocess, discard and the like through `PostgresStore.begin_letters`.
"""

from __future__ import annotations

import psycopg

from checkpoint.errors import ConfigError
from checkpoint.postgres.dsn import Connection
from checkpoint.postgres.sqlfiles import Statements
from dedup.postgres import outcome, state
from dedup.postgres.fence import open_guarded
from dedup.postgres.outcome import Attempt
from dedup.postgres.transaction import PgTransaction


def begin(connection: Connection, sql: Statements, consumer: str, *, positions: bool) -> tuple[state.State, Attempt]:
    """Open the transaction and read the head. Raises ConfigError for a consumer that does not exist, StoreRestored, psycopg.Error.

    Args:
        positions: lock the checkpoints, too, as a batch does: the stream waits from here to the end.
    """
    attempt = open_guarded(connection, sql)
    row = state.one(connection, sql, "fence_letters", consumer=consumer)
    if row is not None:
        state.refuse_restored(consumer, row["restored"])
    if row is not None and positions:
        connection.execute(sql["lock_claims"], {"id": row["id"]})
        connection.execute(sql["lock_checkpoints"], {"id": row["id"]})
    found = state.read(connection, sql, consumer) if row else None
    if found is None:
        raise ConfigError(f"There is no consumer {consumer!r} here. `dedup consumer list` shows the names.")
    return found, attempt


class LettersTransaction(PgTransaction):
    """What `PostgresStore.begin_letters` yields."""

    def _number(self) -> None:
        """Letters alone are no decision about positions: the sequence number of decisions stays."""

    def _refuse_fenced(self, cause: BaseException) -> None:
        """A takeover does not concern letters."""

    def _settle(self, error: psycopg.Error) -> None:
        outcome.settle(self._store, self._sql, self._state, self._attempt, error, outcome.ask_server)
