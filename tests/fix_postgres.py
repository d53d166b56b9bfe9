"""A real PostgreSQL for tests: `postgres_server` once per run, `postgres` a fresh database per test.

In this order: DEDUP_TEST_POSTGRES (a DSN whose role may create databases), a container engine that answers, local binaries, a pip wheel.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from typing import Any

import engine
import pg_server
import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import make_conninfo


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what uses the server as `postgres`."""
    for item in items:
        if {"postgres", "postgres_server"} & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.postgres)


@pytest.fixture(scope="session")
def docker_setup() -> list[str]:
    """For pytest-docker: services are started one by one, when they are asked for."""
    return []


@pytest.fixture(scope="session")
def postgres_server(request: pytest.FixtureRequest) -> Iterator[str]:
    """DSN of a server where databases can be created."""
    if dsn := os.environ.get("DEDUP_TEST_POSTGRES"):
        yield dsn
    elif engine.answers():
        services = engine.started(request, "postgres")
        dsn = f"postgresql://postgres@{request.getfixturevalue('docker_ip')}:{services.port_for('postgres', 5432)}/postgres"
        services.wait_until_responsive(timeout=120.0, pause=0.2, check=lambda: _answers(dsn))
        yield dsn
    else:
        with pg_server.running_server() as server:
            yield server.dsn


def _answers(dsn: str) -> bool:
    try:
        psycopg.connect(dsn, connect_timeout=2).close()
    except psycopg.OperationalError:
        return False
    return True


@pytest.fixture
def postgres(postgres_server: str) -> Iterator[str]:
    """DSN of a database of the test's own, empty, removed afterwards with every session in it."""
    name = f"dedup_{uuid.uuid4().hex[:12]}"
    run(postgres_server, sql.SQL("create database {}").format(sql.Identifier(name)))
    yield make_conninfo(postgres_server, dbname=name)
    run(postgres_server, sql.SQL("drop database {} with (force)").format(sql.Identifier(name)))


def run(dsn: str, statement: Any, parameters: Any = None) -> list[tuple[Any, ...]]:
    """Run one statement on a connection of its own; its rows, if it has any."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        cursor = connection.execute(statement, parameters)
        return cursor.fetchall() if cursor.description else []
