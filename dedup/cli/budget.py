"""`dedup budget`: how near a consumer is to the limit of failures, and admitting a known flood of them."""

from __future__ import annotations

from bisect import bisect_right
from typing import Annotated, Any

import typer

from dedup import amendments
from dedup.cli.consumers import By, Name, Reason, Yes, amend
from dedup.cli.show import AsJson, print_json, print_table
from dedup.cli.stores import StoreUrl, check_consumer, open_store
from dedup.store import Head

WINDOWS = (100, 1_000)
"""Events over which failures are shown; the limits themselves are the consumer's own (`budget=`)."""

commands = typer.Typer(help="How many events may fail before that counts as an outage.", no_args_is_help=True)


def register(app: typer.Typer) -> None:
    """Add `dedup budget ...`."""
    app.add_typer(commands, name="budget")


@commands.command(epilog="Example: dedup budget show orders --store /lake/dedup")
def show(name: Name, store: StoreUrl = "", as_json: AsJson = False) -> None:
    """How many of the last events failed, and whether a flood is admitted."""
    opened = open_store(store)
    check_consumer(opened, name)
    document = _budget_json(opened.head(name))
    if as_json:
        print_json(document)
        return
    print_table(["", name], [(key.replace("_", " "), value) for key, value in document.items()])


@commands.command(epilog="Example: dedup budget lift orders --events 5000 --reason 'old app sends no prices, fix is on its way' --yes")
def lift(
    name: Name,
    events: Annotated[int, typer.Option("--events", min=1, help="So many of the next events may fail.", show_default=False)],
    store: StoreUrl = "",
    yes: Yes = False,
    by: By = "",
    reason: Reason = "",
) -> None:
    """Admit a known flood: of the next events all may fail and become dead letters, and none of them counts."""
    amend(open_store(store), name, lambda head: amendments.lift_budget(head, events), yes, by, reason)


def _budget_json(head: Head) -> dict[str, Any]:
    failed = {f"failed_of_the_last_{window}": _failed(head, window) for window in WINDOWS}
    return {"consumer": head.consumer, "decided_events": head.decided, **failed, "admitted_from_now_on": max(0, head.lifted - head.decided)}


def _failed(head: Head, window: int) -> int:
    """Failures that count among the last so many events."""
    return len(head.failures) - bisect_right(head.failures, max(head.decided - window, head.lifted))
