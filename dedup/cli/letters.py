"""`dedup dead-letters`: what could not be processed, and why."""

from __future__ import annotations

from typing import Annotated, Any

import typer

import dedup
from deadletter import Kind, Status
from dedup.cli.show import AsJson, cell, print_json, print_table
from dedup.cli.stores import StoreUrl, open_store
from dedup.json_rows import json_rows
from dedup.store import Selection

COLUMNS = ["id", "consumer", "position", "kind", "status", "reason", "attempts", "duplicates", "last_failed_at"]

SHOWN_BYTES = 2000
"""Bytes of a body that `show` prints; --json has all of it."""

commands = typer.Typer(help="Events that could not be processed.", no_args_is_help=True)


def register(app: typer.Typer) -> None:
    """Add `dedup dead-letters ...`."""
    app.add_typer(commands, name="dead-letters")


@commands.command("list", epilog="Example: dedup dead-letters list --consumer orders --kind REJECTED --status OPEN --limit 20")
def list_(
    consumer: Annotated[str | None, typer.Option(help="Of this consumer.")] = None,
    source: Annotated[str | None, typer.Option(help="From this source.")] = None,
    topic: Annotated[str | None, typer.Option(help="Of this topic.")] = None,
    partition: Annotated[int | None, typer.Option(help="Of this partition.")] = None,
    first: Annotated[int | None, typer.Option(help="From this sequence number on.")] = None,
    last: Annotated[int | None, typer.Option(help="Up to this sequence number, included.")] = None,
    kind: Annotated[Kind | None, typer.Option(case_sensitive=False, help="Of this kind.")] = None,
    status: Annotated[Status | None, typer.Option(case_sensitive=False, help="In this status.")] = None,
    fingerprint: Annotated[str | None, typer.Option(help="With this fingerprint: the same error at the same place.")] = None,
    limit: Annotated[int, typer.Option(min=0, help="At most so many; 0 for all.")] = 100,
    store: StoreUrl = "",
    as_json: AsJson = False,
) -> None:
    """Dead letters in position order; all filters that are given must match."""
    kind_name, status_name = kind.value if kind else None, status.value if status else None
    selection = Selection(consumer, source, topic, partition, first, last, kind_name, status_name, fingerprint, None, limit or None)
    letters = open_store(store).letters(selection)
    if as_json:
        print_json(json_rows(letters))
        return
    rows = [{**row, "id": row["id"][:12], "position": _position(row)} for row in letters.to_pylist()]
    print_table(COLUMNS, [[row[c] for c in COLUMNS] for row in rows], empty="no dead letters match")
    if limit and len(rows) == limit:
        typer.echo(f"the first {limit}; --limit 0 shows all")


@commands.command(epilog="Example: dedup dead-letters show 3f9a12bc --store /lake/dedup")
def show(
    id: Annotated[str, typer.Argument(help="The letter's id, or the first digits of it.", show_default=False)],
    store: StoreUrl = "",
    as_json: AsJson = False,
) -> None:
    """One dead letter with its body, error and history."""
    found = open_store(store).letters(Selection(id=id, limit=2))
    if found.num_rows != 1:
        many = "more than one dead letter begins" if found.num_rows else "no dead letter begins"
        raise dedup.ConfigError(f"{many} with {id!r}. `dedup dead-letters list` shows ids.")
    if as_json:
        print_json(json_rows(found)[0])
        return
    row = found.to_pylist()[0]
    body, properties = row.pop("body"), row.pop("properties")
    fields = {k: v.hex() if isinstance(v, bytes) else v for k, v in row.items() if v is not None and k != "stack"}
    print_table(["", "dead letter"], list(fields.items()))
    print_table(["property", "value"], [(p["key"], _text(p["value"])) for p in properties or []], empty="no properties")
    if row["stack"]:
        typer.echo("\n".join(map(cell, row["stack"].splitlines())))
    typer.echo(f"body ({row['body_size']} bytes):" if body is not None else "body: null")
    typer.echo(cell(_text(body)))


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
