"""`dedup outbox`: messages that consumers have published, where to send them, and a person's decisions about those that cannot be sent."""

from __future__ import annotations

import datetime as dt
import signal
import threading
from collections.abc import Sequence
from dataclasses import asdict
from enum import StrEnum
from typing import Annotated, Any

import typer

import dedup
from checkpoint.errors import Refused, command
from dedup.cli import lines
from dedup.cli.brokers import EventHubs, Kafka, KafkaSettings, connection_string, settings_of
from dedup.cli.exits import found as exit_found
from dedup.cli.options import AnyName, By, Commands, FailAbove, Name, Reason, Topics, Yes, above, did_you_mean, duration, find, one_of, who
from dedup.cli.show import NOTHING_DONE, AsJson, cell, print_fields, print_json, print_table
from dedup.core.messages import Chosen, Entry, Outbox
from dedup.outbox import Call as Calling
from dedup.outbox import Destination, Dispatched, Dispatcher, ExactlyOnce, Patience, State
from dedup.urls import StoreUrl, check_consumer, open_store

commands = Commands(
    help="Outgoing messages, published with tx.publish.", epilog="Example: dedup outbox lag orders --fail-above 15m", no_args_is_help=True
)

COLUMNS = ["number", "topic", "key", "id", "state", "attempts", "size", "created_at", "error"]

LAG = ["consumer", "waiting", "dead", "behind", "oldest", "seconds"]

MOST = 2**63 - 1
Numbers = Annotated[
    list[int], typer.Argument(min=0, max=MOST, help="Numbers of messages, as `dedup outbox list` shows them.", show_default=False)
]
Topic = Annotated[str | None, typer.Option(help="Only messages to this topic.")]

Call = Annotated[
    str,
    typer.Option(
        "--call",
        metavar="MODULE:ATTRIBUTE",
        help="A function of yours that sends a list of messages. It returns when they are sent and raises if they are not.",
        show_default=False,
    ),
]


SHORTEST = 0.01
"""Seconds between two looks, at least."""


class StateName(StrEnum):
    """The states as options take them."""

    WAITING = "WAITING"
    SENT = "SENT"
    DEAD = "DEAD"
    BEHIND = "BEHIND"
    DISCARDED = "DISCARDED"
    FLYING = "FLYING"


def register(app: typer.Typer) -> None:
    """Add `dedup outbox ...`."""
    app.add_typer(commands, name="outbox")


def _outbox(store: str, name: str) -> Outbox:
    opened = open_store(store)
    check_consumer(opened, name)
    return opened.outbox(name)


@commands.command(epilog="Example: dedup outbox dispatch orders --kafka localhost:9092 --store postgresql://localhost/shop")
def dispatch(
    name: Name,
    kafka: Kafka = "",
    kafka_settings: KafkaSettings = "",
    eventhubs: EventHubs = "",
    call: Call = "",
    topic: Topics = None,
    once: Annotated[bool, typer.Option("--once", help="Send the messages that wait, and end.")] = False,
    overtake: Annotated[
        bool, typer.Option("--overtake", help="Send messages although an earlier message with the same key cannot be sent.")
    ] = False,
    attempts: Annotated[int, typer.Option(min=1, help="Give up a message after this many failed attempts.")] = 5,
    exactly_once: Annotated[
        bool,
        typer.Option(
            "--exactly-once",
            help="Use Kafka transactions: readers of committed messages see each message once. Needs --kafka and a store in PostgreSQL.",
        ),
    ] = False,
    every: Annotated[
        Any, typer.Option(parser=duration, metavar="DURATION", help="How often to look for new messages while none waits: 1s, 5m.")
    ] = "1s",
    store: StoreUrl = "",
    as_json: AsJson = False,
) -> None:
    """Send the messages that wait, until stopped.

    Without --exactly-once each message is sent at least once, always with the id that it was stored with, and in order per key.
    On PostgreSQL several dispatchers may run at once. On Delta the dispatcher that started last continues and the others end. If no stored
    message is for a topic of --topic, the command says so on standard error, and goes on.

    Crash: a message that was sent and not marked as sent is sent again, with the same id.
    """
    outbox = _outbox(store, name)
    destination: Any
    if exactly_once:
        destination = transactions_of(kafka, kafka_settings, name, outbox)
        dispatcher: Dispatcher = ExactlyOnce(outbox, destination, topics=topic or (), blocking=not overtake)  # type: ignore[arg-type]
    else:
        destination = destination_of(kafka, kafka_settings, eventhubs, call)
        dispatcher = Dispatcher(outbox, destination, topics=topic or (), patience=Patience(attempts=attempts), blocking=not overtake)
    _tell_unknown_topics(outbox, name, topic or (), waits=not once)
    try:
        if once:
            lag = outbox.lag(topics=topic or ())
            _tell(dispatcher.once(max(1, lag.waiting + (lag.behind if overtake else 0))), as_json)
        else:
            dispatcher.run(_until_stopped(), every=max(every.total_seconds(), SHORTEST), tell=lambda done: _tell(done, as_json))
    finally:
        destination.close()


