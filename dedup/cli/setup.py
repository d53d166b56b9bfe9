"""`dedup demo` and `dedup migrate`: what is run by hand, or once per release."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

import dedup
from checkpoint.errors import SchemaOutdated
from dedup.cli.exits import found
from dedup.cli.show import AsJson, print_json
from dedup.core.store import Store
from dedup.urls import SPARK, StoreUrl, is_postgres, open_store, postgres_schema

UP_TO_DATE = "The state is up to date."
NOT_BEGUN = "There is no state yet, and nothing to migrate: a store on Delta begins with the first batch of a consumer."


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command(epilog="Example: dedup demo --seed 7")(demo)
    app.command(epilog="Example: dedup migrate --sql > dedup.sql")(migrate)


def demo(
    store: Annotated[
        str,
        typer.Option("--store", help="postgresql://..., or a folder for Delta tables.  [default: the folder .demo]", show_default=False),
    ] = "",
    seed: Annotated[int | None, typer.Option(help="A number: the same one gives the same deliveries and kills.  [default: random]")] = None,
    events: Annotated[int | None, typer.Option(help="Use only this many flights.  [default: all]", show_default=False)] = None,
    kills: Annotated[int, typer.Option(help="Kill the process so many times.")] = 3,
    as_json: AsJson = False,
) -> None:
    """Run a stream of flights, kill it several times, and count its rows.

    The demo streams 336,776 flights, kills the process on the way, and compares what arrived with what was sent. The exit
    code is 1 if a row is lost, doubled or changed. The demo starts Spark: it needs Java and `pip install 'dedup-spark[demo]'`.

    Crash: the next demo removes what this one left.
    """
    from dedup.demo.main import run

    raise typer.Exit(run(store or None, seed, as_json, events, kills))


def migrate(
    sql: Annotated[bool, typer.Option("--sql", help="Print the SQL of the PostgreSQL migrations, for a DBA. Needs no store.")] = False,
    roles: Annotated[
        bool, typer.Option("--roles", help="Print the SQL of the PostgreSQL roles and their rights, for a DBA. Needs no store.")
    ] = False,
    separate: Annotated[
        bool,
        typer.Option("--separate", help="Print the SQL that keeps a login to the consumers that are assigned to it. Needs no store."),
    ] = False,
    check: Annotated[bool, typer.Option("--check", help="Change nothing; exit with code 1 if the state needs a migration.")] = False,
    store: StoreUrl = "",
    as_json: AsJson = False,
) -> None:
    """Create or upgrade the tables of the state.

    The command brings the state to this version of dedup. It is safe to repeat; there is no way back.

    Crash: each migration is one transaction that also records it; the next run continues after the last one applied.
    """
    if sql or roles or separate:
        text = _sql(store, "separate" if separate else "roles" if roles else "migrations")
        print_json({"sql": text}) if as_json else typer.echo(text)
        return
    opened = open_store(store, new=True)
    _refuse_foreign(store)
    if check:
        _check(opened, store, as_json)
        return
    steps = opened.migrate()
    if as_json:
        print_json({"applied": steps})
        return
    for step in steps:
        typer.echo(f"applied {step}")
    if not steps:
        typer.echo(_nothing_to_apply(opened, store))


def _check(opened: Store, store: str, as_json: bool) -> None:
    try:
        steps = opened.migrate(dry_run=True)
        why = f"{', '.join(steps)} {'is' if len(steps) == 1 else 'are'} not applied. Run `dedup migrate`." if steps else None
    except SchemaOutdated as outdated:
        why = str(outdated)
    if as_json:
        print_json({"up_to_date": why is None, "why": why, "begun": _begun(opened, store)})
    else:
        typer.echo(f"needs a migration: {why}" if why else _nothing_to_apply(opened, store))
    found(wrong=why is not None)


def _nothing_to_apply(opened: Store, store: str) -> str:
    """The sentence for a state that needs nothing. A folder that was mistyped does not look like a state that is up to date."""
    return UP_TO_DATE if _begun(opened, store) else NOT_BEGUN


def _begun(opened: Store, store: str) -> bool:
    """Whether there is a state that can be migrated: PostgreSQL has one before the first consumer, Delta has none."""
    return is_postgres(store) or bool(opened.consumers())


def _refuse_foreign(store: str) -> None:
    """Raise ConfigError for a local path that can never become a store: a mistyped one is not up to date."""
    path = Path(store.removeprefix(SPARK))
    if not is_postgres(store) and (path.is_file() or (path / "_delta_log").is_dir()):
        what = "a file" if path.is_file() else "a Delta table"
        raise dedup.ConfigError(f"{path} is {what}, not the folder of a store. Check --store.")


def _sql(store: str, what: str) -> str:
    if store and not is_postgres(store) and store != os.environ.get("DEDUP_STORE"):
        raise dedup.ConfigError("A Delta store has no SQL: the first batch of each consumer creates its tables.")
    _ = dedup.PostgresStore  # says which extra to install where its driver is missing
    from checkpoint.postgres.sql import migration_sql, roles_sql, separate_sql

    return {"migrations": migration_sql, "roles": roles_sql, "separate": separate_sql}[what](postgres_schema())
