"""How answers look: rich tables for people, one JSON document for programs.

JSON: times are ISO 8601 in UTC; bytes are base64 or hex, and the name says which (`body_base64`, `key_hex`).
"""

from __future__ import annotations

import base64
import datetime as dt
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any

import pyarrow as pa
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from checkpoint.position import Ranges

AsJson = Annotated[bool, typer.Option("--json", help="One JSON document instead of a table.")]

HEX = frozenset({"key", "body_sha256"})
"""Byte columns that are hashes; all others may hold anything and are base64."""


def console() -> Console:
    """Where tables go: as wide as the terminal, and as wide as they like into a pipe."""
    return Console(file=sys.stdout, highlight=False, width=None if sys.stdout.isatty() else 200)


def print_json(value: Any) -> None:
    """One document on standard output."""
    typer.echo(json.dumps(value, indent=2, default=_plain))


def print_table(columns: Sequence[str], rows: Iterable[Sequence[Any]], *, title: str | None = None, empty: str = "nothing") -> None:
    """A table that cuts nothing off, or the word `empty` where there are no rows."""
    values = [list(row) for row in rows]
    if not values:
        typer.echo(empty)
        return
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for column, cells in zip(columns, zip(*values, strict=True), strict=True):
        numeric = all(value is None or isinstance(value, int) for value in cells)
        table.add_column(column, overflow="fold", justify="right" if numeric else "left")
    for row in values:
        table.add_row(*(Text(cell(value)) for value in row))
    console().print(table)


def cell(value: Any) -> str:
    """One value as people read it; control characters are shown, not sent to the terminal."""
    if value is None:
        return ""
    if isinstance(value, dt.datetime):
        return iso(value)[:19].replace("T", " ") + "Z"
    if isinstance(value, Mapping):
        return ", ".join(f"{k}={cell(v)}" for k, v in value.items())
    if isinstance(value, list) and value and isinstance(value[0], Mapping) and {"first", "last"} <= value[0].keys():
        return str(Ranges.of((r["first"], r["last"]) for r in value)).strip("[]")
    if isinstance(value, (list, tuple)):
        return ", ".join(map(cell, value))
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in str(value))


def iso(value: dt.datetime) -> str:
    """ISO 8601 in UTC; a naive time is taken as UTC."""
    aware = value if value.tzinfo else value.replace(tzinfo=dt.UTC)
    return aware.astimezone(dt.UTC).isoformat()


def json_rows(table: pa.Table) -> list[dict[str, Any]]:
    """Rows as JSON can hold them. The names follow from the column types, so that null bytes have the same name as others."""
    schema = table.schema
    return [{_name(f): _value(f.type, f.name, row[f.name]) for f in schema} for row in table.to_pylist()]


def _name(field: pa.Field) -> str:
    if not _is_bytes(field.type):
        return str(field.name)
    return f"{field.name}_{'hex' if field.name in HEX else 'base64'}"


def _value(kind: pa.DataType, name: str, value: Any) -> Any:
    if value is None:
        return None
    if _is_bytes(kind):
        return value.hex() if name in HEX else base64.b64encode(value).decode("ascii")
    if pa.types.is_struct(kind):
        # a header's name is its `key`: text; only its value is bytes
        return {_name(f): _value(f.type, f.name, value[f.name]) for f in kind}
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return [_value(kind.value_type, name, v) for v in value]
    return value


def _is_bytes(kind: pa.DataType) -> bool:
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind))


def _plain(value: Any) -> Any:
    if isinstance(value, dt.datetime):
        return iso(value)
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"cannot show {type(value).__name__} as JSON")
