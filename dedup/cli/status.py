"""`dedup status`: every consumer on one screen, what is wrong with it, and the command to run. The exit code is for health checks."""

from __future__ import annotations

import datetime as dt
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from rich.console import Console

import dedup
from checkpoint.errors import SourceUnavailable, StoreUnavailable, command
from dedup.cli import lines
from dedup.cli.brokers import AnyKafka, BrokerName, EventHubs, KafkaSettings, broker_options
from dedup.cli.exits import found
from dedup.cli.lag import ends_of
from dedup.cli.options import AnyName, FailAbove, above, duration
from dedup.cli.show import AsJson, cell, print_json, print_table
from dedup.signals.standing import Standing, look
from dedup.urls import StoreUrl, check_consumer, open_store

COLUMNS = [
    "consumer",
    "state",
    "lag",
    "seconds",
    "rate",
    "last_commit",
    "open_letters",
    "blocked_letters",
    "oldest_letter",
    "unsent",
    "dead",
]

SHORTEST = 0.5
"""Seconds between two looks, at least."""

Silent = Annotated[
    Any,
    typer.Option(
        "--silent",
        parser=duration,
        metavar="DURATION",
        help="Warn if a consumer has committed nothing for longer than this: 30m, 12h.",
        show_default=False,
    ),
]
Letters = Annotated[
    Any,
    typer.Option(
        "--letters-older",
        parser=duration,
        metavar="DURATION",
        help="Warn if a dead letter is open for longer than this: 12h, 7d.",
        show_default=False,
    ),
]
Every = Annotated[Any, typer.Option("--every", parser=duration, metavar="DURATION", help="With --watch: how often to look.")]


@dataclass(frozen=True)
class Thresholds:
    """What is too much."""

    lag: int | dt.timedelta | None = None
    silent: dt.timedelta | None = None
    letters: dt.timedelta | None = None
    broker: tuple[str, ...] = ()  # the options that named it, for the commands of warnings


@dataclass(frozen=True)
class Warned:
    """What is wrong, and what to run."""

    text: str
    command: str


def register(app: typer.Typer) -> None:
    """Add `dedup status`."""
    app.command("status", epilog="Example: dedup status --silent 30m --store postgresql://localhost/shop")(status)


def status(
    name: AnyName = "",
    kafka: AnyKafka = "",
    kafka_settings: KafkaSettings = "",
    eventhubs: EventHubs = "",
    source: BrokerName = "",
    fail_above: FailAbove = None,
    silent: Silent = None,
    letters_older: Letters = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="Look again and again, until stopped. With --json: one document after another.")
    ] = False,
    every: Every = "5s",
    store: StoreUrl = "",
    as_json: AsJson = False,
) -> None:
    """Show all consumers on one screen, with warnings.

    A consumer is running if it has committed within a minute, waiting if its process is alive, stopped if its process is gone, and unknown
    if that process was on another host. The rate is in events a second, over the newest 50 decisions. With a broker the table has the lag,
    too. The exit code is 1 if there is a warning; each warning names the command to run next. --fail-above with a number limits the events
    of all partitions together. With a duration it limits each partition, and a time that is not known is too long.
    """
    named = broker_options(kafka, kafka_settings, eventhubs, source)
    opened, limits = open_store(store), Thresholds(fail_above, silent, letters_older, named)
    if name:
        check_consumer(opened, name)
    broker = ends_of(kafka, kafka_settings, eventhubs)
    if fail_above is not None and broker is None:
        raise dedup.ConfigError("--fail-above limits the lag. Name the broker: --kafka host:9092, or --eventhubs VARIABLE.")

    def once(*, clear: bool = False) -> bool:
        looked = [look(opened, each, broker, source) for each in ([name] if name else opened.consumers())]
        if source:
            require_source(looked, source)
        warned = {one.head.consumer: list(wrong_with(one, limits)) for one in looked}
        if clear:
            Console().clear()
        _show(looked, warned, as_json)
        return any(warned.values())

    if not watch:
        found(once())
    while watch:
        try:
            once(clear=not as_json)
        except (StoreUnavailable, SourceUnavailable) as error:
            lines.note(f"dedup: {error}", error=error)
        time.sleep(max(every.total_seconds(), SHORTEST))


