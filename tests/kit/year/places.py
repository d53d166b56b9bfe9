"""Where the year is played: a database of a server under the clock, or folders."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol
from unittest import mock

import pyarrow as pa
from deltalake import DeltaTable

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
        self._folder = folder
        sinks = {"orders": ["id", "amount"], "latest": ["account", "amount"]}
        paths = {name: str(folder / "sinks" / name) for name in sinks}
        for name, (key, amount) in sinks.items():
            DeltaTable.create(paths[name], schema=pa.schema([(key, pa.string()), (amount, pa.int64())]))
        self.task = {"url": str(folder / "state"), "tables": paths}
        self.tables = list(paths.values())

    def read(self, sink: str, key: str) -> list[tuple[str, int]]:
        """(key, amount) of all rows."""
        rows = DeltaTable(self.task["tables"][sink]).to_pyarrow_table(columns=[key, "amount"])
        return list(zip(rows[key].to_pylist(), rows["amount"].to_pylist(), strict=True))

    def sizes(self) -> dict[str, int]:
        """Of each table, and each section of the ledger, bytes and files; of what a VACUUM would remove, and of Delta's log as well."""
        found, state = Counter[str](), self._folder / "state"
        for log in state.rglob("_delta_log"):
            name = f"{log.relative_to(state).parts[0]}, {log.parent.name}"
            rows = pa.table(DeltaTable(log.parent).get_add_actions(flatten=True)).to_pylist()
            for row in rows:
                _count(found, f"{name} {row.get('partition.section', '')}".rstrip(), row["size_bytes"])
            listed = {row["path"] for row in rows}
            for path in (path for path in log.parent.glob("*.parquet") if path.name not in listed):
                _count(found, f"{name}, not listed any more", path.stat().st_size)
            for path in log.iterdir():
                _count(found, f"{name}, Delta's log", path.stat().st_size)
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


def _count(found: Counter[str], name: str, size: int) -> None:
    found[name] += size
    found[f"{name}, files"] += 1


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
