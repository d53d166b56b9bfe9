"""`dedup checkpoint`: where consumers and event processors stand; moving that; showing it to others, in blobs and consumer groups."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

import dedup
from checkpoint import changes
from checkpoint.changes import Move
from checkpoint.errors import Refused
from checkpoint.head import Checkpoint, Head
from checkpoint.install import needs
from checkpoint.mirror import Mirror, Mirrored
from checkpoint.position import Partition
from checkpoint.processors import Group, Position
from checkpoint.start import Place, next_positions
from dedup.cli.brokers import AnyKafka, BrokerName, EventHubs, KafkaSettings, connection_string, kafka_address, settings_of
from dedup.cli.consumer import CHECKPOINTS, checkpoint_rows
from dedup.cli.options import AnyName, By, Commands, Reason, Topics, Yes, duration, who
from dedup.cli.options import Name as ConsumerName
from dedup.cli.show import NOTHING_DONE, AsJson, print_json, print_table
from dedup.core.store import Store
from dedup.urls import StoreUrl, check_consumer, is_postgres, open_store, postgres_schema

if TYPE_CHECKING:
    from azure.storage.blob import ContainerClient

    from checkpoint import PostgresCheckpointStore
    from dedup.kafka import Broker

Name = Annotated[
    str,
    typer.Argument(help="The consumer's name. Without it: event processors that use PostgresCheckpointStore.", show_default=False),
]
Namespace = Annotated[
    str, typer.Option("--namespace", help="The host name of the namespace: name.servicebus.windows.net.", show_default=False)
]
Hub = Annotated[str, typer.Option("--hub", help="The event hub.", show_default=False)]
ConsumerGroup = Annotated[str, typer.Option("--group", help="The consumer group.")]
Source = Annotated[
    str, typer.Option("--source", help="The name of the broker in the consumer's state.  [default: the namespace]", show_default=False)
]
Blob = Annotated[
    str,
    typer.Option(
        "--blob",
        metavar="VARIABLE",
        help="The environment variable with the storage account's connection string, or with the container's signed URL.",
    ),
]
Every = Annotated[
    Any,
    typer.Option(
        "--every",
        parser=duration,
        metavar="DURATION",
        help="Repeat at this interval until stopped: 30s.  [default: once]",
        show_default=False,
    ),
]
Container = Annotated[str, typer.Option("--container", help="The blob container. Leave it out if --blob is a URL.", show_default=False)]


commands = Commands(
    help="Checkpoints: the positions up to which everything is decided.",
    epilog="Example: dedup checkpoint list orders --store /lake/dedup",
    no_args_is_help=True,
)


def register(app: typer.Typer) -> None:
    """Add `dedup checkpoint ...`."""
    app.add_typer(commands, name="checkpoint")


@commands.command("list", epilog="Example: dedup checkpoint list orders --store postgresql://localhost/shop --json")
def list_(name: AnyName = "", store: StoreUrl = "", as_json: AsJson = False) -> None:
    """List the checkpoints of one consumer or of all.

    A checkpoint is the position of a partition up to which everything is decided.
    """
    opened = open_store(store)
    if name:
        check_consumer(opened, name)
    rows = [{"consumer": n, **row} for n in ([name] if name else opened.consumers()) for row in checkpoint_rows(opened.head(n))]
    if as_json:
        print_json(rows)
        return
    print_table(["consumer", *CHECKPOINTS], [list(row.values()) for row in rows], empty="no checkpoints yet")


@commands.command("set", epilog="Example: dedup checkpoint set orders --source broker --topic orders --partition 0 --to 4711 --yes")
def set_(
    partition: Annotated[int, typer.Option("--partition", min=0, max=2**31 - 1, help="The number of the partition.", show_default=False)],
    to: Annotated[
        int,
        typer.Option(
            "--to",
            min=-1,
            max=2**63 - 1,
            help="The sequence number (Kafka: offset) of the last position that counts as handled; -1: no position does.",
            show_default=False,
        ),
    ],
    name: Name = "",
    topic: Annotated[str, typer.Option("--topic", help="The consumer's topic.", show_default=False)] = "",
    source: Source = "",
    namespace: Namespace = "",
    hub: Hub = "",
    group: ConsumerGroup = "$Default",
    offset: Annotated[
        str, typer.Option("--offset", help="The offset of that event in Event Hubs, if you know it.", show_default=False)
    ] = "",
    store: StoreUrl = "",
    as_json: AsJson = False,
    yes: Yes = False,
    by: By = "",
    reason: Reason = "",
) -> None:
    """Move one checkpoint by hand.

    The command shows which positions the move skips or repeats. Stop the consumer first. The checkpoint of a consumer (NAME, --topic) moves
    forward only; the positions in between become an accepted gap. The checkpoint of event processors (--namespace, --hub, --group) also
    moves back; their handlers then handle the same events again.
    """
    if not name:
        decided = Decided(yes, who(by), reason, as_json)
        _set_processors(_processors(store), _group(namespace, hub, group), str(partition), to, offset or None, decided)
        return
    opened = open_store(store)
    check_consumer(opened, name)
    head = opened.head(name)
    where = Partition(_source(head, source or namespace.lower(), topic or hub), topic or hub, partition)
    _move(opened, name, changes.plan(opened, head, {where: Checkpoint(to, offset or None)}), Decided(yes, who(by), reason, as_json))


class Decided(NamedTuple):
    """A person's decision, and how to show it."""

    yes: bool
    by: str
    reason: str
    as_json: bool

    def tell(
        self, what: str, moves: list[tuple[Any, ...]], done: str, *, nothing: str = "nothing to change", left_out: Sequence[str] = ()
    ) -> None:
        """Print what moves: (partition, now, then, what it means) each.

        Args:
            what: is moved: the consumer, or the group of event processors.
            done: a sentence for what was done.
            nothing: the same where there are no moves.
            left_out: sentences about what is not moved.
        """
        if self.as_json:
            rows = [dict(zip(MOVE, move, strict=True)) for move in moves]
            print_json({"of": what, "moves": rows, "left_out": list(left_out), "done": self.yes and bool(moves)})
            return
        for one in left_out:
            typer.echo(one)
        if not moves:
            typer.echo(f"{what}: {nothing}.")
            return
        print_table(MOVE, moves, title=what)
        typer.echo(f"{what}: {done}" if self.yes else NOTHING_DONE)


