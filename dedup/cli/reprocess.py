"""`dedup dead-letter reprocess` and `dedup consumer replay`: events that run through the user's handler again."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from enum import StrEnum
from functools import partial
from typing import Annotated, Any

import typer

import dedup
from checkpoint.errors import LettersUnread, ReprocessStopped
from deadletter import outage
from deadletter.selection import Selection
from dedup.cli import lines
from dedup.cli.exits import ExitCode, HandlerAway, exit_code, found, told
from dedup.cli.options import (
    OPTIONS,
    POSITIONS,
    By,
    Ids,
    Reason,
    Yes,
    again_and_again,
    check_names,
    duration,
    find,
    one_of,
    progress,
    selecting,
    who,
    whole_ids,
)
from dedup.cli.show import NOTHING_DONE, AsJson, print_json, print_table
from dedup.consumer import Consumer
from dedup.core.log import AnyLogReader
from dedup.reprocessing.dead_letters import DeadLetters
from dedup.reprocessing.letters import reprocess
from dedup.reprocessing.options import Reprocessed, ReprocessOptions, Unread
from dedup.reprocessing.replay import Replayed, replay
from dedup.urls import check_consumer


class FrameKind(StrEnum):
    """What handlers are given."""

    SPARK = "spark"
    ARROW = "arrow"


Target = Annotated[
    str,
    typer.Argument(
        metavar="MODULE:ATTRIBUTE",
        help="Your Consumer object: `shop.stream:consumer`. The module must not start the stream when it is imported.",
        show_default=False,
    ),
]
Frame = Annotated[
    FrameKind | None,
    typer.Option(
        "--frames", **one_of(FrameKind), help="What the handler takes.  [default: spark if pyspark is installed]", show_default=False
    ),
]

RESULTS = ("reprocessed", "duplicates", "failed", "waiting", "left", "expired", "lost", "unread")
"""What becomes of letters."""

REPLAYED = ("processed", "lettered", "duplicates", "skipped", "absent", "replayed", "missing")
"""What becomes of positions."""

RUN_ONLY = ("replayed", "missing")
"""Those of REPLAYED that only a replay knows, because a dry run neither reads the log nor runs the handler."""

UNREAD = ["letter", "source", "topic", "partition", "sequence_number", "why"]
"""Columns of letters that could not be read."""

SHOWN = 20
"""Letters that could not be read, of which the table has a row."""

_UNREAD = "unread: the events of these letters cannot be had; why says the reason"

FILTERS = tuple(name for name in OPTIONS if name not in ("consumer", "status"))
"""The consumer is the one that is named, and what can be run is what is open or blocked."""


def register(consumers: typer.Typer, letters: typer.Typer) -> None:
    """Add the commands."""
    letters.command("reprocess", epilog="Example: dedup dead-letter reprocess shop.stream:consumer --topic orders --from 1000 --to 2000")(
        reprocess_
    )
    consumers.command(
        "replay", epilog="Example: dedup consumer replay shop.stream:consumer --topic orders --partition 3 --from 1000 --to 2000 --yes"
    )(replay_)


@selecting("Run at most this many letters", only=FILTERS)
def reprocess_(
    target: Target,
    selection: Selection,
    ids: Ids = None,
    from_log: Annotated[
        bool, typer.Option("--from-log", help="Instead of letters run positions of the range that were never delivered.")
    ] = False,
    skip_missing: Annotated[
        bool, typer.Option("--skip-missing", help="Record as LOST what the log no longer has, and run the others.")
    ] = False,
    due: Annotated[bool, typer.Option("--due", help="Run only letters that `Retry(later=...)` of the consumer says are due now.")] = False,
    every: Annotated[
        Any | None,
        typer.Option(
            "--every",
            parser=duration,
            metavar="DURATION",
            help="With --due --yes: repeat at this interval until stopped.",
            show_default=False,
        ),
    ] = None,
    rate: Annotated[float | None, typer.Option(help="Run at most this many letters per second.", show_default=False)] = None,
    stop_after: Annotated[int, typer.Option(min=1, help="Stop after this many letters in a row have failed again.")] = 20,
    frames: Frame = None,
    as_json: AsJson = False,
    yes: Yes = False,
    by: By = "",
    reason: Reason = "",
) -> None:
    """Run the handler again on dead letters.

    The stream may run at the same time. The command is safe to stop and to repeat. If the body of a letter has to be read from the log,
    and that fails, the command names the letter and runs the others. The exit code is 1 if letters failed again or were not read.
    """
    if every is not None and not (due and yes):
        raise typer.BadParameter("--every needs --due and --yes.")
    consumer, look = consumer_of(target), not yes
    check_names(consumer.store, replace(selection, consumer=consumer.name))
    if ids:
        selection = _these(consumer, ids, selection, from_log=from_log)
    spark = None if look else _session(consumer, frames)

    def once() -> Reprocessed:
        with progress("reprocessing") as told:
            options = ReprocessOptions(who(by), reason or None, selection.limit, rate, stop_after, skip_missing, told)
            try:
                return reprocess(selection, consumer, spark=spark, from_log=from_log, due=due, dry_run=look, options=options)
            except LettersUnread as unread:
                report: Reprocessed = unread.report
                return report

    def show(done: Reprocessed) -> None:
        if as_json:
            print_json(_plain(done))
        else:
            _print_reprocessed(done, from_log)

    def show_news(done: Reprocessed) -> None:
        if done.selected:
            show(done)

    if every is not None:
        again_and_again(every, partial(_as_far_as_it_comes, once), show_news, lambda error: outage.may_pass(error, consumer.on_failure))
    with _shown_if_stopped(show), _away(consumer):
        done = once()
    show(done)
    found(done.failed > 0 or bool(done.unread and not look) or (done.filled is not None and done.filled.dead_lettered > 0))


@selecting(only=POSITIONS)
def replay_(
    target: Target,
    selection: Selection,
    accept_double: Annotated[
        bool, typer.Option("--accept-double", help="Let tx.write append its rows a second time. The first ones stay.")
    ] = False,
    accept_other_keys: Annotated[
        bool,
        typer.Option("--accept-other-keys", help="Accept that `decode` now gives other keys than when the events were processed."),
    ] = False,
    skip_missing: Annotated[
        bool, typer.Option("--skip-missing", help="Leave out positions that the log no longer has, and replay the others.")
    ] = False,
    frames: Frame = None,
    as_json: AsJson = False,
    yes: Yes = False,
    by: By = "",
    reason: Reason = "",
) -> None:
    """Run the handler again on processed positions.

    Use it if the handler had a bug. Rows that tx.merge wrote are replaced; the function registered with @consumer.compensate takes back
    other effects. The function registered with @consumer.register_log_reader reads the events again. Without --yes the command runs no
    handler; it says which calls of the handler the replay refuses.
    """
    consumer, look = consumer_of(target), not yes

    def show(done: Replayed) -> None:
        if as_json:
            print_json(_plain(done))
        else:
            _print_replayed(done, takes_back=consumer.take_back is not None)

    check_consumer(consumer.store, consumer.name)
    if not look:
        _session(consumer, frames)
    with _shown_if_stopped(show), _away(consumer), progress("replaying") as told:
        options = ReprocessOptions(who(by), reason or None, skip_missing=skip_missing, on_progress=told)
        accepted = {"accept_double": accept_double, "accept_other_keys": accept_other_keys}
        done = replay(selection, consumer, **accepted, dry_run=look, options=options)
    show(done)


def _as_far_as_it_comes(once: Callable[[], Reprocessed]) -> Reprocessed:
    """One turn of several. Where too many letters failed again, that is told, and the next turn goes on."""
    try:
        return once()
    except ReprocessStopped as stopped:
        lines.note(f"dedup: {told(stopped)}", error=stopped)
        report: Reprocessed = stopped.report
        return report


@contextmanager
def _shown_if_stopped(show: Callable[[Any], None]) -> Iterator[None]:
    """What was done before a run stopped is done, and shown."""
    try:
        yield
    except ReprocessStopped as stopped:
        show(stopped.report)
        raise


@contextmanager
def _away(consumer: Consumer) -> Iterator[None]:
    """Raise HandlerAway where an error is the handler's own, no event's fault, and may pass."""
    try:
        yield
    except Exception as error:
        if exit_code(error) is not ExitCode.UNEXPECTED or not outage.may_pass(error, consumer.on_failure):
            raise
        raise HandlerAway(
            f"{type(error).__name__}: {error}. The handler cannot go on now. What was done is done: run this again."
        ) from error


def _these(consumer: Consumer, ids: Sequence[str], selection: Selection, *, from_log: bool) -> Selection:
    """The letters of these ids. Raises ConfigError for filters or --from-log beside them, and for a letter of another consumer."""
    if from_log:
        raise dedup.ConfigError("You gave ids and --from-log. --from-log runs positions that have no letter: leave out one of the two.")
    letters = DeadLetters(consumer.store)
    whole = tuple(whole_ids(letters, ids, selection, "--topic"))
    for one in letters.select(Selection(ids=whole, limit=None), ["id", "consumer"]).to_pylist():
        if one["consumer"] != consumer.name:
            raise dedup.ConfigError(f"Letter {one['id'][:12]} is of consumer {one['consumer']!r}, not of {consumer.name!r}.")
    return Selection(ids=whole, limit=selection.limit)


def consumer_of(target: str) -> Consumer:
    """What MODULE:ATTRIBUTE names. Raises ConfigError where that is no Consumer."""
    found = find(target, "consumer", "shop.stream:consumer")
    if not isinstance(found, Consumer):
        raise dedup.ConfigError(f"{target} is of type {type(found).__name__}, not a Consumer.")
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
    values["done"] = not values.pop("dry_run")
    if isinstance(done, Replayed):
        values["missing"] = [r._asdict() for r in done.missing.items]
    return values


def _print_reprocessed(done: Reprocessed, from_log: bool) -> None:
    if from_log:
        rows: list[tuple[str, Any]] = [
            ("absent", done.absent),
            ("run", "" if done.filled is None else str(done.filled)),
            ("lost", done.lost),
        ]
        print_table(["result", "positions"], rows)
        _tell_nothing(done)
        return
    print_table(["kind", "letters"], [*done.by_kind.items(), ("all", done.selected)], title="selected")
    if not done.dry_run:
        rows = [(name, len(done.unread) if name == "unread" else getattr(done, name)) for name in RESULTS]
        print_table(["result", "letters"], rows, title="done")
    if done.behind:
        typer.echo(f"Up to {done.behind} more wait behind these, and are run as well where these pass.")
    if done.dry_run and done.expired:
        typer.echo(f"{done.expired} letters are older than Limits(reprocess_within=...), and are left.")
    if done.unread:
        _print_unread(done.unread)
    if done.failed:
        typer.echo("`dedup dead-letter group` and `dedup dead-letter show ID` tell why they failed again.")
    if done.processed:
        typer.echo(f"{done.processed} positions of this range were processed already: `dedup consumer replay` runs those again.")
    if done.absent:
        typer.echo(f"{done.absent} positions of this range were never delivered: --from-log runs those.")
    _tell_nothing(done)


def _print_unread(unread: Sequence[Unread]) -> None:
    """The first of them: thousands of rows, at each turn of --every, would hide all else."""
    print_table(UNREAD, [[one.letter[:12], *(getattr(one, name) for name in UNREAD[1:])] for one in unread[:SHOWN]], title=_UNREAD)
    if len(unread) > SHOWN:
        typer.echo(f"{len(unread) - SHOWN} more letters are unread: --json names all.")


def _tell_nothing(done: Reprocessed | Replayed) -> None:
    if done.dry_run:
        typer.echo(NOTHING_DONE)


def _print_replayed(done: Replayed, *, takes_back: bool) -> None:
    names = [name for name in REPLAYED if not done.dry_run or name not in RUN_ONLY]
    rows = [(name, str(done.missing).strip("[]") if name == "missing" else getattr(done, name)) for name in names]
    print_table(["result", "positions"], rows)
    if done.dry_run and done.processed:
        typer.echo(_danger(done, takes_back))
    _tell_nothing(done)


def _danger(done: Replayed, takes_back: bool) -> str:
    """What repeating these positions means for the effect that they had."""
    if done.refused:
        return (
            f"The replay is refused, and changes nothing, if the handler calls {', '.join(done.refused)}: nothing takes back what such a "
            "call did before. Write with tx.merge, register @consumer.compensate, or accept doubles with --accept-double."
        )
    if takes_back:
        return "The function of @consumer.compensate takes back the old effect of these positions; then the handler runs again."
    return "With --accept-double the rows that the handler appends, and the messages that it publishes, are there twice afterwards."
