"""`dedup outbox`: messages that consumers have published, where to send them, and a person's decisions about those that cannot be sent."""

from __future__ import annotations

import datetime as dt
import os
import signal
import threading
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

import dedup
from checkpoint.errors import command
from dedup.cli.consumers import Name, Yes
from dedup.cli.options import find
from dedup.cli.show import AsJson, print_json, print_table
from dedup.core.messages import Chosen, Entry, Outbox
from dedup.outbox import Call as Calling
from dedup.outbox import Destination, Dispatched, Dispatcher, ExactlyOnce, Patience, State
from dedup.urls import StoreUrl, check_consumer, open_store

commands = typer.Typer(help="Messages that handlers published with tx.publish.", no_args_is_help=True)

COLUMNS = ["number", "topic", "key", "id", "state", "attempts", "size", "created_at", "error"]

MOST = 2**63 - 1
Numbers = Annotated[list[int], typer.Argument(min=0, max=MOST, help="Numbers, as `list` shows them.", show_default=False)]
Topic = Annotated[str | None, typer.Option(help="Only messages to this topic.")]

NOTHING_DONE = "Nothing was changed. Repeat the command with --yes to do it."

Kafka = Annotated[str, typer.Option("--kafka", help="To this Kafka broker: host:9092.", show_default=False)]
KafkaSettings = Annotated[
    str,
    typer.Option(
        "--kafka-settings", help="A file with settings of librdkafka, one name=value a line: logins belong there.", show_default=False
    ),
]
EventHubs = Annotated[
    str,
    typer.Option(
        "--eventhubs", metavar="VARIABLE", help="To event hubs; the namespace's connection string is in this variable.", show_default=False
    ),
]
Call = Annotated[
    str,
    typer.Option(
        "--call",
        metavar="MODULE:ATTRIBUTE",
        help="To a function that gets a list of messages, returns once they are sent, and raises where they are not.",
        show_default=False,
    ),
]


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
    topic: Annotated[
        list[str] | None, typer.Option("--topic", help="Only messages to this topic; may be repeated.", show_default=False)
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Send what waits now, and end.")] = False,
    overtake: Annotated[bool, typer.Option("--overtake", help="Let messages overtake one of their key that cannot be sent.")] = False,
    attempts: Annotated[int, typer.Option(min=1, help="Attempts at a message before it is dead, while others pass.")] = 5,
    exactly_once: Annotated[
        bool, typer.Option("--exactly-once", help="In Kafka transactions: readers of committed messages see each of them once.")
    ] = False,
    every: Annotated[float, typer.Option(min=0.01, help="Seconds between two looks while nothing waits.")] = 1.0,
    store: StoreUrl = "",
    as_json: AsJson = False,
) -> None:
    """Send what waits, each message at least once with the id that it was stored with, in order per key; until it is stopped.

    Several may run at once on PostgreSQL; on Delta the one that began last goes on, the others end.

    Crash: what was sent and not marked is sent again, with the same ids.
    """
    outbox = _outbox(store, name)
    destination: Any
    if exactly_once:
        destination = transactions_of(kafka, kafka_settings, name, outbox)
        dispatcher: Dispatcher = ExactlyOnce(outbox, destination, topics=topic or (), blocking=not overtake)  # type: ignore[arg-type]
    else:
        destination = destination_of(kafka, kafka_settings, eventhubs, call)
        dispatcher = Dispatcher(outbox, destination, topics=topic or (), patience=Patience(attempts=attempts), blocking=not overtake)
    try:
        if once:
            _tell(dispatcher.once(), as_json)
        else:
            dispatcher.run(_until_stopped(), every=every, tell=lambda done: _tell(done, as_json))
    finally:
        destination.close()


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
    state: Annotated[StateName | None, typer.Option(case_sensitive=False, help="In this state.  [default: all that are not sent]")] = None,
    topic: Topic = None,
    limit: Annotated[int, typer.Option(min=0, help="At most so many; 0 for all.")] = 100,
    store: StoreUrl = "",
    as_json: AsJson = False,
) -> None:
    """Messages without their bodies, oldest first."""
    states = (State[state.name],) if state else (State.WAITING, State.DEAD, State.BEHIND, State.FLYING)
    found = _outbox(store, name).entries(Chosen(states, topic, limit=limit or None))
    if as_json:
        print_json([_document(entry) for entry in found])
        return
    print_table(COLUMNS, [_row(entry) for entry in found], empty="no messages match")
    if limit and len(found) == limit:
        typer.echo(f"the first {limit}; --limit 0 shows all")


@commands.command(epilog="Example: dedup outbox show orders 4711")
def show(
    name: Name,
    number: Annotated[int, typer.Argument(min=0, max=MOST, help="Its number, as `list` shows it.", show_default=False)],
    store: StoreUrl = "",
    as_json: AsJson = False,
) -> None:
    """One message with its headers and body. What is no text is shown in hex."""
    outbox = _outbox(store, name)
    message, entry = outbox.message(number), next(iter(outbox.entries(Chosen(numbers=(number,)))), None)
    if message is None or entry is None:
        raise dedup.ConfigError(f"There is no message {number} of {name!r}. {command('outbox', 'list', name)} shows the numbers.")
    document = {**_document(entry), "headers": [[n, _text(v)] for n, v in message.headers], "body": _text(message.body)}
    if as_json:
        print_json(document)
        return
    print_table(["", "message"], [(k, v) for k, v in document.items() if v is not None and k != "body"])
    typer.echo("body: null" if message.body is None else f"body ({len(message.body)} bytes):\n{document['body']}")