MOVE = ["partition", "now", "then", "meaning"]


def _source(head: Head, source: str, topic: str) -> str:
    """The source that is meant: the one that was named, or the only one that the consumer reads this topic from."""
    if not topic:
        raise dedup.ConfigError("A consumer has a checkpoint for each partition of a topic: give --topic.")
    known = sorted({p.source for p in head.checkpoints if p.topic == topic})
    if source or len(known) == 1:
        return source or known[0]
    raise dedup.ConfigError(
        f"Name the --source of topic {topic!r}. This consumer reads that topic from: {', '.join(known) or 'no source'}."
    )


def _move(store: Store, name: str, moves: list[Move], decided: Decided, left_out: Sequence[str] = ()) -> None:
    """Show what moving checkpoints of a consumer means and, with `--yes`, do it. Crash: all of them are moved or none."""
    if decided.yes and moves:
        changes.move(store, name, moves, by=decided.by, reason=decided.reason)
    rows = [(str(m.partition), m.now, m.then.sequence_number, m.told) for m in moves]
    decided.tell(name, rows, "done. A running stream does not notice: start it again at its checkpoints.", left_out=left_out)


def _set_processors(store: PostgresCheckpointStore, group: Group, partition: str, to: int, offset: str | None, decided: Decided) -> None:
    """Show what the checkpoint of event processors means at its new place and, with `--yes`, put it there. Crash: it is moved or not."""
    now = next((int(p["sequence_number"]) for p in store.list_checkpoints(*group) if p["partition_id"] == partition), None)
    moves = [] if now == to else [(partition, now, to, _meaning(now, to))]
    if decided.yes and moves:
        moved = store.set_checkpoint(group, partition, to, seen=now, offset=offset, by=decided.by, reason=decided.reason)
        if not moved:
            raise Refused(f"{group}, partition {partition}: the checkpoint has moved meanwhile. Stop the processors, and look again.")
    decided.tell(str(group), moves, "done. Processors use it when they claim the partition next.")


def _meaning(now: int | None, to: int) -> str:
    if now is None:
        return f"begins behind {to}"
    if to > now:
        return f"{now + 1}-{to} are skipped: nobody handles them"
    return f"{to + 1}-{now} are handled again: their effects are repeated where the handler does not recognise them"


