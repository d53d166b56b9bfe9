"""How answers look: rich tables for people, one JSON document for programs.

JSON is as deadletter/json_rows.py makes it.
"""

from __future__ import annotations

import datetime as dt
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from checkpoint.position import Ranges
from deadletter.json_rows import iso

AsJson = Annotated[bool, typer.Option("--json", help="One JSON document instead of a table.")]


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


def _plain(value: Any) -> Any:
    if isinstance(value, dt.datetime):
        return iso(value)
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"cannot show {type(value).__name__} as JSON")
