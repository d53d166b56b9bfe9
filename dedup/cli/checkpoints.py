"""`dedup checkpoints`: where consumers and event processors stand, and moving that: from Blob storage, to Blob storage, by hand."""

from __future__ import annotations

import contextlib
import importlib
import os
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

import dedup
from checkpoint import changes
from checkpoint.changes import Move
from checkpoint.head import Checkpoint, Head
from checkpoint.install import needs
from checkpoint.position import Partition
from checkpoint.processors import Group, Position
from dedup.cli.consumers import CHECKPOINTS, By, Reason, Yes, checkpoint_rows, who
from dedup.cli.show import AsJson, print_json, print_table
from dedup.core.store import Store
from dedup.urls import StoreUrl, check_consumer, is_postgres, open_store, postgres_schema

if TYPE_CHECKING:
    from azure.storage.blob import ContainerClient

    from checkpoint import PostgresCheckpointStore

NOTHING_DONE = "Nothing was changed. Repeat the command with --yes to do it."

Name = Annotated[
    str, typer.Argument(help="A consumer; without it: what event processors keep with PostgresCheckpointStore.", show_default=False)
]
Namespace = Annotated[str, typer.Option("--namespace", help="Host name: name.servicebus.windows.net.", show_default=False)]
Hub = Annotated[str, typer.Option("--hub", help="The event hub.", show_default=False)]
ConsumerGroup = Annotated[str, typer.Option("--group", help="The consumer group.")]
Source = Annotated[str, typer.Option("--source", help="What the consumer calls it.  [default: the namespace]", show_default=False)]
Blob = Annotated[
    str,
    typer.Option(
        "--blob",
        metavar="VARIABLE",
        help="The variable that holds the storage account's connection string, or the container's URL with a signature.",
    ),
]
Container = Annotated[str, typer.Option("--container", help="The container; not with a URL.", show_default=False)]


