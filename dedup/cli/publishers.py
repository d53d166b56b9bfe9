"""`dedup publishers`: what state each producer group is in, copies of it, and a person's decisions about it."""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import dedup
from dedup.cli.consumers import By, Reason, Yes, who
from dedup.cli.show import AsJson, print_json, print_table
from dedup.urls import StoreUrl, is_postgres, postgres_schema

if TYPE_CHECKING:
    from dedup.publishing.postgres import Publishers

Group = Annotated[str, typer.Argument(help="The producer group.", show_default=False)]
Topic = Annotated[str, typer.Option("--topic", help="Its event hub or topic, where it publishes to several.", show_default=False)]
Source = Annotated[str, typer.Option("--source", help="The broker, where two of them have that topic.", show_default=False)]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only show what would change; so it is without --yes, too.")]

NOTHING_DONE = "Nothing was changed. Repeat the command with --yes to do it; a publisher of this group that runs is fenced then."
AGE = re.compile(r"(\d+)([dh])")

commands = typer.Typer(help="The state of publishers, and decisions about it. It is kept in PostgreSQL.", no_args_is_help=True)


def register(app: typer.Typer) -> None:
    """Add `dedup publishers ...`."""
    app.add_typer(commands, name="publishers")


@contextmanager
def _opened(store: str) -> Iterator[Publishers]:
    if not store or not is_postgres(store):
        raise dedup.ConfigError("Publishers keep their state in PostgreSQL. Use --store postgresql://..., or set DEDUP_STORE.")
    from dedup.publishing.postgres import Publishers

    publishers = Publishers(store, postgres_schema())
    try:
        yield publishers
    finally:
        publishers.close()


@commands.command("list", epilog="Example: dedup publishers list --store postgresql://localhost/shop --json")
def list_(store: StoreUrl = "", as_json: AsJson = False) -> None:
    """All producer groups: who owns them, and what waits to be confirmed by the broker."""
    with _opened(store) as publishers:
        rows = [{name: value for name, value in row.items() if name != "id"} for row in publishers.everything()]
    if as_json:
        print_json(rows)
        return
    columns = ["source", "topic", "group", "owner_level", "partitions", "host", "pid", "waiting", "waiting_since"]
    print_table([name.replace("_", " ") for name in columns], [[row[c] for c in columns] for row in rows], empty="no publishers yet")


@commands.command(epilog="Example: dedup publishers show shop --store postgresql://localhost/shop")
def show(group: Group, topic: Topic = "", source: Source = "", store: StoreUrl = "", as_json: AsJson = False) -> None:
    """One producer group: its sequence numbers in each partition (-1: the broker chooses it), and the oldest events that wait."""
    with _opened(store) as publishers:
        found = publishers.one(group, topic, source)
        lanes, waiting = publishers.lanes(found), publishers.waiting(found)
    document = {**{name: value for name, value in found.items() if name != "id"}, "lanes": lanes, "oldest": waiting}
    if as_json:
        print_json(document)
        return
    print_table(["", group], [(name.replace("_", " "), value) for name, value in found.items() if name not in ("id", "group")])
    print_table(list(LANE), [[lane[c] for c in LANE] for lane in lanes], title="sequence numbers", empty="nothing published yet")
    print_table(list(EVENT), [[event[c] for c in EVENT] for event in waiting], title="not confirmed, oldest first", empty="none")


LANE = ("partition", "next_sequence", "confirmed", "waiting_since")
EVENT = ("partition", "sequence", "message_id", "key", "bytes", "stored_at")


@commands.command(epilog="Example: dedup publishers copy shop shop.jsonl --store postgresql://localhost/shop")
def copy(
    group: Group,
    file: Annotated[Path, typer.Argument(help="The file to be written.", show_default=False)],
    topic: Topic = "",
    source: Source = "",
    store: StoreUrl = "",
) -> None:
    """Write the whole state of a producer group into a file: numbers, events that wait, ids."""
    with _opened(store) as publishers, file.open("w", encoding="utf-8") as into:
        into.writelines(f"{line}\n" for line in publishers.copy(publishers.one(group, topic, source)))
    typer.echo(f"{group}: copied to {file}.")


