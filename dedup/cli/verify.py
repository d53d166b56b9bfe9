"""`dedup verify` and `dedup batch list`: what consumers decided, and whether it adds up."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from checkpoint.position import Partition, Ranges
from deadletter.json_rows import json_rows
from dedup.cli.exits import found
from dedup.cli.options import Commands, Name
from dedup.cli.show import AsJson, cell, print_fields, print_json, print_table
from dedup.core.store import Store
from dedup.signals.standing import newest_records
from dedup.urls import StoreUrl, check_consumer, open_store
from dedup.verify import PartitionProof, VerifyReport, load, save, verify

TABLE_LIMIT = 50
"""Batches a table shows where nobody asked for more: one screen."""

SHOWN_RANGES = 5
"""Ranges of one partition that a table shows."""

PROOF_COLUMNS = ["source", "topic", "partition", "checkpoint", "seen", "ranges", "absent", "absent ranges"]

BATCH_COLUMNS = ["seq", "committed_at", "batch_id", "chunk", "partition", "seen", "delivered", "redelivered", "processed", "duplicate"]
BATCH_COLUMNS += ["skipped_rows", "dead_lettered", "late"]


def register(app: typer.Typer) -> None:
    """Add `dedup verify`."""
    app.command("verify", epilog="Example: dedup verify orders --store postgresql://localhost/shop")(verify_consumers)


def register_batch(app: typer.Typer) -> None:
    """Add `dedup batch ...`."""
    commands = Commands(
        help="Batches that consumers have committed.", epilog="Example: dedup batch list orders --store /lake/dedup", no_args_is_help=True
    )
    commands.command("list", epilog="Example: dedup batch list orders --limit 10 --store /lake/dedup")(batches)
    app.add_typer(commands, name="batch")


def batches(
    name: Name,
    limit: Annotated[
        int | None, typer.Option(min=0, help="Show only this many of the newest; 0: all.  [default: 50 in a table, all with --json]")
    ] = None,
    store: StoreUrl = "",
    as_json: AsJson = False,
) -> None:
    """List committed batches by partition.

    Each row names the positions that a batch has seen in one partition, and counts the results of their rows: delivered is the sum of
    redelivered, processed, duplicate, skipped rows and dead lettered. `late` names positions at or below the checkpoint that no batch had
    seen before; they are handled like any other.
    """
    opened = open_store(store)
    check_consumer(opened, name)
    wanted = (0 if as_json else TABLE_LIMIT) if limit is None else limit
    found = newest_records(opened, opened.head(name), wanted + 1, wanted) if wanted else opened.batches(name)
    newest = found.slice(max(0, found.num_rows - wanted)) if wanted else found
    if as_json:
        print_json(json_rows(newest))
        return
    if newest.num_rows < found.num_rows:
        typer.echo(f"These are the newest {newest.num_rows}; --limit shows more.")
    rows = [{**row, "partition": str(Partition(row["source"], row["topic"], row["partition"]))} for row in newest.to_pylist()]
    print_table(BATCH_COLUMNS, [[row[c] for c in BATCH_COLUMNS] for row in rows], empty="no batches yet")


def verify_consumers(
    names: Annotated[
        list[str] | None, typer.Argument(help="Names of consumers. Without them: all consumers of the store.", show_default=False)
    ] = None,
    kept: Annotated[
        str, typer.Option("--proof", show_default=False, help="Keep what is proven in this file, and read only what was committed since.")
    ] = "",
    full: Annotated[bool, typer.Option("--full", help="With --proof: check everything once more.")] = False,
    store: StoreUrl = "",
    as_json: AsJson = False,
) -> None:
    """Check that each position has exactly one outcome.

    The command reads our own records, up to the checkpoints. The exit code is 1 if records contradict each other; the output names the
    positions and what to do. The command cannot see that a handler forgot to write a row.
    """
    if full and not kept:
        raise typer.BadParameter("--full needs --proof: without it everything is checked.")
    opened = open_store(store)
    known = load(Path(kept)) if kept else {}
    reports = [verify(opened, name, None if full else known.get(name)) for name in _names(opened, names or [])]
    if kept:
        save(Path(kept), {**known, **{r.consumer: r.proof for r in reports if r.proof}})
    if as_json:
        print_json([_report_json(report) for report in reports])
    else:
        for report in reports:
            _print_report(report)
        if not reports:
            typer.echo("no consumers yet")
    found(not all(report.ok for report in reports))


def _names(store: Store, wanted: list[str]) -> list[str]:
    for name in wanted:
        check_consumer(store, name)
    return wanted or store.consumers()


def _report_json(report: VerifyReport) -> dict[str, Any]:
    return {
        "consumer": report.consumer,
        "ok": report.ok,
        "contradictions": report.contradictions,
        "notes": report.notes,
        "counts": report.counts,
        "since": report.since,
        "partitions": [_proof_json(proof) for proof in report.partitions],
    }


def _proof_json(proof: PartitionProof) -> dict[str, Any]:
    return {
        **proof.partition._asdict(),
        "incarnation": proof.incarnation,
        "checkpoint": proof.checkpoint,
        "seen": [r._asdict() for r in proof.seen.items],
        "seen_count": len(proof.seen),
        "absent": [r._asdict() for r in proof.absent.items],
        "absent_count": len(proof.absent),
    }


def _print_report(report: VerifyReport) -> None:
    rows = [[*p.partition, p.checkpoint, len(p.seen), _few(p.seen), len(p.absent), _few(p.absent)] for p in report.partitions]
    print_table(PROOF_COLUMNS, rows, title=report.consumer, empty=f"{report.consumer}: no positions")
    print_fields(report.counts.items(), title=f"rows of {report.consumer}")
    for note in report.notes:
        typer.echo(f"note: {cell(note)}")
    for contradiction in report.contradictions:
        typer.echo(f"CONTRADICTION: {cell(contradiction)}")
    typer.echo("everything is accounted for" if report.ok else f"contradictions: {len(report.contradictions)}")


def _few(ranges: Ranges) -> str:
    """The ranges as a table shows them; a log with transaction markers has one gap per transaction."""
    if len(ranges.items) <= SHOWN_RANGES:
        return str(ranges).strip("[]")
    return f"{str(Ranges.of(ranges.items[:SHOWN_RANGES])).strip('[]')} and {len(ranges.items) - SHOWN_RANGES} more (--json)"