@commands.command(
    epilog="Example: dedup checkpoint import-blob orders --namespace n.servicebus.windows.net --hub orders --container c --yes"
)
def import_blob(
    name: Name = "",
    namespace: Namespace = "",
    hub: Hub = "",
    group: ConsumerGroup = "$Default",
    source: Source = "",
    blob: Blob = "AZURE_STORAGE_CONNECTION_STRING",
    container: Container = "",
    store: StoreUrl = "",
    as_json: AsJson = False,
    yes: Yes = False,
    by: By = "",
    reason: Reason = "",
) -> None:
    """Copy checkpoints from Blob storage.

    The command copies checkpoints that BlobCheckpointStore has written, if they are ahead of ours. Stop the processors that write them
    first. With NAME the consumer begins behind these positions; what lies before them counts as handled by another system.
    """
    blobs, named = _blobs(), _group(namespace, hub, group)
    processors, opened = (None, open_store(store, new=True)) if name else (_processors(store), None)
    with _container(blob, container) as there:
        kept = blobs.kept(there, named)
    if not kept:
        raise dedup.ConfigError(f"The container has no checkpoint of {named}. Check --namespace, --hub, --group and the container.")
    found = blobs.positions(kept, named)
    left_out = [f"partition {p.partition}: its blob holds no sequence number, and is left out." for p in kept if p.sequence_number is None]
    decided = Decided(yes, who(by), reason or f"imported from Blob storage: {named}", as_json)
    if opened is not None:
        head = opened.head(name)
        wanted = changes.wanted_of(found, source or namespace.lower(), hub)  # as `Connection.source` has it
        ahead = {p: c for p, c in wanted.items() if p not in head.checkpoints or head.checkpoints[p].sequence_number < c.sequence_number}
        _move(opened, name, changes.plan(opened, head, ahead), decided, left_out)
    elif processors is not None:
        _import_processors(processors, named, found, decided, left_out)


def _import_processors(
    store: PostgresCheckpointStore, group: Group, found: list[Position], decided: Decided, left_out: Sequence[str]
) -> None:
    """Show what an import moves and, with `--yes`, do it. Crash: all of it is taken over or nothing; repeat the command."""
    ours = {p["partition_id"]: int(p["sequence_number"]) for p in store.list_checkpoints(*group)}
    ahead = [p for p in found if ours.get(p["partition_id"], -1) < p["sequence_number"]]
    count = len(store.import_checkpoints(group, ahead, by=decided.by, reason=decided.reason)) if decided.yes and ahead else 0
    rows = [(p["partition_id"], ours.get(p["partition_id"]), p["sequence_number"], f"begins behind {p['sequence_number']}") for p in ahead]
    decided.tell(
        str(group),
        rows,
        f"{count} checkpoints imported",
        nothing=f"nothing to import; {len(found)} checkpoints are there",
        left_out=left_out,
    )


@commands.command(
    epilog="Example: dedup checkpoint mirror-blob orders --namespace n.servicebus.windows.net --hub orders --container c --every 30s --yes"
)
def mirror_blob(
    name: Name = "",
    namespace: Namespace = "",
    hub: Hub = "",
    group: ConsumerGroup = "$Default",
    source: Source = "",
    blob: Blob = "AZURE_STORAGE_CONNECTION_STRING",
    container: Container = "",
    every: Every = None,
    backwards: Annotated[bool, typer.Option("--backwards", help="Also overwrite blobs that are ahead of our checkpoints.")] = False,
    store: StoreUrl = "",
    as_json: AsJson = False,
    yes: Yes = False,
) -> None:
    """Copy checkpoints to Blob storage.

    The command writes our checkpoints to the blobs where BlobCheckpointStore keeps its own. KEDA and Azure's tools then see the lag.

    Crash: each blob is written or not; the next run writes the rest.
    """
    blobs, named = _blobs(), _group(namespace, hub, group)
    read = _reader(store, name, named, source or namespace)
    if not every and not read():
        raise dedup.ConfigError(f"There is no checkpoint of {name or named} in {source or namespace}/{hub}: there is nothing to mirror.")
    with _container(blob, container) as there:
        done = blobs.mirror(there, named, read(), backwards=backwards, dry_run=not yes)
        _print_mirrored(done, named, "every blob", yes, as_json)
        if yes and every:
            _until_stopped(blobs.BlobMirror(there, named, read, every=every.total_seconds()))