@commands.command(epilog="Example: dedup publishers restore shop.jsonl --reason 'the database is lost' --yes")
def restore(
    file: Annotated[Path, typer.Argument(help="What `copy` wrote.", show_default=False)],
    store: StoreUrl = "",
    dry_run: DryRun = False,
    as_json: AsJson = False,
    yes: Yes = False,
    by: By = "",
    reason: Reason = "",
) -> None:
    """Put a copy in the place of what the producer group has now. Publish again, with the same ids, what came after the copy."""
    from dedup.publishing.postgres import read_copy

    if not file.is_file():
        raise dedup.ConfigError(f"There is no file {file}.")
    with _opened(store) as publishers, file.open(encoding="utf-8") as lines:
        head, rows = read_copy(lines)
        if dry_run or not yes:
            kinds = [kind for kind, _ in rows]
            counts = {kind: kinds.count(kind) for kind in ("lane", "event", "id")}
        else:
            lines.seek(0)
            counts = dict(publishers.restore(lines, who(by), reason))
        now = [row for row in publishers.everything() if all(row[name] == head[name] for name in ("source", "topic", "group"))]
    document = {**head, **{f"{kind}s": count for kind, count in counts.items()}, "waiting_now": now[0]["waiting"] if now else 0}
    _tell(document, as_json, yes and not dry_run)


@commands.command("set-partitions", epilog="Example: dedup publishers set-partitions shop 32 --reason 'the hub has grown' --yes")
def set_partitions(
    group: Group,
    partitions: Annotated[int, typer.Argument(min=1, help="Over how many partitions keys are spread.", show_default=False)],
    topic: Topic = "",
    source: Source = "",
    store: StoreUrl = "",
    dry_run: DryRun = False,
    as_json: AsJson = False,
    yes: Yes = False,
    by: By = "",
    reason: Reason = "",
) -> None:
    """Spread keys over another number of partitions. Order of a key is not kept over that change: let consumers catch up before."""
    with _opened(store) as publishers:
        found = publishers.one(group, topic, source)
        if yes and not dry_run:
            publishers.spread(found, partitions, who(by), reason)
    _tell({"group": group, "topic": found["topic"], "now": found["partitions"], "then": partitions}, as_json, yes and not dry_run)


@commands.command(epilog="Example: dedup publishers discard shop --partition 3 --sequence 77 --reason 'too large' --yes")
def discard(
    group: Group,
    topic: Topic = "",
    source: Source = "",
    partition: Annotated[int | None, typer.Option(help="Only of this partition.", show_default=False)] = None,
    sequence: Annotated[int | None, typer.Option(help="Only with this sequence number.", show_default=False)] = None,
    store: StoreUrl = "",
    dry_run: DryRun = False,
    as_json: AsJson = False,
    yes: Yes = False,
    by: By = "",
    reason: Reason = "",
) -> None:
    """Give up events that are stored and not confirmed: they are not sent again. The broker may have them all the same."""
    with _opened(store) as publishers:
        found = publishers.one(group, topic, source)
        waiting = publishers.waiting(found, partition, sequence, most=found["waiting"])
        if yes and not dry_run:
            publishers.discard(found, partition, sequence, who(by), reason)
    _tell({"group": group, "topic": found["topic"], "discarded": len(waiting)}, as_json, yes and not dry_run)


@commands.command(epilog="Example: dedup publishers purge --older-than 14d --yes")
def purge(
    older_than: Annotated[str, typer.Option("--older-than", help="Age of the ids to be forgotten: 14d, 36h.", show_default=False)],
    store: StoreUrl = "",
    dry_run: DryRun = False,
    as_json: AsJson = False,
    yes: Yes = False,
) -> None:
    """Forget ids that were published and confirmed so long ago. One that is published again is sent again: consumers still know it."""
    found = AGE.fullmatch(older_than)
    if not found:
        raise dedup.ConfigError(f"--older-than is an age such as 14d or 36h, not {older_than!r}.")
    age = dt.timedelta(**{{"d": "days", "h": "hours"}[found[2]]: int(found[1])})
    before = dt.datetime.now(dt.UTC) - age
    with _opened(store) as publishers:
        count = publishers.purge(before) if yes and not dry_run else publishers.purgeable(before)
    _tell({"ids": count, "published_before": before}, as_json, yes and not dry_run)


def _tell(document: dict[str, Any], as_json: bool, done: bool) -> None:
    if as_json:
        print_json({**document, "done": done})
        return
    print_table(["", ""], [(name.replace("_", " "), value) for name, value in document.items()])
    typer.echo("done" if done else NOTHING_DONE)
