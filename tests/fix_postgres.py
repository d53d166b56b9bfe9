"""A real PostgreSQL for tests: one server for the whole run, `postgres` a database of the test's own with the tables of the state.

A database is a clone of one that was migrated once; `empty_postgres` is one without tables. Nothing kills this server, so that it never
waits for a disk (`pg_server.UNSAFE`); tests that kill a server start their own. Several processes of pytest-xdist share the one that the
first process starts before them.

The server is, in this order: DEDUP_TEST_POSTGRES (a DSN whose role may create databases), a container engine that answers, local binaries,
a pip wheel.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import engine
import pg_server
import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

DSN = "DEDUP_TEST_POSTGRES"
"""Variable with the DSN of a server that runs already."""

FIXTURES = {"postgres", "empty_postgres", "postgres_server"}


def pytest_configure(config: pytest.Config) -> None:
    """Start the server of all processes of pytest-xdist, before they start: they get its DSN by the environment."""
    if not getattr(config.option, "numprocesses", None) or DSN in os.environ or engine.answers():
        return
    with suppress(pg_server.NoPostgres):
        stack = ExitStack()
        config.add_cleanup(stack.close)
        os.environ[DSN] = stack.enter_context(pg_server.running_server(settings=pg_server.UNSAFE)).dsn
        stack.callback(os.environ.pop, DSN)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what uses the server as `postgres`."""
    for item in items:
        if FIXTURES & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.postgres)


@pytest.fixture(scope="session")
def docker_setup() -> list[str]:
    """For pytest-docker: services are started one by one, when they are asked for."""
    return []


@pytest.fixture(scope="session")
def postgres_server(request: pytest.FixtureRequest) -> Iterator[str]:
    """DSN of a server where databases can be created."""
    if dsn := os.environ.get(DSN):
        yield dsn
    elif engine.answers():
        services = engine.started(request, "postgres")
        dsn = f"postgresql://postgres@{request.getfixturevalue('docker_ip')}:{services.port_for('postgres', 5432)}/postgres"
        services.wait_until_responsive(timeout=120.0, pause=0.2, check=lambda: _answers(dsn))
        yield dsn
    else:
        with pg_server.running_server(settings=pg_server.UNSAFE) as server:
            yield server.dsn


def _answers(dsn: str) -> bool:
    try:
        psycopg.connect(dsn, connect_timeout=2).close()
    except psycopg.OperationalError:
        return False
    return True


@pytest.fixture(scope="session")
def migrated(postgres_server: str) -> Iterator[str]:
    """Name of the database that `postgres` clones; nobody stays connected to it."""
    from dedup.postgres import PostgresStore

    with database(postgres_server) as dsn:
        store = PostgresStore(dsn)
        store.migrate()
        store.close()
        yield conninfo_to_dict(dsn)["dbname"]


@pytest.fixture
def postgres(postgres_server: str, migrated: str) -> Iterator[str]:
    """DSN of a database of the test's own, migrated, removed afterwards with every session in it."""
    with database(postgres_server, template=migrated) as dsn:
        yield dsn


@pytest.fixture
def empty_postgres(postgres_server: str) -> Iterator[str]:
    """DSN of a database of the test's own, without tables."""
    with database(postgres_server) as dsn:
        yield dsn


@contextmanager
def database(server: str, *, template: str = "template1") -> Iterator[str]:
    """DSN of a new database, for the length of the block.

    PostgreSQL copies files: its other strategy, the default since 15, writes each page to the log, which takes twice as long.
    """
    name = f"dedup_{uuid.uuid4().hex[:12]}"
    with psycopg.connect(server, autocommit=True) as connection:
        strategy = "strategy file_copy" if connection.info.server_version >= 150000 else ""
        connection.execute(f"create database {name} template {template} {strategy}".encode())
    yield make_conninfo(server, dbname=name)
    run(server, f"drop database {name} with (force)")


def run(dsn: str, statement: Any, parameters: Any = None) -> list[tuple[Any, ...]]:
    """Run one statement on a connection of its own; its rows, if it has any."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        cursor = connection.execute(statement, parameters)
        return cursor.fetchall() if cursor.description else []