def _tell_unknown_topics(outbox: Outbox, name: str, asked: Sequence[str], *, waits: bool) -> None:
    """Name on standard error the topics that no stored message is for.

    This is no error: a dispatcher may start before the first message, and a purge removes old ones.
    """
    known = outbox.topics() if asked else []
    for topic in asked:
        if topic not in known:
            stored = f"Topics of stored messages: {', '.join(known) or 'none'}."
            wait = " The command waits for the first one." if waits else ""
            lines.note(f"dedup: {name!r} has no message to topic {topic!r}.{did_you_mean(topic, known)} {stored}{wait}")


def _until_stopped() -> threading.Event:
    """Set by Ctrl-C or SIGTERM: the turn in hand is finished first."""
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    return stop


def _tell(done: Dispatched, as_json: bool) -> None:
    if as_json:
        print_json(asdict(done))
    else:
        typer.echo(
            f"sent {done.sent}" + (f", dead {done.dead}" if done.dead else "") + (f", to try again {done.tried}" if done.tried else "")
        )


@commands.command("list", epilog="Example: dedup outbox list orders --state DEAD --limit 20")
def list_(
    name: Name,
    state: Annotated[
        StateName | None, typer.Option(**one_of(StateName), help="Only in this state.  [default: all that are not sent]")
    ] = None,
    topic: Topic = None,
    limit: Annotated[int, typer.Option(min=0, help="Show at most this many; 0: all.")] = 100,
    store: StoreUrl = "",
    as_json: AsJson = False,
) -> None:
    """List messages without their bodies, oldest first."""
    states = (State[state.name],) if state else (State.WAITING, State.DEAD, State.BEHIND, State.FLYING)
    found = _outbox(store, name).entries(Chosen(states, topic, limit=limit or None))
    if as_json:
        print_json([_document(entry) for entry in found])
        return
    print_table(COLUMNS, [_row(entry) for entry in found], empty="no messages match")
    if limit and len(found) == limit:
        typer.echo(f"These are the first {limit}; --limit 0 shows all.")


@commands.command(epilog="Example: dedup outbox show orders 4711")
def show(
    name: Name,
    number: Annotated[
        int, typer.Argument(min=0, max=MOST, help="The number of the message, as `dedup outbox list` shows it.", show_default=False)
    ],
    store: StoreUrl = "",
    as_json: AsJson = False,
) -> None:
    """Show one message with its headers and body.

    Bytes that are not text are shown in hex.
    """
    outbox = _outbox(store, name)
    message, entry = outbox.message(number), next(iter(outbox.entries(Chosen(numbers=(number,)))), None)
    if message is None or entry is None:
        raise dedup.ConfigError(f"There is no message {number} of {name!r}. {command('outbox', 'list', name)} shows the numbers.")
    document = {**_document(entry), "headers": [[n, _text(v)] for n, v in message.headers], "body": _text(message.body)}
    if as_json:
        print_json(document)
        return
    print_fields((k, v) for k, v in document.items() if v is not None and k != "body")
    typer.echo("\nbody: null" if message.body is None else f"\nbody ({len(message.body)} bytes)\n{cell(document['body'])}")


@commands.command(epilog="Example: dedup outbox retry orders 4711 4712 --yes")
def retry(
    name: Name,
    numbers: Numbers,
    store: StoreUrl = "",
    as_json: AsJson = False,
    yes: Yes = False,
    by: By = "",
    reason: Reason = "",
) -> None:
    """Send dead messages again.

    The next dispatcher sends them, then those that wait behind them.
    """
    outbox = _outbox(store, name)
    found = _chosen(outbox, name, numbers, (State.DEAD,), "sent again")
    _changed(found, outbox.retry([e.number for e in found], by=who(by), reason=reason) if yes else 0, "to be sent again", yes, as_json)


@commands.command(epilog="Example: dedup outbox discard orders 4711 --reason 'the receiver is gone' --yes")
def discard(
    name: Name,
    numbers: Numbers,
    store: StoreUrl = "",
    as_json: AsJson = False,
    yes: Yes = False,
    by: By = "",
    reason: Reason = "",
) -> None:
    """Give up messages that were not sent.

    Messages that wait behind them are sent.
    """
    outbox = _outbox(store, name)
    found = _chosen(outbox, name, numbers, (State.WAITING, State.DEAD, State.BEHIND), "given up")
    _changed(found, outbox.discard([e.number for e in found], by=who(by), reason=reason) if yes else 0, "given up", yes, as_json)


def _chosen(outbox: Outbox, name: str, numbers: list[int], states: tuple[State, ...], word: str) -> list[Entry]:
    """The messages of these numbers. Raises ConfigError for a number that no message has, Refused for a message in another state."""
    found = outbox.entries(Chosen(numbers=tuple(numbers), limit=None))
    if missing := sorted({*numbers} - {entry.number for entry in found}):
        raise dedup.ConfigError(
            f"{name!r} has no message {', '.join(map(str, missing))}. {command('outbox', 'list', name)} shows the numbers."
        )
    if wrong := [f"{entry.number} is {entry.state.name}" for entry in found if entry.state not in states]:
        allowed = " or ".join(state.name for state in states)
        raise Refused(f"Only messages that are {allowed} can be {word}: {', '.join(wrong)}. Leave out those.")
    return found