class _ListFirst(TyperGroup):
    """What is not the name of a command is an argument of `list`: `dedup checkpoints orders`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args or (args[0] not in self.commands and args[0] != "--help"):
            args = ["list", *args]
        return super().parse_args(ctx, args)


commands = typer.Typer(cls=_ListFirst, help="Where consumers and event processors stand. Without a command: `list`.")


def register(app: typer.Typer) -> None:
    """Add `dedup checkpoints ...`."""
    app.add_typer(commands, name="checkpoints")


@commands.command("list", epilog="Example: dedup checkpoints list orders --store postgresql://localhost/shop --json")
def list_(name: Annotated[str, typer.Argument(show_default=False)] = "", store: StoreUrl = "", as_json: AsJson = False) -> None:
    """How far each partition is decided, of one consumer or of all."""
    opened = open_store(store)
    if name:
        check_consumer(opened, name)
    rows = [{"consumer": n, **row} for n in ([name] if name else opened.consumers()) for row in checkpoint_rows(opened.head(n))]
    if as_json:
        print_json(rows)
        return
    print_table(["consumer", *CHECKPOINTS], [list(row.values()) for row in rows], empty="no checkpoints yet")


@commands.command("set", epilog="Example: dedup checkpoints set orders --source broker --topic orders --partition 0 --to 4711 --yes")
def set_(
    partition: Annotated[int, typer.Option("--partition", help="Its number.", show_default=False)],
    to: Annotated[int, typer.Option("--to", help="The sequence number to go on behind; -1: all.", show_default=False)],
    name: Name = "",
    topic: Annotated[str, typer.Option("--topic", help="The consumer's topic.", show_default=False)] = "",
    source: Source = "",
    namespace: Namespace = "",
    hub: Hub = "",
    group: ConsumerGroup = "$Default",
    offset: Annotated[str, typer.Option("--offset", help="What Event Hubs calls that event's offset, if known.", show_default=False)] = "",
    store: StoreUrl = "",
    yes: Yes = False,
    by: By = "",
    reason: Reason = "",
) -> None:
    """Move one checkpoint by hand, and tell what that skips or repeats. Stop the consumer first.

    Of a consumer (NAME, --topic): forward only, which passes positions over as an accepted gap. Of event processors (--namespace, --hub,
    --group): also back, which repeats every effect that their handlers do not recognise.
    """
    if not name:
        _set_processors(_processors(store), _group(namespace, hub, group), str(partition), to, offset or None, yes, who(by), reason)
        return
    opened = open_store(store)
    check_consumer(opened, name)
    head = opened.head(name)
    where = Partition(_source(head, source or namespace, topic or hub), topic or hub, partition)
    _move(opened, name, changes.plan(opened, head, {where: Checkpoint(to, offset or None)}), yes, by, reason)


def _source(head: Head, source: str, topic: str) -> str:
    """The source that is meant: the one that was named, or the only one that the consumer reads this topic from."""
    if not topic:
        raise dedup.ConfigError("The checkpoint of a consumer is one of a topic: give --topic.")
    known = sorted({p.source for p in head.checkpoints if p.topic == topic})
    if source or len(known) == 1:
        return source or known[0]
    raise dedup.ConfigError(
        f"Topic {topic!r} has to be named with its --source, of which this consumer knows: {', '.join(known) or 'none'}."
    )


def _move(store: Store, name: str, moves: list[Move], yes: bool, by: str, reason: str) -> None:
    """Show what moving checkpoints of a consumer means and, with `yes`, do it. Crash: all of them are moved or none."""
    if not moves:
        typer.echo(f"{name}: nothing to change.")
        return
    rows = [(str(m.partition), m.now, m.then.sequence_number, m.told) for m in moves]
    print_table([name, "now", "then", "what it means"], rows)
    if not yes:
        typer.echo(NOTHING_DONE)
        return
    seq = changes.move(store, name, moves, by=who(by), reason=reason).seq
    typer.echo(f"{name}: done, as decision {seq}. A stream that runs is not moved by it: start it anew at its checkpoints.")


def _set_processors(
    store: PostgresCheckpointStore, group: Group, partition: str, to: int, offset: str | None, yes: bool, by: str, reason: str
) -> None:
    """Show what the checkpoint of event processors means at its new place and, with `yes`, put it there. Crash: it is moved or not."""
    now = next((int(p["sequence_number"]) for p in store.list_checkpoints(*group) if p["partition_id"] == partition), None)
    if now == to:
        typer.echo(f"{group}, partition {partition}: nothing to change.")
        return
    print_table([str(group), "now", "then", "what it means"], [(f"partition {partition}", now, to, _meaning(now, to))])
    if not yes:
        typer.echo(NOTHING_DONE)
    elif store.set_checkpoint(group, partition, to, seen=now, offset=offset, by=by, reason=reason):
        typer.echo(f"{group}, partition {partition}: done. Processors take it up when they claim the partition next.")
    else:
        raise dedup.ConfigError(f"{group}, partition {partition}: the checkpoint has moved meanwhile. Stop the processors, and look again.")


def _meaning(now: int | None, to: int) -> str:
    if now is None:
        return f"begins behind {to}"
    if to > now:
        return f"{now + 1}-{to} are skipped: nobody handles them"
    return f"{to + 1}-{now} are handled again: their effects are repeated where the handler does not recognise them"


@commands.command(
    epilog="Example: dedup checkpoints import-blob orders --namespace n.servicebus.windows.net --hub orders --container c --yes"
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
    yes: Yes = False,
    by: By = "",
    reason: Reason = "",
) -> None:
    """Take over checkpoints of BlobCheckpointStore, where they are further on than ours. Stop what writes them first.

    With NAME they become where that consumer begins: what lies before counts as another system's.
    """
    blobs, named = _blobs(), _group(namespace, hub, group)
    processors, opened = (None, open_store(store)) if name else (_processors(store), None)
    with _container(blob, container) as there:
        kept = blobs.kept(there, named)
    for point in kept:
        if point.sequence_number is None:
            typer.echo(f"partition {point.partition}: its blob holds no sequence number, and is left out.")
    found = blobs.positions(kept, named)
    if opened is not None:
        head = opened.head(name)
        wanted = changes.wanted_of(found, source or namespace, hub)
        ahead = {p: c for p, c in wanted.items() if p not in head.checkpoints or head.checkpoints[p].sequence_number < c.sequence_number}
        _move(opened, name, changes.plan(opened, head, ahead), yes, by, reason or f"taken over from Blob storage: {named}")
    elif processors is not None:
        _import_processors(processors, named, found, yes)


def _import_processors(store: PostgresCheckpointStore, group: Group, found: list[Position], yes: bool) -> None:
    """Show what an import moves and, with `yes`, do it. Crash: all of it is taken over or nothing; repeat the command."""
    ours = {p["partition_id"]: int(p["sequence_number"]) for p in store.list_checkpoints(*group)}
    ahead = [p for p in found if ours.get(p["partition_id"], -1) < p["sequence_number"]]
    if not ahead:
        typer.echo(f"{group}: nothing to take over; {len(found)} checkpoints are there.")
        return
    print_table([str(group), "now", "then"], [(p["partition_id"], ours.get(p["partition_id"]), p["sequence_number"]) for p in ahead])
    typer.echo(f"{group}: {len(store.import_checkpoints(group, ahead))} taken over." if yes else NOTHING_DONE)


@commands.command(
    epilog="Example: dedup checkpoints mirror-blob orders --namespace n.servicebus.windows.net --hub orders --container c --every 30 --yes"
)
def mirror_blob(
    name: Name = "",
    namespace: Namespace = "",
    hub: Hub = "",
    group: ConsumerGroup = "$Default",
    source: Source = "",
    blob: Blob = "AZURE_STORAGE_CONNECTION_STRING",
    container: Container = "",
    every: Annotated[float, typer.Option("--every", min=0, help="Go on for ever, every so many seconds; 0: once.")] = 0,
    backwards: Annotated[bool, typer.Option("--backwards", help="Also blobs that are further on than we are.")] = False,
    store: StoreUrl = "",
    yes: Yes = False,
) -> None:
    """Write our checkpoints where BlobCheckpointStore keeps its own, so that KEDA and Azure's tools see the lag.

    Crash: each blob is written or not; the next look writes the rest.
    """
    blobs, named = _blobs(), _group(namespace, hub, group)
    read = _reader(store, name, named, source or namespace)
    with _container(blob, container) as there:
        done = blobs.mirror(there, named, read(), backwards=backwards, dry_run=not yes)
        for what, partitions in _TOLD.items():
            if found := getattr(done, what):
                typer.echo(f"{named}: {partitions.format('would be written' if not yes else 'written')}: partitions {', '.join(found)}")
        if not yes:
            typer.echo(NOTHING_DONE)
        elif every:
            with blobs.BlobMirror(there, named, read, every=every) as mirror, contextlib.suppress(KeyboardInterrupt):
                mirror.wait()


_TOLD = {
    "written": "{}",
    "ahead": "left alone, the blob is further on than we are (--backwards writes it all the same)",
    "unknown": "left alone, the offset is not known: a processor could not resume there",
    "raced": "somebody else wrote in between",
}


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
        raise dedup.ConfigError("Checkpoints of Event Hubs are those of a consumer group of a hub: give --namespace and --hub.")
    return Group(namespace, hub, group)


def _container(variable: str, name: str) -> ContainerClient:
    """The container. Raises ConfigError without showing what the variable holds."""
    address = os.environ.get(variable)
    if not address:
        raise dedup.ConfigError(
            f"The variable {variable} is empty. Put the account's connection string there, or name another with --blob."
        )
    container: ContainerClient = _blobs().container_at(address, name or None)
    return container


def _blobs() -> ModuleType:
    """checkpoint.blob. Raises ImportError with the extra to install."""
    try:
        return importlib.import_module("checkpoint.blob")
    except ModuleNotFoundError as missing:
        raise ImportError(needs("Blob storage", missing.name, "blob")) from missing
