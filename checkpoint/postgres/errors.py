"""The driver's exceptions in our words: translated here, once.

Promises that every psycopg error which leaves this package, other than one raised by a handler's own SQL, is a StoreError or Fenced.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import psycopg

from checkpoint.errors import CommitConflict, SchemaOutdated, StoreError, StoreUnavailable

_LOST = ("08", "57P", "25P03", "53")
"""Class 08 connection, 57P shutdown, 25P03 idle session ended, 53 out of memory, disk or connections."""

_PLAN_AGAIN = ("40",)
"""Serialization failure and deadlock. Source: PostgreSQL 16 manual, appendix A, read 2025-06."""

_WAIT = ("25P04", "55006", "55P03", "57014", "72")
"""Time-outs, cancelled statements, locks that were not given, snapshots that were too old: the next try may pass. Source: the same."""


def is_lost(error: psycopg.Error) -> bool:
    """Whether the connection, and with it the transaction, is gone or cannot go on."""
    state = error.sqlstate
    return state.startswith(_LOST) if state else isinstance(error, psycopg.OperationalError | psycopg.InterfaceError)


def ends_transaction(error: psycopg.Error) -> bool:
    """Whether a retry must start the transaction anew: after these, going on from a savepoint fails for ever."""
    return is_lost(error) or bool(error.sqlstate and error.sqlstate.startswith(_PLAN_AGAIN))


def text_of(error: psycopg.Error) -> str:
    """The server's words on one line."""
    parts = [error.diag.message_primary or str(error).strip() or type(error).__name__, error.diag.message_detail or ""]
    return " ".join(" ".join(part.split()) for part in parts if part).rstrip(".")


def translate(error: psycopg.Error, doing: str) -> StoreError:
    """The error to raise in place of the driver's, for our own statements."""
    text = f"{doing}: {text_of(error)}"
    if is_lost(error) or (error.sqlstate or "").startswith(_WAIT):
        return StoreUnavailable(f"{text.rstrip('?')}. Nothing of it was committed; try again.")
    if ends_transaction(error):
        return CommitConflict(f"{text}. Nothing of this attempt was committed; plan it again.")
    if isinstance(error, psycopg.errors.InsufficientPrivilege):
        return StoreError(f"{text}. Grant this role what it needs: docs/postgres.md lists the rights.")
    if isinstance(error, psycopg.errors.UndefinedTable | psycopg.errors.InvalidSchemaName | psycopg.errors.UndefinedFunction):
        return SchemaOutdated(f"{text}. Run `dedup migrate`.")
    return StoreError(f"{text}. Nothing of it was committed.")


@contextmanager
def translating(doing: str) -> Iterator[None]:
    """Raise our errors in place of the driver's."""
    try:
        yield
    except psycopg.Error as error:
        raise translate(error, doing) from error
