"""`dedup demo`, `migrate` and `publish`: what is run by hand, or once per release."""

from __future__ import annotations

from typing import Annotated

import typer

import dedup
from checkpoint.errors import SchemaOutdated
from dedup.cli.consumers import By, Reason, who
from dedup.cli.show import AsJson
from dedup.core.store import Store
from dedup.urls import StoreUrl, check_consumer, is_postgres, open_store, postgres_schema

ACCEPT_HELP = "Name of a sink that was dropped, re-created or restored on purpose: go on with it as it is now."


def register(app: typer.Typer) -> None:
    """Add the commands of upkeep."""
    app.command(epilog="Example: dedup demo --seed 7")(demo)
    app.command(epilog="Example: dedup migrate --sql > dedup.sql")(migrate)
    app.command(epilog="Example: dedup publish orders --store /lake/dedup")(publish)


def demo(
    store: Annotated[
        str, typer.Option("--store", help="postgresql://... or a folder.  [default: Delta in .demo]", show_default=False)
    ] = "",
    seed: Annotated[int | None, typer.Option(help="Same deliveries and same moments to kill.  [default: another one each time]")] = None,
    events: Annotated[int | None, typer.Option(help="Only the first so many flights.  [default: all]", show_default=False)] = None,
    as_json: AsJson = False,
) -> None:
    """Stream 336,776 flights, kill the process group three times in mid-run, and count what arrived.

    Exits with 1 where anything is lost, doubled or off by one. Starts Spark, so it needs Java and `pip install 'dedup-spark[demo]'`.
    """
    from dedup.demo.main import run

    raise typer.Exit(run(store or None, seed, as_json, events))


def migrate(
    sql: Annotated[
        bool, typer.Option("--sql", help="Print the SQL of PostgreSQL's migrations, to be run by another role; needs no store.")
    ] = False,
    roles: Annotated[
        bool, typer.Option("--roles", help="Print the SQL of PostgreSQL's roles and their rights, for a DBA; needs no store.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would be applied.")] = False,
    store: StoreUrl = "",
) -> None:
    """Bring the state in the store to this version of dedup. Forward only, and safe to repeat.

    Crash: each migration is one transaction that also records it; the next run goes on after the last one applied.
    """
    if sql or roles:
        typer.echo(_migration_sql(store, roles=roles))
        return
    if dry_run:
        _tell_migration(store)
        return
    steps = open_store(store, new=True).migrate()
    for step in steps:
        typer.echo(f"applied {step}")
    if not steps:
        typer.echo("The state is up to date.")


def _tell_migration(store: str) -> None:
    try:
        open_store(store).consumers()
    except SchemaOutdated as outdated:
        typer.echo(f"Would migrate: {outdated}")
    else:
        typer.echo("The state is up to date.")


def _migration_sql(store: str, *, roles: bool) -> str:
    if store and not is_postgres(store):
        raise dedup.ConfigError("A Delta store has no SQL: `dedup migrate` creates its tables.")
    _ = dedup.PostgresStore  # says which extra to install where its driver is missing
    from checkpoint.postgres.sql import migration_sql, roles_sql

    return roles_sql(postgres_schema()) if roles else migration_sql(postgres_schema())


def publish(
    name: Annotated[str, typer.Argument(help="The consumer's name; all of them where none is given.", show_default=False)] = "",
    accept_sink: Annotated[str, typer.Option("--accept-sink", help=ACCEPT_HELP, show_default=False)] = "",
    lost: Annotated[bool, typer.Option("--lost", help="With --accept-sink: give up decided rows whose files are gone.")] = False,
    store: StoreUrl = "",
    yes: Annotated[bool, typer.Option("--yes", help="With --accept-sink: do it. Without this, only show what it would change.")] = False,
    by: By = "",
    reason: Reason = "",
) -> None:
    """Bring decided batches that a sink does not show yet. Idempotent; PostgreSQL never has any.

    Crash: each batch is published by one commit with a transaction id; repeat the command, and it goes on where it stopped.
    """
    opened = open_store(store)
    if name:
        check_consumer(opened, name)
    if accept_sink and not _accept_sink(opened, name, accept_sink, lost, yes, by, reason):
        return
    for consumer in [name] if name else opened.consumers():
        typer.echo(f"{consumer}: {opened.publish(consumer)} batches published")


def _accept_sink(store: Store, name: str, sink: str, lost: bool, yes: bool, by: str, reason: str) -> bool:
    """Take the sink as it is now, where a person says so; whether that was done."""
    accept = getattr(store, "accept_sink", None)
    if accept is None:
        raise dedup.ConfigError("This store has no sinks of its own to accept.")
    if not name:
        raise dedup.ConfigError("--accept-sink needs the consumer's name as well.")
    if not yes:
        what = (
            "rows that are decided and whose files are gone would be given up"
            if lost
            else "decided rows would go to the table that is there now"
        )
        typer.echo(f"{name}: sink {sink}: {what}. Nothing was changed. Repeat the command with --yes to do it.")
        return False
    accept(name, sink, lost=lost, by=who(by), reason=reason)
    return True
