"""`dedup sink`: make committed batches visible in Delta sinks, and accept a sink that was replaced."""

from __future__ import annotations

from typing import Annotated, Any

import typer

import dedup
from dedup.cli.options import AnyName, By, Commands, Name, Reason, Yes, who
from dedup.cli.show import NOTHING_DONE, AsJson, print_json
from dedup.urls import StoreUrl, check_consumer, open_store

commands = Commands(
    help="Sinks: tables that consumers write to.", epilog="Example: dedup sink sync orders --store /lake/dedup", no_args_is_help=True
)


def register(app: typer.Typer) -> None:
    """Add `dedup sink ...`."""
    app.add_typer(commands, name="sink")


@commands.command(epilog="Example: dedup sink sync orders --store /lake/dedup")
def sync(
    name: AnyName = "",
    store: StoreUrl = "",
    as_json: AsJson = False,
) -> None:
    """Make committed batches visible in Delta sinks.

    A consumer does this after each batch. Run the command if the consumer stopped after a commit and before its rows became visible. In
    PostgreSQL a committed batch is always visible. The command is safe to repeat.

    Crash: each batch becomes visible by one commit with a transaction id; repeat the command, and it continues where it stopped.
    """
    opened = open_store(store)
    if name:
        check_consumer(opened, name)
    synced = {consumer: opened.publish(consumer) for consumer in ([name] if name else opened.consumers())}
    if as_json:
        print_json([{"consumer": consumer, "batches": count} for consumer, count in synced.items()])
        return
    for consumer, count in synced.items():
        typer.echo(f"{consumer}: {count} batches made visible")


@commands.command(epilog="Example: dedup sink accept orders shop.orders --reason 'the table was created again' --yes")
def accept(
    name: Name,
    sink: Annotated[str, typer.Argument(help="The sink's name, as the error message shows it.", show_default=False)],
    lost: Annotated[
        bool, typer.Option("--lost", help="Give up committed rows that are not in the sink and whose files are gone. Delta only.")
    ] = False,
    at: Annotated[str, typer.Option("--at", metavar="ADDRESS", help="Where its table was moved to: a path or a URI. Delta only.")] = "",
    store: StoreUrl = "",
    as_json: AsJson = False,
    yes: Yes = False,
    by: By = "",
    reason: Reason = "",
) -> None:
    """Accept a sink that was replaced on purpose.

    The consumer then writes to the table that is there: one that was dropped and created again, restored, or moved.

    Crash: the decision is made whole or not at all; repeat the command to see which.
    """
    opened = open_store(store)
    check_consumer(opened, name)
    take: Any = getattr(opened, "accept_sink", None)
    if take is None:
        raise dedup.ConfigError("This store has no sinks of its own to accept.")
    take(name, sink, at=at or None, lost=lost, by=who(by), reason=reason, dry_run=not yes)
    count = opened.publish(name) if yes and not at else 0  # of a lake that was moved, other sinks have to be accepted first
    if as_json:
        print_json({"consumer": name, "sink": sink, "lost": lost, "batches": count, "done": yes})
        return
    rows = "are given up where their files are gone" if lost else "go to the table that is there"
    typer.echo(f"{name}: committed rows of sink {sink} {rows}.")
    visible = "the next batch makes them visible, or `dedup sink sync`" if at else f"{count} batches made visible"
    typer.echo(f"{name}: done; {visible}" if yes else NOTHING_DONE)
