"""`dedup status`: every consumer on one screen, what is wrong with it, and the command to run. The exit code is for health checks."""

from __future__ import annotations

import datetime as dt
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any

import pyarrow as pa
import pyarrow.compute as pc
import typer
from rich.console import Console

import dedup
from checkpoint.errors import PublicationStuck, SourceUnavailable, StoreRestored, StoreUnavailable, command
from checkpoint.head import Head, Present
from checkpoint.records import RecordFilter
from checkpoint.start import Ends, Lag, lags
from deadletter import Status
from deadletter.selection import Selection
from dedup.cli import lines
from dedup.cli.brokers import EventHubs, KafkaSettings
from dedup.cli.exits import found
from dedup.cli.lag import Kafka, Source, ends_of
from dedup.cli.options import AnyName, FailAbove, above, duration
from dedup.cli.show import AsJson, cell, print_json, print_table
from dedup.core.messages import OutboxLag
from dedup.core.store import Store
from dedup.urls import StoreUrl, check_consumer, open_store

COLUMNS = ["consumer", "state", "lag", "seconds", "rate", "last_commit", "open_letters", "oldest_letter", "unsent", "dead"]

BUSY = dt.timedelta(minutes=1)
"""Since its last commit, a process that is alive counts as running; after that it waits for events."""

NEWEST = 50
"""Decisions of which the rate is taken."""

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


class Activity(StrEnum):
    """What can be said of the processes of a consumer."""

    NEW = "new"  # nobody has run it
    RUNNING = "running"
    WAITING = "waiting"  # alive, and nothing committed for a minute
    STOPPED = "stopped"  # its process is gone
    UNKNOWN = "unknown"  # it ran on another host, and committed nothing for a minute


@dataclass(frozen=True)
class Thresholds:
    """What is too much."""

    lag: int | dt.timedelta | None = None
    silent: dt.timedelta | None = None
    letters: dt.timedelta | None = None


@dataclass(frozen=True)
class Warned:
    """What is wrong, and what to run."""

    text: str
    command: str


@dataclass(frozen=True)
class Standing:
    """One consumer now."""

    head: Head
    present: Sequence[Present]
    last_commit: dt.datetime | None
    rate: float | None  # events a second over the newest decisions
    letters: Mapping[str, int]  # kind -> open ones
    oldest: dt.datetime | None  # when the oldest of them failed first
    outbox: OutboxLag
    lags: Sequence[Lag] | None  # None: no broker was asked
    damage: str | None = None  # in which the message names the command
    reserved_since: dt.datetime | None = None  # when the oldest reservations were made that are kept
    now: dt.datetime = field(default_factory=lambda: dt.datetime.now(dt.UTC))

    @property
    def activity(self) -> Activity:
        """Whether it is at work."""
        busy = self.last_commit is not None and self.now - self.last_commit < BUSY
        if not self.present:
            return Activity.NEW if self.last_commit is None else Activity.STOPPED
        if any(one.alive for one in self.present):
            return Activity.RUNNING if busy else Activity.WAITING
        if all(one.alive is False for one in self.present):
            return Activity.STOPPED
        return Activity.RUNNING if busy else Activity.UNKNOWN

    @property
    def lag(self) -> tuple[int | None, float | None]:
        """Events and seconds to the end of the log, of all partitions; None where it is not known."""
        if self.lags is None:
            return None, None
        times = [one.seconds for one in self.lags]
        known = [seconds for seconds in times if seconds is not None]
        return sum(one.events for one in self.lags), max(known, default=None)


def register(app: typer.Typer) -> None:
    """Add `dedup status`."""
    app.command("status", epilog="Example: dedup status --silent 30m --store postgresql://localhost/shop")(status)


