"""Single statements of tests. A session for each of them costs more than most of them, so those of a test's own database keep one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
from psycopg.conninfo import conninfo_to_dict

_kept: dict[tuple[int, str], dict[str, psycopg.Connection[Any]]] = {}
"""Process, which a fork is not, and name of a database that a test has to itself -> DSN -> a session that nobody uses at this moment."""


@contextmanager
def keeping(name: str) -> Iterator[None]:
    """Within the block `run` keeps sessions of this database."""
    _kept[os.getpid(), name] = {}
    try:
        yield
    finally:
        end(name)
        del _kept[os.getpid(), name]


def end(name: str) -> None:
    """End those that are kept: PostgreSQL clones no database in which somebody is."""
    kept = _kept.get((os.getpid(), name), {})
    while kept:
        kept.popitem()[1].close()


def run(dsn: str, statement: Any, parameters: Any = None) -> list[tuple[Any, ...]]:
    """Run one statement in a session that has the state of a new one, by itself; its rows, if it has any."""
    place = os.getpid(), str(conninfo_to_dict(dsn).get("dbname"))
    connection = _fresh(_kept.get(place, {}).pop(dsn, None)) or psycopg.connect(dsn, autocommit=True, prepare_threshold=None)
    try:
        cursor = connection.execute(statement, parameters)
        return cursor.fetchall() if cursor.description else []
    finally:
        if place not in _kept or _kept[place].setdefault(dsn, connection) is not connection:
            connection.close()


def _fresh(connection: psycopg.Connection[Any] | None) -> psycopg.Connection[Any] | None:
    """The session without anything that a statement left in it; None where somebody has ended it."""
    if connection is not None:
        try:
            connection.execute("discard all")
        except psycopg.Error:
            connection.close()
            return None
    return connection
