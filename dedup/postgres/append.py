"""Rows appended to a table of the user's. Called by `Transaction.write`."""

from __future__ import annotations

from checkpoint.postgres.dsn import Connection
from checkpoint.postgres.sqlfiles import Statements
from dedup.postgres import sink as sinks
from dedup.postgres.targets import given_rows
from dedup.store import Rows


def write(connection: Connection, sql: Statements, table: str, rows: Rows, writer: sinks.Writer = sinks.NOBODY) -> int:
    """Append rows; returns their number. Raises SinkMismatch before any row is sent, or with nothing of the COPY kept; RowsRefused where
    it depends on the values of the rows; ValuesRefused where these are of Python, and the rows at fault are known.

    Crash: undone with the transaction.
    """
    sink = sinks.describe(connection, sql, table, writer)
    plain = rows.plain()
    given = given_rows(sink, rows)  # first of all: what a handler must not write is its own error, not the table's
    plans = sinks.plans_for(sink, given.schema, converted=plain is not None)
    sending = sinks.fitted(sink, plans, given)
    return sinks.send(connection, sink, plans, sending, plain) if sending.num_rows else 0