@commands.command(epilog="Example: dedup outbox retry orders 4711 4712 --yes")
def retry(name: Name, numbers: Numbers, store: StoreUrl = "", as_json: AsJson = False, yes: Yes = False) -> None:
    """Let dead messages be sent again: they, then those behind them, are taken by the next dispatcher."""
    outbox = _outbox(store, name)
    found = outbox.entries(Chosen((State.DEAD,), numbers=tuple(numbers), limit=None))
    _changed(found, outbox.retry([e.number for e in found]) if yes and found else 0, "to be sent again", yes, as_json)


@commands.command(epilog="Example: dedup outbox discard orders 4711 --yes")
def discard(name: Name, numbers: Numbers, store: StoreUrl = "", as_json: AsJson = False, yes: Yes = False) -> None:
    """Give up messages that are not sent, for good. Those behind them in their key go on."""
    outbox = _outbox(store, name)
    found = outbox.entries(Chosen((State.WAITING, State.DEAD, State.BEHIND), numbers=tuple(numbers), limit=None))
    _changed(found, outbox.discard([e.number for e in found]) if yes and found else 0, "given up", yes, as_json)


def _changed(found: list[Entry], count: int, word: str, yes: bool, as_json: bool) -> None:
    if as_json:
        print_json({"changed": count, "dry_run": not yes, "messages": [_document(e) for e in found]})
        return
    print_table(COLUMNS, [_row(e) for e in found], empty="no messages match")
    if found:
        typer.echo(f"{count} messages {word}" if yes else NOTHING_DONE)


@commands.command(epilog="Example: dedup outbox purge orders --older-than 7 --yes")
def purge(
    name: Name,
    older_than: Annotated[
        float, typer.Option("--older-than", min=0, max=36_500, help="Days since they were sent or discarded.", show_default=False)
    ],
    store: StoreUrl = "",
    as_json: AsJson = False,
    yes: Yes = False,
) -> None:
    """Delete messages that were sent or discarded some days ago. What is not sent is never deleted."""
    before = dt.datetime.now(dt.UTC) - dt.timedelta(days=older_than)
    count = _outbox(store, name).purge(before, dry_run=not yes)
    if as_json:
        print_json({"purged": count, "dry_run": not yes})
    else:
        typer.echo(f"{count} messages {'purged' if yes else 'would be purged'}")
        if not yes and count:
            typer.echo(NOTHING_DONE)


@commands.command(epilog="Example: dedup outbox lag orders --json")
def lag(
    name: Annotated[str, typer.Argument(help="The consumer's name; all of them where none is given.", show_default=False)] = "",
    store: StoreUrl = "",
    as_json: AsJson = False,
) -> None:
    """How many messages are not sent yet, and how old the oldest of them is."""
    opened = open_store(store)
    if name:
        check_consumer(opened, name)
    rows = [{"consumer": each, **_lag(opened.outbox(each))} for each in ([name] if name else opened.consumers())]
    if as_json:
        print_json(rows)
        return
    print_table(
        ["consumer", "waiting", "dead", "behind", "oldest", "seconds"], [list(row.values()) for row in rows], empty="no consumers yet"
    )


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
        raise dedup.ConfigError("Say where the messages go: one of --kafka host:9092, --eventhubs VARIABLE, --call module:attribute.")
    if kafka:
        from dedup.kafka import Topics

        return Topics(kafka, settings_of(kafka_settings) if kafka_settings else {})
    return _hubs(eventhubs) if eventhubs else Calling(_function(call))


def transactions_of(kafka: str, kafka_settings: str, name: str, outbox: Outbox) -> Any:
    """Kafka in transactions. Raises ConfigError for another destination, or an outbox that notes no flights."""
    if not kafka:
        raise dedup.ConfigError("Only Kafka has transactions: --exactly-once needs --kafka host:9092.")
    if not hasattr(outbox, "fly"):
        raise dedup.ConfigError("--exactly-once needs a store in PostgreSQL. On Delta messages are sent at least once, with stable ids.")
    from dedup.kafka import TransactionalTopics

    return TransactionalTopics(kafka, name, settings_of(kafka_settings) if kafka_settings else {})


def _hubs(variable: str) -> Destination:
    if "=" in variable:
        raise dedup.ConfigError("--eventhubs takes the name of a variable: a connection string among the arguments can be read by anybody.")
    if not (text := os.environ.get(variable)):
        raise dedup.ConfigError(f"The variable {variable} is not set. It has to hold the connection string.")
    from dedup.eventhub.connection import Connection
    from dedup.eventhub.outbox import SendingHubs

    return SendingHubs(Connection.of(text, hub="any"))


def _function(target: str) -> Any:
    found = find(target, "function", "shop.mail:send")
    if not callable(found):
        raise dedup.ConfigError(f"{target} is a {type(found).__name__}, not a function.")
    return found


def settings_of(file: str) -> dict[str, str]:
    """The settings of a file, without comments. Raises ConfigError where it cannot be read."""
    try:
        lines = [line.strip() for line in Path(file).read_text(encoding="utf-8").splitlines()]
    except OSError as error:
        raise dedup.ConfigError(f"The settings cannot be read: {error}.") from error
    pairs = [line.partition("=") for line in lines if line and not line.startswith("#")]
    return {name.strip(): value.strip() for name, _, value in pairs}
