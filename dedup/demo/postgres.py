"""The demo on PostgreSQL: state and sink in a schema of its own, `dedup_demo`, which is replaced at every run."""

from __future__ import annotations

import io
import shlex

import psycopg
import pyarrow as pa
import pyarrow.csv as csv

from dedup import ConfigError, PostgresStore
from dedup.cli.stores import mask_secrets
from dedup.demo.flights import FLIGHT
from dedup.demo.target import CONSUMER
from dedup.store import Store

SCHEMA = "dedup_demo"
MARK = "made by dedup demo, replaced at its next run"

TYPES = {pa.string(): "text", pa.int32(): "integer", pa.timestamp("us", tz="UTC"): "timestamptz"}


class PostgresTarget:
    """State and sink in the schema `dedup_demo` of the database that the URL names."""

    sink = f"{SCHEMA}.{CONSUMER}"

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn

    def prepare(self) -> None:
        """Replace the schema, create the sink.

        Raises:
            ConfigError: there is a schema of this name that no demo made.
            psycopg.Error: the server cannot be reached, or the role may not create schemas.

        Crash: one transaction; the old schema is there, or the new one.
        """
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
        return PostgresStore(self._dsn, schema=SCHEMA)

    def rows(self) -> pa.Table:
        """All rows of the sink, by COPY: 300,000 rows as Python objects would take longer than writing them did."""
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