def _changed(found: list[Entry], count: int, word: str, yes: bool, as_json: bool) -> None:
    if as_json:
        print_json({"changed": count, "done": yes, "messages": [_document(e) for e in found]})
        return
    print_table(COLUMNS, [_row(e) for e in found])
    typer.echo(f"{count} messages {word}" if yes else NOTHING_DONE)


@commands.command(epilog="Example: dedup outbox purge orders --older-than 7d --yes")
def purge(
    name: Name,
    older_than: Annotated[
        Any,
        typer.Option(
            "--older-than", parser=duration, metavar="DURATION", help="Only what is older than this: 14d, 12h.", show_default=False
        ),
    ],
    store: StoreUrl = "",
    as_json: AsJson = False,
    yes: Yes = False,
) -> None:
    """Delete old messages that were sent or discarded.

    A message that was not sent is never deleted.
    """
    before = dt.datetime.now(dt.UTC) - older_than
    count = _outbox(store, name).purge(before, dry_run=not yes)
    if as_json:
        print_json({"messages": count, "before": before, "done": yes})
    else:
        typer.echo(f"{count} messages {'purged' if yes else 'would be purged'}")
        if not yes and count:
            typer.echo(NOTHING_DONE)


@commands.command(epilog="Example: dedup outbox lag orders --json")
def lag(
    name: AnyName = "",
    fail_above: FailAbove = None,
    store: StoreUrl = "",
    as_json: AsJson = False,
) -> None:
    """Show how many messages are not sent yet.

    With --fail-above the exit code is 1 if more messages than the limit are not sent, or if the oldest of them is older than the limit.
    """
    opened = open_store(store)
    if name:
        check_consumer(opened, name)
    rows = [{"consumer": each, **_lag(opened.outbox(each))} for each in ([name] if name else opened.consumers())]
    if as_json:
        print_json(rows)
    else:
        print_table(LAG, [list(row.values()) for row in rows], empty="no consumers yet")
    exit_found(fail_above is not None and any(_too_far(row, fail_above) for row in rows))


def _too_far(row: dict[str, Any], limit: int | dt.timedelta) -> bool:
    return above(row["waiting"] + row["dead"] + row["behind"], row["seconds"], limit)


def _lag(outbox: Outbox) -> dict[str, Any]:
    found = outbox.lag()
    seconds = None if found.oldest is None else round((dt.datetime.now(dt.UTC) - found.oldest).total_seconds(), 1)
    return {"waiting": found.waiting, "dead": found.dead, "behind": found.behind, "oldest": found.oldest, "seconds": seconds}


def _document(entry: Entry) -> dict[str, Any]:
    return {**asdict(entry), "state": entry.state.name, "key": _text(entry.key)}


def _row(entry: Entry) -> list[Any]:
    document = _document(entry)
    error = f"{entry.error_type}: {(entry.error_message or '')[:120]}" if entry.error_type else None
    return [*(document[name] for name in COLUMNS[:-1]), error]


def _text(value: bytes | None) -> str | None:
    """Bytes as text where they are, else in hex."""
    try:
        return None if value is None else value.decode()
    except UnicodeDecodeError:
        return "" if value is None else value.hex(" ")


def destination_of(kafka: str, kafka_settings: str, eventhubs: str, call: str) -> Destination:
    """The one destination that is named. Raises ConfigError for none, several, or one that cannot be made."""
    if [bool(kafka), bool(eventhubs), bool(call)].count(True) != 1:
        raise dedup.ConfigError(
            "Say where to send the messages: give one of --kafka host:9092, --eventhubs VARIABLE, --call module:attribute."
        )
    if kafka:
        from dedup.kafka import Topics

        return Topics(kafka, settings_of(kafka_settings))
    return _hubs(eventhubs) if eventhubs else Calling(_function(call))


def transactions_of(kafka: str, kafka_settings: str, name: str, outbox: Outbox) -> Any:
    """Kafka in transactions. Raises ConfigError for another destination, or an outbox that notes no flights."""
    if not kafka:
        raise dedup.ConfigError("Only Kafka has transactions: --exactly-once needs --kafka host:9092.")
    if not hasattr(outbox, "fly"):
        raise dedup.ConfigError("--exactly-once needs a store in PostgreSQL. On Delta messages are sent at least once, with stable ids.")
    from dedup.kafka import TransactionalTopics

    return TransactionalTopics(kafka, name, settings_of(kafka_settings))


def _hubs(variable: str) -> Destination:
    text = connection_string(variable)
    from dedup.eventhub.connection import Connection
    from dedup.eventhub.outbox import SendingHubs

    return SendingHubs(Connection.of(text, hub="any"))


def _function(target: str) -> Any:
    found = find(target, "function", "shop.mail:send")
    if not callable(found):
        raise dedup.ConfigError(f"{target} is a {type(found).__name__}, not a function.")
    return found
