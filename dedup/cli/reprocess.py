"""`dedup dead-letters reprocess` and `dedup replay`: events that run through the user's handler again."""

from __future__ import annotations

import importlib.util
from dataclasses import asdict
from enum import StrEnum
from typing import Annotated, Any

import typer

import dedup
from deadletter.selection import Selection
from dedup.cli.consumers import By, Reason, Yes, who
from dedup.cli.options import OPTIONS, POSITIONS, find, progress, selecting
from dedup.cli.show import AsJson, print_json, print_table
from dedup.consumer import Consumer
from dedup.core.log import AnyLogReader
from dedup.reprocessing.letters import reprocess
from dedup.reprocessing.options import Reprocessed, ReprocessOptions
from dedup.reprocessing.replay import Replayed, replay


class FrameKind(StrEnum):
    """What handlers are given."""

    SPARK = "spark"
    ARROW = "arrow"


Target = Annotated[
    str,
    typer.Argument(
        metavar="MODULE:ATTRIBUTE",
        help="Where the Consumer is, as uvicorn and celery find theirs: `shop.stream:consumer`. Its module must not start the stream.",
        show_default=False,
    ),
]
Frame = Annotated[
    FrameKind | None,
    typer.Option("--frames", help="What the handler takes.  [default: spark where pyspark is installed]", show_default=False),
]
SkipMissing = Annotated[bool, typer.Option("--skip-missing", help="Go on without positions that the log does not have any more.")]

FILTERS = tuple(name for name in OPTIONS if name not in ("consumer", "status"))
"""The consumer is the one that is named, and what can be run is what is open or blocked."""

NOTHING_RUN = "Nothing was run. Repeat the command with --yes to do it."


def register(app: typer.Typer, letters: typer.Typer) -> None:
    """Add the commands."""
    letters.command("reprocess", epilog="Example: dedup dead-letters reprocess shop.stream:consumer --topic orders --from 1000 --to 2000")(
        reprocess_
    )
    app.command("replay", epilog="Example: dedup replay shop.stream:consumer --topic orders --partition 3 --from 1000 --to 2000 --yes")(
        replay_
    )


@selecting(only=FILTERS)
def reprocess_(
    target: Target,
    selection: Selection,
    from_log: Annotated[
        bool, typer.Option("--from-log", help="Run no letters, but positions of the range that were never delivered.")
    ] = False,
    skip_missing: SkipMissing = False,
    rate: Annotated[float | None, typer.Option(help="At most so many letters a second.", show_default=False)] = None,
    stop_after: Annotated[int, typer.Option(min=1, help="Stop when so many in a row failed again.")] = 20,
    frames: Frame = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would be run; so it is without --yes, too.")] = False,
    as_json: AsJson = False,
    yes: Yes = False,
    by: By = "",
    reason: Reason = "",
) -> None:
    """Send dead letters through the handler again, while the stream goes on. Safe to stop at any moment and to repeat."""
    consumer, look = _consumer(target), dry_run or not yes
    spark = None if look else _session(consumer, frames)
    with progress("reprocessing") as told:
        options = ReprocessOptions(who(by), reason or None, selection.limit, rate, stop_after, skip_missing, told)
        done = reprocess(selection, consumer, spark=spark, from_log=from_log, dry_run=look, options=options)
    if as_json:
        print_json(_plain(done))
        return
    _print_reprocessed(done, from_log)
    if look:
        typer.echo(NOTHING_RUN)


@selecting(limit=None, only=POSITIONS)
def replay_(
    target: Target,
    selection: Selection,
    accept_double: Annotated[
        bool, typer.Option("--accept-double", help="Let tx.write append again what it wrote before. Nothing takes the old rows back.")
    ] = False,
    accept_other_keys: Annotated[
        bool,
        typer.Option("--accept-other-keys", help="Decode reads other keys on purpose: do not compare the log."),
    ] = False,
    skip_missing: SkipMissing = False,
    frames: Frame = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would be run; so it is without --yes, too.")] = False,
    as_json: AsJson = False,
    yes: Yes = False,
    by: By = "",
    reason: Reason = "",
) -> None:
    """Repeat positions that were processed, on purpose: the handler had a bug.

    It replaces what tx.merge wrote, or takes back the old effect with @consumer.undo. Events are read again through @consumer.log.
    """
    consumer, look = _consumer(target), dry_run or not yes
    if not look:
        _session(consumer, frames)
    with progress("replaying") as told:
        options = ReprocessOptions(who(by), reason or None, skip_missing=skip_missing, on_progress=told)
        accepted = {"accept_double": accept_double, "accept_other_keys": accept_other_keys}
        done = replay(selection, consumer, **accepted, dry_run=look, options=options)
    if as_json:
        print_json(_plain(done))
        return
    _print_replayed(done)
    if look:
        typer.echo(NOTHING_RUN)


def _consumer(target: str) -> Consumer:
    found = find(target, "consumer", "shop.stream:consumer")
    if not isinstance(found, Consumer):
        raise dedup.ConfigError(f"{target} is a {type(found).__name__}, not a Consumer.")
    return found


def _session(consumer: Consumer, frames: FrameKind | None) -> Any | None:
    """The Spark session that frames are made with; None for Arrow tables, also of what our own readers read from the log.

    The one that the consumer's module has made, as it is: its time zone and settings are part of what the handler means. Else a local one.
    """
    if frames == FrameKind.ARROW or (frames is None and importlib.util.find_spec("pyspark") is None):
        if isinstance(consumer.read_log, AnyLogReader):
            consumer.read_log.arrow = True
        return None
    from dedup.spark.session import active_session, local_session

    return active_session() or local_session("dedup")


def _plain(done: Reprocessed | Replayed) -> dict[str, Any]:
    """The report as JSON can hold it."""
    values = asdict(done)
    if isinstance(done, Replayed):
        values["missing"] = [r._asdict() for r in done.missing.items]
    return values


def _print_reprocessed(done: Reprocessed, from_log: bool) -> None:
    if from_log:
        rows: list[tuple[str, Any]] = [
            ("absent", done.absent),
            ("ran", "" if done.filled is None else str(done.filled)),
            ("lost", done.lost),
        ]
        print_table(["positions", ""], rows)
        return
    print_table(["kind", "letters"], [*done.by_kind.items(), ("all", done.selected)])
    names = ("reprocessed", "duplicates", "failed", "waiting", "left", "expired", "lost")
    if not done.dry_run:
        print_table(["became of them", "letters"], [(name, getattr(done, name)) for name in names])
    if done.failed:
        typer.echo("Why they failed again: `dedup dead-letters groups`, and `show ID`.")
    if done.processed:
        typer.echo(f"{done.processed} positions of this range were processed already: `dedup replay` repeats those.")
    if done.absent:
        typer.echo(f"{done.absent} positions of this range were never delivered: --from-log runs those.")


def _print_replayed(done: Replayed) -> None:
    names = ("processed", "lettered", "duplicates", "skipped", "absent", "replayed")
    print_table(["positions", ""], [*((name, getattr(done, name)) for name in names), ("missing", str(done.missing).strip("[]"))])
