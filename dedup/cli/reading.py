"""`dedup checkpoints`, `batches` and `verify`: where consumers stand, what they decided, and whether it adds up."""

from __future__ import annotations

from typing import Annotated, Any

import pyarrow as pa
import typer

from dedup.cli.consumers import CHECKPOINTS, Name, checkpoint_rows
from dedup.cli.show import AsJson, json_rows, print_json, print_table
from dedup.cli.stores import StoreUrl, check_consumer, open_store
from dedup.store import Store

TABLE_LIMIT = 50
"""Batches a table shows where nobody asked for more: one screen."""

BATCH_COLUMNS = ["seq", "committed_at", "batch_id", "chunk", "topic", "partition", "seen", "delivered", "redelivered", "processed"]
BATCH_COLUMNS += ["duplicate", "skipped_rows", "dead_lettered", "late"]


def register(app: typer.Typer) -> None:
    """Add the reading commands."""
    app.command(epilog="Example: dedup checkpoints orders --store postgresql://localhost/shop --json")(checkpoints)
    app.command(epilog="Example: dedup batches orders --limit 10 --store /lake/dedup")(batches)
    app.command(epilog="Example: dedup verify orders --store postgresql://localhost/shop")(verify)


def checkpoints(name: Annotated[str, typer.Argument(show_default=False)] = "", store: StoreUrl = "", as_json: AsJson = False) -> None:
    """How far each partition is decided, of one consumer or of all."""
    opened = open_store(store)
    rows = [{"consumer": n, **row} for n in _names(opened, [name] if name else []) for row in checkpoint_rows(opened.head(n))]
    if as_json:
        print_json(rows)
        return
    print_table(["consumer", *CHECKPOINTS], [list(row.values()) for row in rows], empty="no checkpoints yet")


def batches(
    name: Name,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the newest so many.  [default: 50 in a table, all with --json]")] = None,
    store: StoreUrl = "",
    as_json: AsJson = False,
) -> None:
    """What each batch decided, partition by partition: positions seen, and what became of the rows."""
    opened = open_store(store)
    check_consumer(opened, name)
    table: pa.Table = opened.batches(name)
    wanted = limit or (table.num_rows if as_json else TABLE_LIMIT)
    newest = table.slice(max(0, table.num_rows - wanted))
    if as_json:
        print_json(json_rows(newest))
        return
    if newest.num_rows < table.num_rows:
        typer.echo(f"the newest {newest.num_rows} of {table.num_rows}; --limit shows more")
    print_table(BATCH_COLUMNS, [[row[c] for c in BATCH_COLUMNS] for row in newest.to_pylist()], empty="no batches yet")


def verify(
    names: Annotated[list[str] | None, typer.Argument(help="Consumers; all of them where none is named.", show_default=False)] = None,
    store: StoreUrl = "",
    as_json: AsJson = False,
) -> None:
    """Prove from the tables that every position up to the checkpoints is accounted for once.

    Exits with 1 where something contradicts, and names the ranges. It cannot see whether a handler forgot to write a row.
    """
    from dedup.verify import verify as prove

    opened = open_store(store)
    reports = {name: prove(opened, name) for name in _names(opened, names or [])}
    if as_json:
        print_json([_report_json(name, report) for name, report in reports.items()])
    else:
        for name, report in reports.items():
            _print_report(name, report)
        if not reports:
            typer.echo("no consumers yet")
    if not all(report.ok for report in reports.values()):
        raise typer.Exit(1)


def _names(store: Store, wanted: list[str]) -> list[str]:
    for name in wanted:
        check_consumer(store, name)
    return wanted or store.consumers()


def _report_json(name: str, report: Any) -> dict[str, Any]:
    return {
        "consumer": name,
        "ok": report.ok,
        "contradictions": report.contradictions,
        "notes": report.notes,
        "partitions": [{key: _textual(value) for key, value in row.items()} for row in report.partitions],
    }


def _textual(value: Any) -> Any:
    return value if isinstance(value, (bool, int, float, str, list, dict, type(None))) else str(value)


def _print_report(name: str, report: Any) -> None:
    if report.partitions:
        columns = list(report.partitions[0])
        print_table(columns, [[row.get(c) for c in columns] for row in report.partitions], title=name)
    for note in report.notes:
        typer.echo(f"{name}: note: {note}")
    for contradiction in report.contradictions:
        typer.echo(f"{name}: CONTRADICTION: {contradiction}")
    typer.echo(f"{name}: {'everything is accounted for' if report.ok else f'{len(report.contradictions)} contradictions'}")