def status(
    name: AnyName = "",
    kafka: Kafka = "",
    kafka_settings: KafkaSettings = "",
    eventhubs: EventHubs = "",
    source: Source = "",
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
    too. The exit code is 1 if there is a warning; each warning names the command to run next.
    """
    opened, limits = open_store(store), Thresholds(fail_above, silent, letters_older)
    if name:
        check_consumer(opened, name)
    broker = ends_of(kafka, kafka_settings, eventhubs)
    if fail_above is not None and broker is None:
        raise dedup.ConfigError("--fail-above limits the lag. Name the broker: --kafka host:9092, or --eventhubs VARIABLE.")

    def once(*, clear: bool = False) -> bool:
        looked = [look(opened, each, broker, source) for each in ([name] if name else opened.consumers())]
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


def look(store: Store, name: str, broker: Ends | None = None, source: str = "") -> Standing:
    """Read what is to be said of one consumer. Takes no lock, and reads a bounded number of rows, however many there are."""
    head = store.head(name)
    newest = store.batches(name, RecordFilter(after=max(0, head.seq - NEWEST)))
    groups = store.groups(Selection(name, status=Status.OPEN))
    return Standing(
        head,
        store.present(name),
        last_commit=pc.max(newest["committed_at"]).as_py(),
        rate=rate(newest),
        letters=_by_kind(groups),
        oldest=pc.min(groups["first_failed_at"]).as_py(),
        outbox=store.outbox(name).lag(),
        lags=_lags(head, broker, source),
        damage=_damage(store, name),
        reserved_since=store.reserved_since(name),
    )


def _lags(head: Head, broker: Ends | None, source: str) -> list[Lag] | None:
    read = {partition.source for partition in head.checkpoints}
    return None if broker is None or not read or (source and source not in read) else lags(head, broker, source=source or None)


def _by_kind(groups: pa.Table) -> dict[str, int]:
    found = groups.group_by("kind").aggregate([("letters", "sum")])
    return dict(zip(found["kind"].to_pylist(), found["letters_sum"].to_pylist(), strict=True))


def _damage(store: Store, name: str) -> str | None:
    try:
        store.require_letters(name)
    except (StoreRestored, PublicationStuck) as error:
        return str(error)
    return None


def rate(records: pa.Table) -> float | None:
    """Events a second from the first of these decisions to the last; None where they are fewer than two, or at one time."""
    if not records.num_rows:
        return None
    first, last = pc.min(records["committed_at"]).as_py(), pc.max(records["committed_at"]).as_py()
    seconds = (last - first).total_seconds()
    later = records.filter(pc.greater(records["committed_at"], pa.scalar(first, records.schema.field("committed_at").type)))
    return None if not seconds else float(pc.sum(later["delivered"]).as_py()) / seconds


def wrong_with(one: Standing, limits: Thresholds) -> Iterator[Warned]:
    """What is wrong with this consumer."""
    name = one.head.consumer
    if one.damage is not None:
        yield Warned(one.damage, command("verify", name))
    if one.outbox.dead:
        yield Warned(f"{one.outbox.dead} messages cannot be sent", command("outbox", "list", name, "--state", "DEAD"))
    for far in one.lags or ():
        if far.lost:
            yield Warned(f"the log no longer has {far.lost} positions of {far.partition}", command("consumer", "lag", name))
        elif far.another:
            yield Warned(f"the log of {far.partition} ends before the checkpoint", command("consumer", "lag", name))
    yield from _beyond(one, limits)


def _beyond(one: Standing, limits: Thresholds) -> Iterator[Warned]:
    """What a limit of the user's is exceeded by."""
    name, (events, seconds) = one.head.consumer, one.lag
    if limits.lag is not None and one.lags is not None and above(events or 0, seconds, limits.lag):
        yield Warned(f"it is {events} events behind", command("consumer", "lag", name))
    if limits.silent is not None and (one.last_commit is None or one.now - one.last_commit > limits.silent):
        since = "ever" if one.last_commit is None else f"since {cell(one.last_commit)}"
        yield Warned(f"nothing was committed {since}; it is {one.activity}", command("consumer", "show", name))
    if limits.letters is not None and one.oldest is not None and one.now - one.oldest > limits.letters:
        asked = command("dead-letter", "group", "--consumer", name, "--status", "OPEN")
        yield Warned(f"a dead letter is open since {cell(one.oldest)}", asked)


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
    letters = [sum(one.letters.values()), one.oldest]
    unsent = one.outbox.waiting + one.outbox.behind
    return [one.head.consumer, one.activity, events, seconds, per_second, one.last_commit, *letters, unsent, one.outbox.dead]
