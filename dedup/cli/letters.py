"""`dedup dead-letters list`, `groups` and `show`: what could not be processed, and why."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from dedup.cli import letter_changes, letter_files
from dedup.cli.filters import selecting
from dedup.cli.show import AsJson, cell, print_json, print_table
from dedup.cli.stores import StoreUrl, open_store
from dedup.deadletters import DeadLetters, Letter
from dedup.json_rows import json_rows
from dedup.store import Selection

COLUMNS = ["id", "consumer", "position", "kind", "status", "reason", "attempts", "duplicates", "last_failed_at"]

PLACE = ["source", "topic", "partition", "sequence_number", "part"]

HISTORY_COLUMNS = ["at", "action", "by", "reason", "error_type", "error_message"]

SHOWN_BYTES = 2000
"""Bytes of a body that `show` prints; --json has all of it."""

commands = typer.Typer(help="Events that could not be processed.", no_args_is_help=True)


def register(app: typer.Typer) -> None:
    """Add `dedup dead-letters ...`."""
    letter_changes.register(commands)
    letter_files.register(commands)
    app.add_typer(commands, name="dead-letters")


@commands.command("list", epilog="Example: dedup dead-letters list --consumer orders --kind REJECTED --status OPEN --limit 20")
@selecting(limit=100)
def list_(selection: Selection, store: StoreUrl = "", as_json: AsJson = False) -> None:
    """Dead letters in position order; all filters that are given must match."""
    letters = DeadLetters(open_store(store))
    if as_json:
        print_json(json_rows(letters.select(selection)))
        return
    found = letters.select(selection, [*(c for c in COLUMNS if c != "position"), *PLACE]).to_pylist()
    rows = [{**row, "id": row["id"][:12], "position": _position(row)} for row in found]
    print_table(COLUMNS, [[row[c] for c in COLUMNS] for row in rows], empty="no dead letters match")
    _tell_of_more(selection, len(rows))


def _tell_of_more(selection: Selection, shown: int) -> None:
    if selection.limit and shown == selection.limit:
        typer.echo(f"the first {selection.limit}; --limit 0 shows all")


@commands.command(epilog="Example: dedup dead-letters groups --consumer orders --status OPEN")
@selecting(limit=100)
def groups(selection: Selection, store: StoreUrl = "", as_json: AsJson = False) -> None:
    """The same error at the same place is one group: how many, since when, and an example. The largest first."""
    found = DeadLetters(open_store(store)).groups(selection)
    if as_json:
        print_json(json_rows(found))
        return
    rows = [{**row, "example": row["example"][:12]} for row in found.to_pylist()]
    print_table(found.column_names, [list(row.values()) for row in rows], empty="no dead letters match")
    _tell_of_more(selection, len(rows))


@commands.command(epilog="Example: dedup dead-letters show 3f9a12bc --store /lake/dedup")
def show(
    id: Annotated[str, typer.Argument(help="The letter's id, or the first digits of it.", show_default=False)],
    store: StoreUrl = "",
    as_json: AsJson = False,
) -> None:
    """One dead letter with its body, error, stack and history. What is no text is shown in hex."""
    letter = DeadLetters(open_store(store)).show(id)
    if as_json:
        print_json({**json_rows(letter.table)[0], "history": json_rows(letter.history)})
        return
    row = dict(letter.row)
    properties, stack = row.pop("properties"), row.pop("stack")
    hidden = ("body", "extras")
    fields = {k: v.hex() if isinstance(v, bytes) else v for k, v in row.items() if v is not None and k not in hidden}
    print_table(["", "dead letter"], list(fields.items()))
    print_table(["property", "value"], [(p["key"], _text(p["value"])) for p in properties or []], empty="no properties")
    past = letter.history.to_pylist()
    print_table(HISTORY_COLUMNS, [[entry[c] for c in HISTORY_COLUMNS] for entry in past], title="history", empty="never tried: it waits")
    if stack:
        typer.echo("\n".join(map(cell, stack.splitlines())))
    _print_body(letter)


def _print_body(letter: Letter) -> None:
    row = letter.row
    typer.echo(f"body ({row['body_size']} bytes):" if row["body"] is not None else "body: null")
    if letter.json is not None and len(row["body"]) <= SHOWN_BYTES:
        typer.echo(cell(json.dumps(letter.json, indent=2, ensure_ascii=False)))
    else:
        typer.echo(cell(_text(row["body"])))


def _position(row: dict[str, Any]) -> str:
    part = f".{row['part']}" if row["part"] else ""
    return f"{row['source']}/{row['topic']}/{row['partition']}:{row['sequence_number']}{part}"


def _text(value: bytes | None) -> str:
    """Bytes as text where they are, else as hex; cut to SHOWN_BYTES."""
    if value is None:
        return ""
    start = value[:SHOWN_BYTES]
    try:
        text = start.decode("utf-8")
    except UnicodeDecodeError:
        text = start.hex(" ")
    return text + (f" ... ({len(value) - SHOWN_BYTES} bytes more; --json shows all)" if len(value) > SHOWN_BYTES else "")
