"""Where the year is played: a database of a server under the clock, or folders."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol
from unittest import mock

import pyarrow as pa

from kit import pg_server
from kit.year.clock import Clock


class Place(Protocol):
    """State and sinks."""

    task: Mapping[str, Any]
    tables: list[str]

    def read(self, sink: str, key: str) -> list[tuple[str, int]]:
        """(key, amount) of all rows."""

    def sizes(self) -> dict[str, int]:
        """Part of the state -> bytes."""

    def age(self, clock: Clock) -> None:
        """Files that were written since the last call get the clock's time."""

    def away(self) -> Any:
        """A context in which nobody reaches the store."""


class DeltaPlace:
    """Folders."""

    def __init__(self, folder: Path) -> None:
        from deltalake import DeltaTable

        self._folder = folder
        sinks = {"orders": ["id", "amount"], "latest": ["account", "amount"]}
        paths = {name: str(folder / "sinks" / name) for name in sinks}
        for name, (key, amount) in sinks.items():
            DeltaTable.create(paths[name], schema=pa.schema([(key, pa.string()), (amount, pa.int64())]))
        self.task = {"url": str(folder / "state"), "tables": paths}
        self.tables = list(paths.values())

    def read(self, sink: str, key: str) -> list[tuple[str, int]]:
        """(key, amount) of all rows."""
        from deltalake import DeltaTable

        rows = DeltaTable(self.task["tables"][sink]).to_pyarrow_table(columns=[key, "amount"])
        return list(zip(rows[key].to_pylist(), rows["amount"].to_pylist(), strict=True))

    def sizes(self) -> dict[str, int]:
        """Of each table its files, those that a vacuum would remove too, and its log."""
        found: dict[str, int] = {}
        for where, _, names in os.walk(self._folder / "state"):
            parts = Path(where).relative_to(self._folder / "state").parts
            section = [part.removeprefix("section=") for part in parts if part.startswith("section=")]
            name = ", ".join([*parts[:1], *section, *(["log of Delta"] if "_delta_log" in parts else [])])
            for file in names:
                found[name] = found.get(name, 0) + Path(where, file).stat().st_size
                found[f"{name}, files"] = found.get(f"{name}, files", 0) + 1
        return dict(sorted(found.items()))

    def age(self, clock: Clock) -> None:
        """Files that were written since the last call get the clock's time."""
        clock.age(self._folder)

    def show(self, sink: str) -> None:
        """A sink that was hidden is back."""
        Path(f"{sink}.hidden").rename(sink)

    @contextmanager
    def away(self) -> Iterator[None]:
        """The folder is somewhere else, and a file is in its place."""
        state = self._folder / "state"
        state.rename(self._folder / "away")
        state.write_text("")
        try:
            yield
        finally:
            state.unlink()
            (self._folder / "away").rename(state)


class PostgresPlace:
    """A server of its own, whose time is the clock's."""

    tables: list[str]

    def __init__(self, server: pg_server.Server) -> None:
        from dedup import PostgresStore

        self._server = server
        self.task = {"url": server.dsn, "tables": {}}
        self.tables = []
        store = PostgresStore(server.dsn)
        store.migrate()
        store.close()
        self._run("create table orders (id text not null, amount bigint)")
        self._run("create table latest (account text primary key, amount bigint)")

    def _run(self, statement: str) -> list[tuple[Any, ...]]:
        import psycopg

        with psycopg.connect(self._server.dsn, autocommit=True) as connection:
            cursor = connection.execute(statement.encode())
            return cursor.fetchall() if cursor.description else []

    def read(self, sink: str, key: str) -> list[tuple[str, int]]:
        """(key, amount) of all rows."""
        return [(name, amount) for name, amount in self._run(f"select {key}, amount from {sink}")]

    def sizes(self) -> dict[str, int]:
        """Of each table of ours with its indexes; those of reservations together, with their number, and the catalog."""
        found: dict[str, int] = {}
        told = self._run(
            "select relname, pg_total_relation_size(oid) from pg_class where relnamespace = 'dedup'::regnamespace and relkind = 'r'"
        )
        for name, size in told:
            kind = name.rstrip("0123456789").rstrip("_")
            found[kind] = found.get(kind, 0) + size
            if kind != name:
                found[f"{kind}, tables"] = found.get(f"{kind}, tables", 0) + 1
        (found["the database"],) = self._run("select pg_database_size(current_database())")[0]
        ((found["pg_attribute"],),) = self._run("select pg_total_relation_size('pg_attribute')")
        return dict(sorted(found.items()))

    def age(self, clock: Clock) -> None:
        """Files of the server have no say."""

    @contextmanager
    def away(self) -> Iterator[None]:
        """The server is down."""
        self._server.stop()
        try:
            yield
        finally:
            self._server.start()


@contextmanager
def place(kind: str, folder: Path, clock: Clock) -> Iterator[Place]:
    """A new one."""
    if kind == "delta":
        yield DeltaPlace(folder)
        return
    with mock.patch.dict(os.environ, clock.environment), pg_server.running_server(settings={"fsync": "off"}) as server:
        yield PostgresPlace(server)
