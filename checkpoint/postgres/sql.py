"""The SQL of this project: statements by name, with the schema's quoted name filled in, and migrations by number.

Statements are read once per process from the package data `dedup.sql`. Promises that each migration and the note that it was applied are
one transaction, that two migrations at once are safe, and that nothing works on tables of another version. Called by everything that
speaks SQL.
"""

from __future__ import annotations

import functools
import hashlib
import re
from dataclasses import dataclass
from importlib.resources import files

from checkpoint.errors import ConfigError, SchemaOutdated, StateTooNew, StoreError
from checkpoint.postgres.connection import Connection, translating

_HEADER = re.compile(r"^-- name: (\w+)\n((?:--.*\n)+)", re.MULTILINE)

OLDEST_SERVER = 140000
"""PostgreSQL 14: the first one with multiranges."""


@dataclass(frozen=True)
class Migration:
    """One file NNNN_name.sql."""

    version: int
    name: str
    text: str

    @property
    def checksum(self) -> str:
        """SHA-256 of the file: a file that was applied never changes."""
        return hashlib.sha256(self.text.encode()).hexdigest()


@dataclass(frozen=True)
class Query:
    """One named statement of queries.sql with its two lines of description."""

    name: str
    description: str
    text: str


def quoted(identifier: str) -> str:
    """The identifier as SQL text."""
    return '"' + identifier.replace('"', '""') + '"'


@functools.cache
def migrations() -> tuple[Migration, ...]:
    """All migrations, oldest first."""
    found = []
    for file in files("dedup.sql").joinpath("postgres").iterdir():
        if match := re.fullmatch(r"(\d{4})_(\w+)\.sql", file.name):
            found.append(Migration(int(match[1]), match[2], file.read_text(encoding="utf-8")))
    return tuple(sorted(found, key=lambda m: m.version))


def latest_version() -> int:
    """The schema version that this library writes."""
    return migrations()[-1].version


@functools.cache
def queries() -> dict[str, Query]:
    """The statements of queries.sql by name."""
    text = files("dedup.sql").joinpath("postgres/queries.sql").read_text(encoding="utf-8")
    heads = list(_HEADER.finditer(text))
    ends = [head.start() for head in heads[1:]] + [len(text)]
    return {
        head[1]: Query(head[1], re.sub(r"^-- ?", "", head[2], flags=re.MULTILINE).strip(), text[head.end() : end].strip().rstrip(";"))
        for head, end in zip(heads, ends, strict=True)
    }


@dataclass(frozen=True)
class Statements:
    """The run-time statements for one schema: `statements["fence"]`."""

    schema: str

    def __getitem__(self, name: str) -> bytes:
        return _filled(name, schema=quoted(self.schema))

    def of(self, name: str, table: str, **parts: str) -> bytes:
        """A statement about one table, whose name is quoted already.

        Args:
            parts: what its other placeholders stand for, as SQL.
        """
        return _filled(name, schema=quoted(self.schema), child=table, **parts)


@functools.cache
def _filled(name: str, **parts: str) -> bytes:
    # In one pass, for a schema may be called {child}; and a percent sign must not look like a parameter.
    names = "|".join(parts)
    return re.sub(rf"\{{({names})\}}", lambda found: parts[found[1]].replace("%", "%%"), queries()[name].text).encode()


def fill(statement: bytes, **parts: str) -> bytes:
    """A run-time statement with its other placeholders filled in, each once: what is filled in is not looked at again."""
    return re.sub(rb"\{(%s)\}" % "|".join(parts).encode(), lambda found: parts[found[1].decode()].encode(), statement)


def filled(migration: Migration, schema: str) -> bytes:
    """A migration for one schema, to be run without parameters."""
    told = " ".join(quoted(schema).split())  # a comment ends with its line
    text = re.sub("^--.*$", lambda comment: comment[0].replace("{schema}", told), migration.text, flags=re.MULTILINE)
    return text.replace("{schema}", quoted(schema)).encode()


def migrate(connection: Connection, schema: str) -> list[str]:
    """Apply what is missing; returns the names.

    Crash: each migration is applied as a whole or not at all; the next call goes on with the first missing one.
    """
    sql, applied = Statements(schema), []
    with translating(f"Migrating schema {schema!r}"):
        _check_server(connection, sql, schema)
        for migration in migrations():
            with connection.transaction():
                connection.execute(sql["migration_lock"], {"schema": schema})
                _make_schema(connection, sql, schema)
                if _apply(connection, sql, migration, schema):
                    applied.append(f"{migration.version:04d}_{migration.name}")
    return applied


