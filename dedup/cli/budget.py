"""`dedup budget`: how near a consumer is to the limits of each kind of dead letter, and admitting a known flood of one kind."""

from __future__ import annotations

from bisect import bisect_right
from typing import Annotated, Any

import typer

from checkpoint.errors import ConfigError
from deadletter.budget import WATCHED, Spent
from dedup import amendments
from dedup.cli.consumers import By, Name, Reason, Yes, amend
from dedup.cli.show import AsJson, print_json, print_table
from dedup.cli.stores import StoreUrl, check_consumer, open_store

WINDOWS = (100, 1_000)
"""Events over which failures are shown; the limits themselves are the consumer's own (`budget=`)."""

commands = typer.Typer(help="How many events may fail before that counts as an outage.", no_args_is_help=True)


def register(app: typer.Typer) -> None:
    """Add `dedup budget ...`."""
    app.add_typer(commands, name="budget")


@commands.command(epilog="Example: dedup budget show orders --store /lake/dedup")
def show(name: Name, store: StoreUrl = "", as_json: AsJson = False) -> None:
    """How many of the last events failed, by kind of dead letter, and whether a flood is admitted."""
    opened = open_store(store)
    check_consumer(opened, name)
    head = opened.head(name)
    kinds = {kind.value: _kind_json(head.spent.get(kind, Spent())) for kind in WATCHED}
    if as_json:
        print_json({"consumer": name, "kinds": kinds})
        return
    columns = [name, *(key.replace("_", " ") for key in _kind_json(Spent()))]
    print_table(columns, [(kind, *shown.values()) for kind, shown in kinds.items()])


@commands.command(
    epilog="Example: dedup budget lift orders --kind UNDECODABLE --events 5000 --reason 'old app sends XML, fix is on its way' --yes"
)
def lift(
    name: Name,
    kind: Annotated[str, typer.Option("--kind", help=f"Of the dead letters: {', '.join(WATCHED)}.", show_default=False)],
    events: Annotated[int, typer.Option("--events", min=1, help="So many of the next events may fail.", show_default=False)],
    store: StoreUrl = "",
    yes: Yes = False,
    by: By = "",
    reason: Reason = "",
) -> None:
    """Admit a known flood: of the next events all may become dead letters of this kind, and none of them counts.

    A batch that waits because it is over its budget goes on by itself.
    """
    known = {one.value: one for one in WATCHED}
    if kind.upper() not in known:
        raise ConfigError(f"--kind {kind}: {', '.join(known)} have a budget.")
    amend(open_store(store), name, lambda head: amendments.lift_budget(head, events, known[kind.upper()]), yes, by, reason)


def _kind_json(spent: Spent) -> dict[str, Any]:
    failed = {f"failed_of_the_last_{window}": _failed(spent, window) for window in WINDOWS}
    return {"decided_events": spent.decided, **failed, "admitted_from_now_on": max(0, spent.lifted - spent.decided)}


def _failed(spent: Spent, window: int) -> int:
    """Failures that count among the last so many events."""
    return len(spent.failures) - bisect_right(spent.failures, max(spent.decided - window, spent.lifted))
