"""`dedup upkeep`: what a scheduler runs so that the state does not grow for ever."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from typing import Annotated, Any

import typer

from checkpoint.errors import StoreUnavailable
from dedup.cli.exits import found
from dedup.cli.options import Yes, again_and_again, duration
from dedup.cli.show import NOTHING_DONE, AsJson, print_json, print_table
from dedup.core.retention import Upkept
from dedup.urls import StoreUrl, check_consumer, open_store

COLUMNS = ("what", "consumer", "count", "why not more")


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(epilog="Example: dedup upkeep --retention 30d --every 1h --yes")(upkeep)


def upkeep(
    retention: Annotated[
        Any,
        typer.Option(
            parser=duration,
            metavar="DURATION",
            help="Keep reservations and sent messages for this time. Nobody may send a message again later than that.",
            show_default=False,
        ),
    ],
    although_behind: Annotated[
        list[str] | None,
        typer.Option(metavar="CONSUMER", help="Purge although this consumer is behind in its log. May be repeated.", show_default=False),
    ] = None,
    every: Annotated[
        Any | None,
        typer.Option(parser=duration, metavar="DURATION", help="With --yes: repeat at this interval until stopped.", show_default=False),
    ] = None,
    store: StoreUrl = "",
    as_json: AsJson = False,
    yes: Yes = False,
) -> None:
    """Forget old reservations and sent messages of all consumers.

    The retention is counted back from where each consumer is in its log: the command keeps what a consumer that is days behind may still
    need, and says so. Consumers go on meanwhile. On Delta the command also rewrites small files. The exit code is 1 if something failed.

    Crash: the next run goes on.
    """
    if every is not None and not yes:
        raise typer.BadParameter("--every needs --yes.")
    opened = open_store(store)
    for name in although_behind or ():
        check_consumer(opened, name)

    once = partial(opened.upkeep, retention, although_behind=although_behind or (), dry_run=not yes)
    if every is not None:
        again_and_again(every, once, lambda done: _show_news(done, as_json), lambda error: isinstance(error, StoreUnavailable))
    _show(done := once(), as_json, yes)
    found(any(line.failed for line in done))


def _show_news(done: list[Upkept], as_json: bool) -> None:
    """What a turn did, kept or failed at; nothing where it had nothing to do."""
    if news := [line for line in done if line.count or line.kept or line.failed]:
        _show(news, as_json, True)


def _show(done: list[Upkept], as_json: bool, yes: bool) -> None:
    if as_json:
        print_json({"done": yes, "upkeep": [asdict(line) for line in done]})
        return
    rows = [(line.what, line.consumer or "all", line.count, line.failed or "; ".join(line.kept)) for line in done]
    print_table(COLUMNS, rows, empty="no consumers")
    if not yes and any(line.count for line in done):
        typer.echo(NOTHING_DONE)