@commands.command(epilog="Example: dedup checkpoint mirror-group orders --kafka localhost:9092 --every 30s --yes")
def mirror_group(
    name: ConsumerName,
    kafka: AnyKafka = "",
    kafka_settings: KafkaSettings = "",
    eventhubs: EventHubs = "",
    group: Annotated[
        str, typer.Option("--group", help="The consumer group of Kafka.  [default: the consumer's name]", show_default=False)
    ] = "",
    topic: Topics = None,
    source: BrokerName = "",
    every: Every = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Also move positions that another program has committed.")] = False,
    store: StoreUrl = "",
    as_json: AsJson = False,
    yes: Yes = False,
) -> None:
    """Copy checkpoints to a consumer group of Kafka.

    Monitors of lag that read consumer groups then see the consumer. For each partition the command commits the position after the
    checkpoint. Take a group that no program reads with. The login needs the right to read with it.

    Crash: each position is committed or not; the next run commits the rest.
    """
    opened = open_store(store)
    check_consumer(opened, name)
    broker = _broker(kafka, kafka_settings, eventhubs)
    from dedup.kafka import GroupMirror
    from dedup.kafka.group import mirror

    def read() -> dict[Place, int]:
        return next_positions(opened.head(name), topic or (), source or None)

    named, ours = group or name, read()
    if missing := sorted(set(topic or ()) - {place[0] for place in ours}) or ([] if ours else ["any topic"]):
        raise dedup.ConfigError(f"Consumer {name!r} has no checkpoint of {', '.join(missing)}: there is nothing to mirror.")
    done = mirror(broker, named, ours, overwrite=overwrite, dry_run=not yes)
    _print_mirrored(done, f"consumer group {named}", "the group", yes, as_json)
    if yes and every:
        _until_stopped(GroupMirror(broker, named, read, every=every.total_seconds(), overwrite=overwrite))


def _until_stopped(mirror: Mirror) -> None:
    """Until Ctrl-C or SIGTERM, and then a last look."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with mirror, contextlib.suppress(KeyboardInterrupt):
            mirror.wait()
    finally:
        signal.signal(signal.SIGTERM, before)


def _broker(kafka: str, settings: str, eventhubs: str) -> Broker:
    """The broker that is named, by Kafka's protocol. Raises ConfigError where none is, or two are."""
    from dedup import kafka as by_kafka

    if kafka := kafka_address(kafka, settings, eventhubs):
        return by_kafka.Broker(kafka, settings_of(settings))
    if eventhubs:
        return by_kafka.EventHubs.connection_string(connection_string(eventhubs)).broker()
    raise dedup.ConfigError("Name the broker: --kafka host:9092, or --eventhubs VARIABLE.")


_TOLD = {
    "written": "{}",
    "ahead": "left alone, the blob is ahead of our checkpoint (--backwards overwrites it)",
    "foreign": "left alone, another program has committed there (--overwrite moves it)",
    "unknown": "left alone, the offset is not known: a processor could not resume there",
    "raced": "another process wrote at the same time; the next run looks again",
}


def _print_mirrored(done: Mirrored, what: object, there: str, yes: bool, as_json: bool) -> None:
    found: dict[str, list[str]] = {kind: list(getattr(done, kind)) for kind in _TOLD}
    if as_json:
        print_json({"of": str(what), **found, "done": yes})
        return
    for kind, partitions in found.items():
        if not partitions:
            continue
        told = _TOLD[kind].format("written" if yes else "would be written")
        typer.echo(f"{what}: {told}: partitions {', '.join(partitions)}")
    if not yes:
        typer.echo(NOTHING_DONE)
    elif not any(found.values()):
        typer.echo(f"{what}: {there} says what our checkpoints say")


def _reader(store: str, name: str, group: Group, source: str) -> Any:
    """What gives the checkpoints to mirror."""
    if not name:
        processors = _processors(store)
        return lambda: processors.list_checkpoints(*group)
    opened = open_store(store)
    check_consumer(opened, name)
    return lambda: changes.positions_of(opened.head(name), group, source)


def _processors(url: str) -> PostgresCheckpointStore:
    """The store of event processors. Raises ConfigError where the URL is not PostgreSQL's."""
    if not is_postgres(url):
        raise dedup.ConfigError("Event processors keep their checkpoints in PostgreSQL: give --store postgresql://..., or name a consumer.")
    from checkpoint import PostgresCheckpointStore

    return PostgresCheckpointStore(url, postgres_schema(), auto_migrate=False)


def _group(namespace: str, hub: str, group: str) -> Group:
    if not (namespace and hub):
        raise dedup.ConfigError("Name the event hub: give --namespace and --hub.")
    return Group(namespace, hub, group)


def _container(variable: str, name: str) -> ContainerClient:
    """The container. Raises ConfigError without showing what the variable holds."""
    address = os.environ.get(variable)
    if not address:
        raise dedup.ConfigError(
            f"The variable {variable} is empty. Put the account's connection string there, or name another variable with --blob."
        )
    container: ContainerClient = _blobs().container_at(address, name or None)
    return container


def _blobs() -> ModuleType:
    """checkpoint.blob. Raises ImportError with the extra to install."""
    try:
        return importlib.import_module("checkpoint.blob")
    except ModuleNotFoundError as missing:
        raise ImportError(needs("Blob storage", missing.name, "blob")) from missing