def _make_schema(connection: Connection, sql: Statements, schema: str) -> None:
    has_schema, has_versions, _, _ = _check_server(connection, sql, schema)
    if not has_schema:  # "if not exists" asks for the right to create schemas even where it exists
        connection.execute(sql["make_schema"], {})
    if not has_versions:
        connection.execute(sql["make_schema_version"], {})


def _apply(connection: Connection, sql: Statements, migration: Migration, schema: str) -> bool:
    versions = _versions(connection, sql)
    _refuse_newer(versions, schema)
    if migration.version in versions:
        if versions[migration.version] != migration.checksum:
            raise StoreError(
                f"Migration {migration.version:04d}_{migration.name} of schema {schema!r} was applied with other SQL than this version of "
                "dedup has. Install the version of dedup that applied it."
            )
        return False
    connection.execute(filled(migration, schema))
    connection.execute(sql["add_schema_version"], {"version": migration.version, "name": migration.name, "checksum": migration.checksum})
    return True


def migration_sql(schema: str) -> str:
    """Everything `migrate` would run on an empty database, as a script for psql."""
    own = [queries()[name].text.replace("{schema}", quoted(schema)) + ";" for name in ("make_schema", "make_schema_version")]
    parts = ["begin;", *own]
    for migration in migrations():
        values = f"({migration.version}, '{migration.name}', '{migration.checksum}')"
        note = f"insert into {quoted(schema)}.schema_version (version, name, checksum) values {values};"
        parts += [f"-- {migration.version:04d}_{migration.name}", filled(migration, schema).decode(), note]
    return "\n\n".join([*parts, "commit;\n"])


def roles_sql(schema: str) -> str:
    """The roles that consumers and dashboards need, with their rights, as a script for psql."""
    text = files("dedup.sql").joinpath("postgres/roles.sql").read_text(encoding="utf-8")
    # inside a literal the quoted name needs its quotes doubled as well
    return text.replace("'{schema}.checkpoint'", "'" + quoted(schema).replace("'", "''") + ".checkpoint'").replace(
        "{schema}", quoted(schema)
    )


def ensure(connection: Connection, schema: str, *, auto: bool) -> None:
    """Check that the tables are of this version; migrate if `auto` and the role may.

    Raises:
        SchemaOutdated: older or missing, and not to be changed from here: run `dedup migrate`.
        StateTooNew: written by a newer library.
    """
    sql = Statements(schema)
    with translating(f"Looking at schema {schema!r}"):
        _, exists, may_change, may_use = _check_server(connection, sql, schema)
        if not may_use:
            raise StoreError(
                f"This role may not use schema {schema!r}. Run: GRANT USAGE ON SCHEMA {quoted(schema)} TO ...; see docs/how-to/postgres.md."
            )
        versions = _versions(connection, sql) if exists else {}
    _refuse_newer(versions, schema)
    if max(versions, default=0) == latest_version():
        return
    if not (auto and may_change):
        raise SchemaOutdated(
            f"Schema {schema!r} is at version {max(versions, default=0)}, this library needs {latest_version()}. "
            f"Run `dedup migrate` as a role that may change it."
        )
    migrate(connection, schema)


def _check_server(connection: Connection, sql: Statements, schema: str) -> tuple[bool, bool, bool, bool]:
    row = connection.execute(sql["schema_state"], {"schema": schema}).fetchone()
    assert row is not None
    has_schema, has_versions, may_change, may_use, server = row
    if server < OLDEST_SERVER:
        raise ConfigError(f"This server is PostgreSQL {server // 10000}; dedup needs 14 or newer.")
    return has_schema, has_versions, may_change, may_use


def _versions(connection: Connection, sql: Statements) -> dict[int, str]:
    return {version: checksum for version, _, checksum in connection.execute(sql["schema_versions"], {}).fetchall()}


def _refuse_newer(versions: dict[int, str], schema: str) -> None:
    if max(versions, default=0) > latest_version():
        raise StateTooNew(
            f"Schema {schema!r} is at version {max(versions)}, this library knows {latest_version()}. Upgrade this installation of dedup."
        )
