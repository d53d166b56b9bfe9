r"""Text in a database whose encoding lacks some characters: each of those is kept as an escape, so that nothing is lost or refused.

Promises that what our own statements write comes back as it was, and can be read in psql: `€` is `\u20ac` in a LATIN1 database. A UTF-8
database is left alone, and so is SQL_ASCII, which keeps the bytes. What a handler writes is left to the server, which refuses it.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import psycopg
import pyarrow as pa
import pyarrow.compute as pc
from psycopg.adapt import AdaptersMap, Buffer
from psycopg.types.json import set_json_dumps, set_json_loads
from psycopg.types.string import StrBinaryDumper, StrDumperUnknown, TextBinaryLoader, TextLoader

from checkpoint.postgres.connection import Connection
from dedup.postgres import wire

_WHOLE = ("UTF8", "SQL_ASCII")

_CODECS = {
    **{f"LATIN{n}": f"iso8859-{part}" for n, part in zip(range(1, 11), (1, 2, 3, 4, 9, 10, 13, 14, 15, 16), strict=True)},
    **{f"ISO_8859_{n}": f"iso8859-{n}" for n in range(5, 9)},
    **{f"WIN{n}": f"cp{n}" for n in (*range(1250, 1259), 866, 874)},
    **{"KOI8R": "koi8-r", "KOI8U": "koi8-u"},
}
"""Encodings of one byte a character: what they hold beside ASCII is kept as it is. Of any other encoding only ASCII is, to be safe.
Source: PostgreSQL 16 manual, "Character Set Support"."""

_ESCAPE = re.compile(r"\\u([0-9a-f]{4})|\\U([0-9a-f]{8})")
_TEXT_TYPES = ("text", "varchar", "bpchar", "name", 705)
"""Names and numbers of types: 705 is unknown, that of a literal."""


@dataclass(frozen=True)
class Charset:
    """What one encoding cannot hold, and what looks like the escape of it."""

    pattern: re.Pattern[str]

    def escape(self, text: str) -> str:
        """The text as it is kept."""
        return self.pattern.sub(_code, text)

    def escaped(self, values: pa.Array) -> pa.Array:
        """A string column as it is kept."""
        if pc.all(pc.string_is_ascii(values)).as_py() is not False and not pc.any(pc.match_substring(values, "\\")).as_py():
            return values
        return pa.array([None if v is None else self.escape(v) for v in values.to_pylist()], values.type)


def _code(found: re.Match[str]) -> str:
    number = ord(found[0])
    return f"\\u{number:04x}" if number <= 0xFFFF else f"\\U{number:08x}"


def unescape(text: str) -> str:
    """The text as it was before `Charset.escape`."""
    return _ESCAPE.sub(lambda found: chr(int(found[1] or found[2], 16)), text)


@functools.cache
def charset(encoding: str) -> Charset | None:
    """That of a database with this encoding, by PostgreSQL's name for it; None where nothing needs an escape."""
    if encoding in _WHOLE:
        return None
    codec = _CODECS.get(encoding)
    held = "" if codec is None else bytes(range(0x80, 0x100)).decode(codec, "ignore")
    kept = "".join(re.escape(char) for char in held if char >= "\xa0")
    return Charset(re.compile(rf"[^\x00-\x7f{kept}]|\\(?=u[0-9a-f]{{4}}|U[0-9a-f]{{8}})"))


def charset_of(connection: Connection) -> Charset | None:
    """That of the database."""
    return charset(connection.info.parameter_status("server_encoding") or "UTF8")


def teach(connection: Connection) -> None:
    """Let our own cursors of this connection escape what they send and undo that in what they read. Those of a handler do not."""
    encoding = connection.info.parameter_status("server_encoding") or "UTF8"
    if encoding != "UTF8":
        connection.cursor_factory = _cursor_class(encoding)


class _Context:
    """What psycopg's functions take in place of a connection."""

    connection = None

    def __init__(self) -> None:
        self.adapters = AdaptersMap(psycopg.adapters)


@functools.cache
def _cursor_class(encoding: str) -> type[psycopg.Cursor[Any]]:
    known, held = _Context(), charset(encoding)
    wire.register(known)
    if held is None:  # the server takes characters in JSON, but not their numbers
        set_json_dumps(functools.partial(json.dumps, ensure_ascii=False), known)
    else:
        _register(known, held)

    class Cursor(psycopg.Cursor[Any]):
        def __init__(self, connection: Connection, **options: Any) -> None:
            super().__init__(connection, **options)
            self._adapters = AdaptersMap(known.adapters)

    return Cursor


def _register(known: Any, held: Charset) -> None:
    class Sent(StrDumperUnknown):
        def dump(self, obj: str) -> Buffer | None:
            return super().dump(held.escape(obj))

    class SentBinary(StrBinaryDumper):
        def dump(self, obj: str) -> Buffer | None:
            return super().dump(held.escape(obj))

    class Read(TextLoader):
        def load(self, data: Buffer) -> bytes | str:
            return unescape(str(super().load(data)))

    class ReadBinary(TextBinaryLoader):
        def load(self, data: Buffer) -> bytes | str:
            return unescape(str(super().load(data)))

    known.adapters.register_dumper(str, SentBinary)
    known.adapters.register_dumper(str, Sent)
    for name in _TEXT_TYPES:
        known.adapters.register_loader(name, ReadBinary)
        known.adapters.register_loader(name, Read)
    set_json_dumps(lambda value: json.dumps(_each(value, held.escape), ensure_ascii=False), known)
    set_json_loads(lambda text: _each(json.loads(text), unescape), known)


def _each(value: Any, change: Callable[[str], str]) -> Any:
    """A JSON value with each of its texts changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {change(str(name)): _each(item, change) for name, item in value.items()}
    return [_each(item, change) for item in value] if isinstance(value, list | tuple) else value
