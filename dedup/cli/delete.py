"""`dedup consumer delete`: remove what is kept of a consumer that nobody uses any more. A shell around `delete_consumer` of the store."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from checkpoint.errors import Refused
from dedup.cli.options import By, Name, Reason, Yes, who
from dedup.cli.show import NOTHING_DONE, AsJson, print_json, print_table
from dedup.core.deletion import Allowed, Deletion, refusal
from dedup.urls import StoreUrl, check_consumer, open_store

COLUMNS = ("what", "count")


def register(commands: typer.Typer) -> None:
    """Add `dedup consumer delete`."""
    commands.command(epilog="Example: dedup consumer delete orders --reason 'replaced by orders-2' --yes")(delete)


def delete(
    name: Name,
    although_running: Annotated[
        bool, typer.Option("--although-running", help="Also if an instance runs, or may run. It cannot commit from then on.")
    ] = False,
    although_waiting: Annotated[
        bool,
        typer.Option(
            "--although-waiting",
            help="Also with dead letters that are open or blocked, messages that are not sent, or rows that a sink does not show yet.",
        ),
    ] = False,
    store: StoreUrl = "",
    as_json: AsJson = False,
    yes: Yes = False,
    by: By = "",
    reason: Reason = "",
) -> None:
    """Delete everything that is kept of a consumer.

    Checkpoints, batch records, dead letters with their history, and messages go. Rows of sinks stay. On PostgreSQL the reservations stay
    until they are purged; they count for nobody. A consumer that gets the same name later begins as a new one: events that it reads again
    have their effect again. An old instance that comes back ends with an error, and commits nothing.

    Crash: nothing has changed, or the consumer cannot be used any more and a part of it is left: run the command again.
    """
    opened = open_store(store)
    check_consumer(opened, name)
    allowed = Allowed(although_running, although_waiting)
    done = opened.delete_consumer(
        name, although_running=although_running, although_waiting=although_waiting, dry_run=not yes, by=who(by), reason=reason
    )
    _show(done, as_json)
    if done.dry_run and (why := refusal(done, allowed)):
        raise Refused(why)


def _show(done: Deletion, as_json: bool) -> None:
    if as_json:
        document = asdict(done)
        print_json({**document, "done": not document.pop("dry_run")})
        return
    if done.under_way:
        typer.echo(f"{done.consumer}: an earlier call has decided this; what it left goes now.")
    else:
        print_table(COLUMNS, list(done.parts.items()))
    typer.echo(NOTHING_DONE if done.dry_run else f"{done.consumer}: deleted.")
