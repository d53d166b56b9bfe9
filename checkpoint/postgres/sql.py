"""The SQL of this project: statements by name, with the schema's quoted name filled in, and migrations by number.

Statements are read once per process from the package data `dedup.sql`. Promises that each migration and the note that it was applied are
one transaction, that two migrations at once are safe, and that nothing works on tables of another version. Called by everything that
speaks SQL.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files

from checkpoint.errors import ConfigError, SchemaOutdated, StateTooNew, StoreError
from checkpoint.postgres.connection import Connection, translating

_HEADER = re.compile(r"^-- name: (\w+)\n((?:--.*\n)+)", re.MULTILINE)

OLDEST_SERVER = 140000
"""PostgreSQL 14: the first one with multiranges."""

OLDEST_SCHEMA = 13
"""Where this library may not migrate, it works on tables from this migration on. A statement that needs a later one raises it."""

_COMPATIBLE = re.compile(r"^-- Compatible with libraries from migration (\d+) on\.$", re.MULTILINE)


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

    @property
    def file(self) -> str:
        """Name of the file without its ending."""
        return f"{self.version:04d}_{self.name}"

    @property
    def note(self) -> dict[str, int | str]:
        """What is written when it is applied: the parameters of `add_schema_version`."""
        return {"version": self.version, "name": self.name, "checksum": self.checksum, "compatible_with": self.compatible_with}

    @property
    def compatible_with(self) -> int:
        """Libraries whose last migration is this one, or a later one, work on the tables as they are afterwards.

        By default its own number: it stops older libraries (StateTooNew). One that only adds what they do not need, such as a column with a
        default or a table, says so in a line of its file: `-- Compatible with libraries from migration 8 on.`
        """
        told = _COMPATIBLE.search(self.text)
        return int(told[1]) if told else self.version


@dataclass(frozen=True)
class _Applied:
    checksum: str
    compatible_with: int


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

    def composed(self, name: str, table: str, **parts: str) -> bytes:
        """As `of`, of parts that are other ones each time, and may have parameters: a percent sign in a name is doubled there."""
        return _put(name, {"schema": _doubled(quoted(self.schema)), "child": _doubled(table), **parts})


@functools.cache
def _filled(name: str, **parts: str) -> bytes:
    return _put(name, {key: _doubled(part) for key, part in parts.items()})


def _put(name: str, parts: Mapping[str, str]) -> bytes:
    # In one pass, for a schema may be called {child}.
    return re.sub(rf"\{{({'|'.join(parts)})\}}", lambda found: parts[found[1]], queries()[name].text).encode()


def _doubled(part: str) -> str:
    """A percent sign must not look like a parameter."""
    return part.replace("%", "%%")


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
    sql, done = Statements(schema), []
    with translating(f"Migrating schema {schema!r}"):
        _check_server(connection, sql, schema)
        for migration in migrations():
            with connection.transaction():
                connection.execute(sql["migration_lock"], {"schema": schema})
                _make_schema(connection, sql, schema)
                if migration in _missing(_applied(connection, sql), schema):
                    connection.execute(filled(migration, schema))
                    connection.execute(sql["add_schema_version"], migration.note)
                    done.append(migration.file)
    return done


def missing(connection: Connection, schema: str) -> list[str]:
    """The names of what `migrate` would apply. Reads only."""
    sql = Statements(schema)
    with translating(f"Looking at schema {schema!r}"):
        has_versions = _check_server(connection, sql, schema)[1]
        return [migration.file for migration in _missing(_applied(connection, sql) if has_versions else {}, schema)]


def _make_schema(connection: Connection, sql: Statements, schema: str) -> None:
    has_schema, has_versions, _, _ = _check_server(connection, sql, schema)
    if not has_schema:  # "if not exists" asks for the right to create schemas even where it exists
        connection.execute(sql["make_schema"], {})
    if not has_versions:
        connection.execute(sql["make_schema_version"], {})


def _missing(applied: dict[int, _Applied], schema: str) -> list[Migration]:
    """Those that are not applied. Raises StateTooNew, and StoreError where one was applied with another text."""
    _refuse_newer(applied, schema)
    for migration in migrations():
        if migration.version in applied and applied[migration.version].checksum != migration.checksum:
            raise StoreError(
                f"Migration {migration.file} of schema {schema!r} was applied with other SQL than this version of dedup has. Install the "
                "version of dedup that applied it."
            )
    return [migration for migration in migrations() if migration.version not in applied]


def migration_sql(schema: str) -> str:
    """Everything `migrate` would run on an empty database, as a script for psql."""
    own = [queries()[name].text.replace("{schema}", quoted(schema)) + ";" for name in ("make_schema", "make_schema_version")]
    parts = ["begin;", *own]
    for migration in migrations():
        values = f"({migration.version}, '{migration.name}', '{migration.checksum}', {migration.compatible_with})"
        note = f"insert into {quoted(schema)}.schema_version (version, name, checksum, compatible_with) values {values};"
        parts += [f"-- {migration.file}", filled(migration, schema).decode(), note]
    return "\n\n".join([*parts, "commit;\n"])


def roles_sql(schema: str) -> str:
    """The roles that consumers and dashboards need, with their rights, as a script for psql."""
    return _script("roles", schema)


def separate_sql(schema: str) -> str:
    """What keeps a login to the rows of the consumers that are assigned to it, as a script for psql."""
    return _script("separate", schema)


def _script(name: str, schema: str) -> str:
    text = files("dedup.sql").joinpath(f"postgres/{name}.sql").read_text(encoding="utf-8")
    told = " ".join(quoted(schema).split())  # a comment ends with its line
    text = re.sub("^ *--.*$", lambda comment: comment[0].replace("{schema}", told), text, flags=re.MULTILINE)
    # inside a literal the quoted name needs its quotes doubled as well
    return text.replace("'{schema}.", "'" + quoted(schema).replace("'", "''") + ".").replace("{schema}", quoted(schema))


def ensure(connection: Connection, schema: str, *, auto: bool) -> None:
    """Check that this library works on the tables; migrate if `auto` and the role may.

    Tables of a newer library pass where its migrations say so, and tables of an older one from OLDEST_SCHEMA on: instances of two versions
    run beside each other.

    Raises:
        SchemaOutdated: too old or missing, and not to be changed from here: run `dedup migrate`.
        StateTooNew: written by a newer library, and not for this one.
    """
    sql = Statements(schema)
    with translating(f"Looking at schema {schema!r}"):
        _, exists, may_change, may_use = _check_server(connection, sql, schema)
        if not may_use:
            raise StoreError(
                f"This role may not use schema {schema!r}. Run: GRANT USAGE ON SCHEMA {quoted(schema)} TO ...; see docs/how-to/postgres.md."
            )
        applied = _applied(connection, sql) if exists else {}
    _refuse_newer(applied, schema)
    if (version := max(applied, default=0)) >= latest_version():
        return
    if auto and may_change:
        migrate(connection, schema)
    elif version < OLDEST_SCHEMA:
        raise SchemaOutdated(
            f"Schema {schema!r} is at version {version}, this library needs {OLDEST_SCHEMA}. "
            "Run `dedup migrate` as a role that may change it."
        )


def _check_server(connection: Connection, sql: Statements, schema: str) -> tuple[bool, bool, bool, bool]:
    row = connection.execute(sql["schema_state"], {"schema": schema}).fetchone()
    assert row is not None
    has_schema, has_versions, may_change, may_use, server = row
    if server < OLDEST_SERVER:
        raise ConfigError(f"This server is PostgreSQL {server // 10000}; dedup needs 14 or newer.")
    return has_schema, has_versions, may_change, may_use


def _applied(connection: Connection, sql: Statements) -> dict[int, _Applied]:
    return {version: _Applied(*told) for version, *told in connection.execute(sql["schema_versions"], {}).fetchall()}


def _refuse_newer(applied: dict[int, _Applied], schema: str) -> None:
    needed = max((one.compatible_with for one in applied.values()), default=0)
    if needed > latest_version():
        raise StateTooNew(
            f"Schema {schema!r} is at version {max(applied)}, which needs a library that knows version {needed}; this one knows "
            f"{latest_version()}. Upgrade this installation of dedup."
        )
