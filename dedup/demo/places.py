"""Where the demo writes: what it needs of a store beside what the library needs of it.

On PostgreSQL state and sink are in a schema of their own, `dedup_demo`, which is replaced at every run; on Delta in one folder on local
disk. Called by main.py and by the process that is killed.
"""

from __future__ import annotations

import io
import shlex
from pathlib import Path
from typing import Protocol

import pyarrow as pa
import pyarrow.csv as csv
from deltalake import DeltaTable

import dedup
from dedup import ConfigError, DeltaStore
from dedup.core.store import Store
from dedup.delta import tables
from dedup.demo.input import FLIGHT
from dedup.urls import is_postgres, mask_secrets

CONSUMER = "departures"
"""The consumer's name, and the sink's."""

DEFAULT = ".demo"
"""The demo's folder, in the current one."""

SCHEMA = "dedup_demo"
MARK = "made by dedup demo, replaced at its next run"

TYPES = {pa.string(): "text", pa.int32(): "integer", pa.timestamp("us", tz="UTC"): "timestamptz"}


class DemoTarget(Protocol):
    """A place for the consumer's state and its sink, both of the demo alone."""

    sink: str
    """What `tx.write` calls the sink."""

    def prepare(self) -> None:
        """Make it empty: what an earlier demo left is removed, the sink table is created.

        Crash: half emptied; the next demo empties the rest.
        """

    def store(self) -> Store:
        """The library's store in this place."""

    def rows(self) -> pa.Table:
        """All rows of the sink."""

    def where(self) -> dict[str, str]:
        """What there is to look at: name -> path, or table."""

    def command(self, words: str) -> str:
        """What to type for `dedup WORDS` on this store."""


def target(store: str | None) -> tuple[Path, DemoTarget]:
    """The demo's folder and place: PostgreSQL for its URL, Delta inside the folder that `store` names; by default `.demo`."""
    if store and is_postgres(store):
        return Path(DEFAULT).absolute(), PostgresTarget(store)

    folder = Path(store or DEFAULT).absolute()  # the JVM and its workers may stand elsewhere
    return folder, DeltaTarget(folder / "lake")


class PostgresTarget:
    """State and sink in the schema `dedup_demo` of the database that the URL names."""

    sink = f"{SCHEMA}.{CONSUMER}"

    def __init__(self, dsn: str) -> None:
        from checkpoint.postgres.connection import checked  # here: the extra `demo` does not bring its driver

        self._dsn = checked(dsn)

    def prepare(self) -> None:
        """Replace the schema, create the sink.

        Raises:
            ConfigError: there is a schema of this name that no demo made.
            psycopg.Error: the server cannot be reached, or the role may not create schemas.

        Crash: one transaction; the old schema is there, or the new one.
        """
        import psycopg  # here: the extra `demo` does not bring it

        columns = ", ".join(f'"{field.name}" {TYPES[field.type]}' for field in FLIGHT)
        with psycopg.connect(self._dsn) as connection:
            found = connection.execute(
                "SELECT obj_description(oid, 'pg_namespace') = %s FROM pg_namespace WHERE nspname = %s", [MARK, SCHEMA]
            ).fetchone()
            if found and not found[0]:
                raise ConfigError(f"The database has a schema {SCHEMA!r} that the demo did not make. Rename it, or use another database.")
            connection.execute(f"DROP SCHEMA IF EXISTS {SCHEMA} CASCADE")
            connection.execute(f"CREATE SCHEMA {SCHEMA}")
            connection.execute(f"COMMENT ON SCHEMA {SCHEMA} IS '{MARK}'")
            connection.execute(f"CREATE TABLE {self.sink} ({columns})")

    def store(self) -> Store:
        """The store in that schema."""
        return dedup.PostgresStore(self._dsn, schema=SCHEMA)

    def rows(self) -> pa.Table:
        """All rows of the sink, by COPY: 300,000 rows as Python objects would take longer than writing them did."""
        import psycopg

        statement = f"COPY (SELECT {', '.join(FLIGHT.names)} FROM {self.sink}) TO STDOUT (FORMAT csv, HEADER)"
        with psycopg.connect(self._dsn) as connection:
            connection.execute("SET TIME ZONE 'UTC'")
            with connection.cursor().copy(statement) as copy:
                raw = io.BytesIO(b"".join(copy))
        return csv.read_csv(raw, convert_options=csv.ConvertOptions(column_types=FLIGHT, strings_can_be_null=False))

    def where(self) -> dict[str, str]:
        """The table and the schema."""
        return {"sink": self.sink, "state": f"schema {SCHEMA}"}

    def command(self, words: str) -> str:
        """With the schema, and without a password."""
        return f"DEDUP_SCHEMA={SCHEMA} dedup {words} --store {shlex.quote(mask_secrets(self._dsn))}"


class DeltaTarget:
    """State in `lake/dedup`, sink in `lake/departures`."""

    sink = CONSUMER

    def __init__(self, lake: Path) -> None:
        self._path = lake / CONSUMER
        self._state = str(lake / "dedup")

    def prepare(self) -> None:
        """Create the sink. The folder is new: main.py has emptied it. Crash: nothing that matters; the next demo starts anew."""
        self._path.mkdir(parents=True)
        DeltaTable.create(str(self._path), FLIGHT)

    def store(self) -> Store:
        """The store of `lake/dedup`."""
        return DeltaStore(self._state, tables={self.sink: str(self._path)})

    def rows(self) -> pa.Table:
        """All rows of the sink."""
        return tables.dataset(DeltaTable(str(self._path))).to_table()

    def where(self) -> dict[str, str]:
        """The two folders."""
        return {"sink": str(self._path), "state": self._state}

    def command(self, words: str) -> str:
        """With the folder of the state."""
        return f"dedup {words} --store {shlex.quote(self._state)}"
