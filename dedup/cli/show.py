"""How answers look: tables for people, one JSON document for programs.

Into a pipe a table has one line per row, whole cells and no control codes, however wide it becomes. In a terminal that is too narrow for
a table each row becomes a block of lines. JSON is as deadletter/json_rows.py makes it.
"""

from __future__ import annotations

import datetime as dt
import json
import shutil
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Annotated, Any, NamedTuple, TextIO

import typer
from rich.cells import cell_len

from checkpoint.position import Ranges
from deadletter.json_rows import iso

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of a table.")]

NOTHING_DONE = "Nothing was changed. Repeat the command with --yes to do it."

CHANGES = ["what", "now", "then"]
"""Columns of what a person's decision changes: each row is a part of the state, or of a letter."""

GAP = "  "
"""Between two columns."""

NARROWEST = 20
"""Columns that a value gets beside its name, however narrow the terminal is."""

RULE = 40
"""Columns of the line above a block."""

Pairs = Iterable[tuple[str, Any]]


def is_terminal(stream: TextIO | None) -> bool:
    """Whether a person looks at it; None is a stream that was closed before the command began, as daemons do."""
    return stream is not None and stream.isatty()


def width() -> int | None:
    """Columns of the terminal; None in a pipe or a file, where a line may be as long as it is."""
    return shutil.get_terminal_size().columns if is_terminal(sys.stdout) else None


def print_json(value: Any) -> None:
    """One document on standard output."""
    typer.echo(json.dumps(value, indent=2, default=_plain))


def print_table(columns: Sequence[str], rows: Iterable[Sequence[Any]], *, title: str | None = None, empty: str = "nothing") -> None:
    """A table that cuts nothing off, or the word `empty` where there are no rows.

    Args:
        columns: their names, as in the JSON document; none is empty.
    """
    values = [list(row) for row in rows]
    if not values:
        typer.echo(f"{title}: {empty}" if title else empty)
        return
    if title:
        typer.echo(f"\n{title}")
    table = [_Column.of(name, cells) for name, cells in zip(columns, zip(*values, strict=True), strict=True)]
    room = width()
    if room is not None and _wide(table) > room:
        table = _narrowed([column for column in table if any(column.texts)], room)
    if room is not None and _wide(table) > room:
        _print_blocks(table, room)
        return
    for row in zip(*((column.name, "─" * column.wide, *column.texts) for column in table), strict=True):
        for parts in zip_longest(*(text.split("\n") for text in row), fillvalue=""):
            typer.echo(GAP.join(column.padded(part) for column, part in zip(table, parts, strict=True)).rstrip())


class _Column(NamedTuple):
    """A column of a table, as text."""

    name: str
    texts: list[str]
    right: bool
    wide: int

    @classmethod
    def of(cls, name: str, cells: Sequence[Any]) -> _Column:
        """The column of these values."""
        shown, texts = name.replace("_", " "), [_line(value) for value in cells]
        right = all(value is None or (isinstance(value, (int, float)) and not isinstance(value, bool)) for value in cells)
        return cls(shown, texts, right, max(map(cell_len, [shown, *texts])))

    def padded(self, text: str) -> str:
        """As wide as the column."""
        blank = " " * (self.wide - cell_len(text))
        return blank + text if self.right else text + blank

    def narrowed(self, wide: int) -> _Column:
        """With values that are broken into lines of at most this width."""
        broken = ["\n".join(textwrap.wrap(text, wide, break_on_hyphens=False)) for text in self.texts]
        return self._replace(texts=broken, wide=wide)


def _narrowed(table: list[_Column], room: int) -> list[_Column]:
    """The widest column narrowed, where that is enough; the table fits then."""
    widest = max(table, key=lambda column: column.wide)
    left = room - (_wide(table) - widest.wide)
    if left < max(NARROWEST, cell_len(widest.name)) or widest.wide <= left:
        return table
    return [column.narrowed(left) if column is widest else column for column in table]


def _wide(table: Sequence[_Column]) -> int:
    return sum(column.wide for column in table) + len(GAP) * (len(table) - 1)


def _print_blocks(table: Sequence[_Column], room: int) -> None:
    names, rows = [column.name for column in table], list(zip(*(column.texts for column in table), strict=True))
    for number, row in enumerate(rows, 1):
        typer.echo(f"── {number} of {len(rows)} ".ljust(min(room, RULE), "─"))
        _print_pairs([(name, text) for name, text in zip(names, row, strict=True) if text], room)


def print_fields(pairs: Pairs, *, title: str | None = None) -> None:
    """One line for each name and value; in a terminal long values are broken into lines below each other."""
    print_named([(name.replace("_", " "), value) for name, value in pairs], title=title)


def print_named(pairs: Pairs, *, title: str | None) -> None:
    """The same, where somebody else chose the names."""
    if title:
        typer.echo(f"\n{title}")
    _print_pairs([(_line(name), _line(value)) for name, value in pairs], width())


def _print_pairs(pairs: Sequence[tuple[str, str]], room: int | None) -> None:
    margin = max((cell_len(name) for name, _ in pairs), default=0) + len(GAP)
    for name, text in pairs:
        first = name + " " * (margin - cell_len(name))
        broken = textwrap.wrap(text, max(NARROWEST, room - margin), break_on_hyphens=False) if room else [text]
        typer.echo((first + f"\n{' ' * margin}".join(broken)).rstrip())


def _line(value: Any) -> str:
    """A value on one line."""
    return cell(value).replace("\n", "\\n")


def cell(value: Any) -> str:
    """One value as people read it; control characters are shown, not sent to the terminal."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
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
