"""The SQL of the store: migrations by number, run-time statements by name, with the schema's quoted name filled in.

Read once per process from the package data `dedup.sql`. Called by everything in this package that speaks SQL.
"""

from __future__ import annotations

import functools
import hashlib
import re
from dataclasses import dataclass
from importlib.resources import files

_HEADER = re.compile(r"^-- name: (\w+)\n((?:--.*\n)+)", re.MULTILINE)


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

    def of(self, name: str, table: str) -> bytes:
        """A statement about one table, whose name is quoted already."""
        return _filled(name, schema=quoted(self.schema), child=table)


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