def require_source(looked: Sequence[Standing], source: str) -> None:
    """Raise ConfigError where none of these consumers reads from that broker: a limit of the lag would limit nothing."""
    known = sorted({partition.source for one in looked for partition in one.head.checkpoints})
    if known and source not in known:
        raise dedup.ConfigError(f"No consumer here reads from {source!r}. They read from {', '.join(known)}.")


def wrong_with(one: Standing, limits: Thresholds) -> Iterator[Warned]:
    """What is wrong with this consumer."""
    name = one.head.consumer
    if one.damage is not None:
        yield Warned(one.damage, command("verify", name))
    if (since := one.hidden_since) is not None:
        yield Warned(
            f"batches that were committed at {since:%Y-%m-%d %H:%M:%S}Z and later do not show in their sinks yet",
            command("sink", "sync", name),
        )
    if one.outbox.dead:
        yield Warned(f"{one.outbox.dead} messages cannot be sent", command("outbox", "list", name, "--state", "DEAD"))
    if one.holds_up:
        yield Warned(
            "it told no retention, so nothing is purged by itself; start it with Limits(retention=...), or delete it",
            command("consumer", "delete", name),
        )
    if one.lag_problem is not None:
        yield Warned(f"its lag is not known: {str(one.lag_problem).rstrip('.')}", command("consumer", "lag", name, *limits.broker))
    for far in one.lags or ():
        if far.lost:
            yield Warned(f"the log no longer has {far.lost} positions of {far.partition}", command("consumer", "lag", name, *limits.broker))
        elif far.another:
            yield Warned(f"the log of {far.partition} ends before the checkpoint", command("consumer", "lag", name, *limits.broker))
    yield from _beyond(one, limits)


def _beyond(one: Standing, limits: Thresholds) -> Iterator[Warned]:
    """What a limit of the user's is exceeded by."""
    name = one.head.consumer
    if limits.lag is not None and _is_behind(one, limits.lag):
        yield Warned(f"it is {one.lag[0]} events behind", command("consumer", "lag", name, *limits.broker))
    if limits.silent is not None and (one.last_commit is None or one.now - one.last_commit > limits.silent):
        since = "ever" if one.last_commit is None else f"since {cell(one.last_commit)}"
        yield Warned(f"nothing was committed {since}; it is {one.activity}", command("consumer", "show", name))
    if limits.letters is not None and one.oldest is not None and one.now - one.oldest > limits.letters:
        asked = command("dead-letter", "group", "--consumer", name, "--status", "OPEN")
        yield Warned(f"a dead letter is open since {cell(one.oldest)}", asked)


def _is_behind(one: Standing, limit: int | dt.timedelta) -> bool:
    """Whether all partitions together are that many events behind, or one of them is behind for so long, or for how long is not known."""
    if isinstance(limit, int):
        return above(one.lag[0] or 0, None, limit)
    return any(above(far.events, far.seconds, limit) for far in one.lags or ())


def _show(looked: Sequence[Standing], warned: dict[str, list[Warned]], as_json: bool) -> None:
    if as_json:
        print_json([_document(one, warned[one.head.consumer]) for one in looked])
        return
    print_table(COLUMNS, [_row(one) for one in looked], empty="no consumers yet")
    for name, found_of in warned.items():
        for one in found_of:
            typer.echo(f"{name}: {one.text}. Run {one.command}.")


def _document(one: Standing, warned: Sequence[Warned]) -> dict[str, Any]:
    return {
        **dict(zip(COLUMNS, _row(one), strict=True)),
        "decisions": one.head.seq,
        "processes": [process._asdict() for process in one.present],
        "warnings": [{"text": each.text, "command": each.command.strip("`")} for each in warned],
    }


def _row(one: Standing) -> list[Any]:
    events, seconds = one.lag
    per_second = None if one.rate is None else round(one.rate, 1)
    letters = [sum(one.letters.values()), sum(one.blocked.values()), one.oldest]
    unsent = one.outbox.waiting + one.outbox.behind
    return [one.head.consumer, one.activity, events, seconds, per_second, one.last_commit, *letters, unsent, one.outbox.dead]
