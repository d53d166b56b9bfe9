"""`dedup publisher`: the state of producer groups, copies of it, and a person's decisions about it."""

from __future__ import annotations

import datetime as dt
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO

import typer

import dedup
from checkpoint.errors import command
from dedup.cli.options import By, Commands, Reason, Yes, duration, who
from dedup.cli.show import NOTHING_DONE, AsJson, print_fields, print_json, print_table
from dedup.reprocessing.whole_file import whole_file
from dedup.urls import StoreUrl, is_postgres, postgres_schema

if TYPE_CHECKING:
    from dedup.publishing.postgres import Publishers

Group = Annotated[str, typer.Argument(help="The producer group.", show_default=False)]
Topic = Annotated[str, typer.Option("--topic", help="The event hub or topic, if the group publishes to several.", show_default=False)]
Source = Annotated[str, typer.Option("--source", help="The broker, if two brokers have this topic.", show_default=False)]

COLUMNS = ["source", "topic", "group", "owner_level", "partitions", "host", "pid", "waiting", "waiting_since"]

commands = Commands(
    help="Publishers: their state, kept in PostgreSQL.",
    epilog="Example: dedup publisher list --store postgresql://localhost/shop",
    no_args_is_help=True,
)


def register(app: typer.Typer) -> None:
    """Add `dedup publisher ...`."""
    app.add_typer(commands, name="publisher")


@contextmanager
def _opened(store: str) -> Iterator[Publishers]:
    if not store or not is_postgres(store):
        raise dedup.ConfigError("Publishers keep their state in PostgreSQL. Use --store postgresql://..., or set DEDUP_STORE.")
    _ = dedup.PostgresStore  # says which extra to install where its driver is missing
    from dedup.publishing.postgres import Publishers

    publishers = Publishers(store, postgres_schema())
    try:
        yield publishers
    finally:
        publishers.close()


@commands.command("list", epilog="Example: dedup publisher list --store postgresql://localhost/shop --json")
def list_(store: StoreUrl = "", as_json: AsJson = False) -> None:
    """List all producer groups.

    Each row says who owns the group, and how many of its events wait for the broker's confirmation.
    """
    with _opened(store) as publishers:
        rows = [{name: value for name, value in row.items() if name != "id"} for row in publishers.everything()]
    if as_json:
        print_json(rows)
        return
    print_table(COLUMNS, [[row[c] for c in COLUMNS] for row in rows], empty="no publishers yet")


@commands.command(epilog="Example: dedup publisher show shop --store postgresql://localhost/shop")
def show(group: Group, topic: Topic = "", source: Source = "", store: StoreUrl = "", as_json: AsJson = False) -> None:
    """Show one producer group.

    The output has its sequence numbers in each partition, and the oldest events that wait for confirmation. Partition -1 is for events
    whose partition the broker chooses.
    """
    with _opened(store) as publishers:
        found = publishers.one(group, topic, source)
        lanes, waiting = publishers.lanes(found), publishers.waiting(found)
    document = {**{name: value for name, value in found.items() if name != "id"}, "lanes": lanes, "oldest": waiting}
    if as_json:
        print_json(document)
        return
    print_fields((name, value) for name, value in found.items() if name != "id")
    print_table(list(LANE), [[lane[c] for c in LANE] for lane in lanes], title="sequence numbers", empty="nothing published yet")
    print_table(list(EVENT), [[event[c] for c in EVENT] for event in waiting], title="not confirmed, the oldest first", empty="none")


LANE = ("partition", "next_sequence", "confirmed", "waiting_since")
EVENT = ("partition", "sequence", "message_id", "key", "bytes", "stored_at")


@commands.command("export", epilog="Example: dedup publisher export shop shop.jsonl --store postgresql://localhost/shop")
def export(
    group: Group,
    file: Annotated[Path, typer.Argument(help="The file to write.", show_default=False)],
    topic: Topic = "",
    source: Source = "",
    store: StoreUrl = "",
    as_json: AsJson = False,
) -> None:
    """Write the state of a producer group to a file.

    The file holds sequence numbers, events that wait, and ids. A file of this name stays as it is until the new one is whole.

    Crash: the file is there, whole, or as it was.
    """
    with _opened(store) as publishers:
        found = publishers.one(group, topic, source)
        with whole_file(file) as into:
            into.writelines(f"{line}\n".encode() for line in publishers.copy(found))
    if as_json:
        print_json({"group": group, "file": str(file)})
    else:
        typer.echo(f"{group}: exported to {file}.")


@commands.command("import", epilog="Example: dedup publisher import shop.jsonl --reason 'the database is lost' --yes")
def import_(
    file: Annotated[Path, typer.Argument(help="A file that `dedup publisher export` wrote.", show_default=False)],
    store: StoreUrl = "",
    as_json: AsJson = False,
    yes: Yes = False,
    by: By = "",
    reason: Reason = "",
) -> None:
    """Replace the state of a producer group.

    The exported state takes the place of the present one, and a running publisher of this group is fenced. Afterwards publish again, with
    the same ids, the events that were published after the export. A file that is not whole is refused.
    """
    from dedup.publishing.postgres import KINDS, read_copy

    with _opened(store) as publishers, _read(file) as lines:
        head, rows = read_copy(lines)
        if not yes:
            there = Counter(kind for kind, _ in rows)
            counts = {kind: there[kind] for kind in KINDS}
        else:
            lines.seek(0)
            counts = dict(publishers.restore(lines, who(by), reason))
        now = [row for row in publishers.everything() if all(row[name] == head[name] for name in ("source", "topic", "group"))]
    document = {**head, **{f"{kind}s": count for kind, count in counts.items()}, "waiting_now": now[0]["waiting"] if now else 0}
    _tell(document, as_json, yes)


def _read(file: Path) -> BinaryIO:
    if not file.is_file():
        raise dedup.ConfigError(f"There is no file {file}.")
    try:
        return file.open("rb")
    except OSError as error:
        raise dedup.ConfigError(f"{file} cannot be read: {error.strerror}.") from error


@commands.command("set-partitions", epilog="Example: dedup publisher set-partitions shop 32 --reason 'the hub has grown' --yes")
def set_partitions(
    group: Group,
    partitions: Annotated[int, typer.Argument(min=1, help="The number of partitions to spread keys over.", show_default=False)],
    topic: Topic = "",
    source: Source = "",
    store: StoreUrl = "",
    as_json: AsJson = False,
    yes: Yes = False,
    by: By = "",
    reason: Reason = "",
) -> None:
    """Spread keys over another number of partitions.

    A running publisher of this group is fenced. The order of a key is not kept across this change: let consumers catch up first.
    """
    with _opened(store) as publishers:
        found = publishers.one(group, topic, source)
        if yes:
            publishers.spread(found, partitions, who(by), reason)
    _tell({"group": group, "topic": found["topic"], "now": found["partitions"], "then": partitions}, as_json, yes)


@commands.command(epilog="Example: dedup publisher discard shop --partition 3 --sequence 77 --reason 'too large' --yes")
def discard(
    group: Group,
    topic: Topic = "",
    source: Source = "",
    partition: Annotated[int | None, typer.Option(help="Only events of this partition.", show_default=False)] = None,
    sequence: Annotated[int | None, typer.Option(help="Only the event with this sequence number.", show_default=False)] = None,
    store: StoreUrl = "",
    as_json: AsJson = False,
    yes: Yes = False,
    by: By = "",
    reason: Reason = "",
) -> None:
    """Give up events that were not confirmed.

    The events are not sent again; the broker may have received them all the same. A running publisher of this group is fenced, unless no
    event waits.
    """
    with _opened(store) as publishers:
        found = publishers.one(group, topic, source)
        waiting = publishers.waiting(found, partition, sequence, most=found["waiting"])
        if not waiting and (partition, sequence) != (None, None):
            raise dedup.ConfigError(f"No such event waits. {command('publisher', 'show', group)} shows those that wait.")
        count = len(waiting)
        if yes and waiting:  # else a running publisher would be fenced for nothing
            count = publishers.discard(found, partition, sequence, who(by), reason)
    _tell({"group": group, "topic": found["topic"], "discarded": count}, as_json, yes)


@commands.command(epilog="Example: dedup publisher purge --older-than 14d --yes")
def purge(
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
    """Delete old ids of confirmed events.

    An event that is published again with a deleted id is sent again; consumers that remember the id drop it as a duplicate.
    """
    before = dt.datetime.now(dt.UTC) - older_than
    with _opened(store) as publishers:
        count = publishers.purge(before) if yes else publishers.purgeable(before)
    _tell({"ids": count, "before": before}, as_json, yes)


def _tell(document: dict[str, Any], as_json: bool, done: bool) -> None:
    if as_json:
        print_json({**document, "done": done})
        return
    print_fields(document.items())
    typer.echo("done" if done else NOTHING_DONE)
