"""Up to where reservations may be purged: retention is counted back from the time of the log that a consumer has reached.

A duplicate that is one hour behind its original in the log is read one hour after it only by a consumer that reads all the time. One that
was stopped for a month reads it a month later. So a purge by the wall clock alone would forget the original too early. A reservation is
made after its event was logged: what was reserved before `read_to` minus the retention belongs to events that are older than that.
PostgreSQL computes the same in `purge_bounds` (sql/postgres/0013_purge_bounds.sql).
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from checkpoint.errors import DedupError, StoreUnavailable
from checkpoint.head import Checkpoint
from checkpoint.position import Partition
from dedup.core.messages import Outbox

ACTIVE = dt.timedelta(hours=1)
"""A partition without an event in this time before the last batch counts as read to its end: a batch of Spark has some of each with more.

In the middle of a batch, whose later chunks may have the others, and of a runner, whose processes take one partition after another when
they start, it counts as read up to the last decision before that time.
"""

NEVER = dt.datetime.min.replace(tzinfo=dt.UTC)
"""Before anything was decided."""

TOLD = 2 * ACTIVE
"""A difference that is smaller is not told: every consumer is a little behind."""


@dataclass(frozen=True)
class PurgeBound:
    """What a consumer lets go of."""

    consumer: str
    read_to: dt.datetime  # aware: it has decided the log up to this time
    bound: dt.datetime  # aware: what was reserved before may be purged

    def told(self, before: dt.datetime) -> str | None:
        """Why less is purged than was asked for; None where the difference is less than TOLD."""
        if before - self.bound < TOLD:
            return None
        return (
            f"{self.consumer} has read its log up to {_shown(self.read_to)} only. So reservations that are newer than {_shown(self.bound)} "
            f"are kept, and not only those since {_shown(before)}: the duplicates of their events may still be unread"
        )


@dataclass(frozen=True)
class Remains:
    """Where data that was erased can still be found, and until when."""

    where: str
    until: dt.datetime | None  # aware: from then on it can be removed; None: no time is known
    then: str  # what removes it


class UpkeepTurn(Protocol):
    """One turn of the upkeep that a consumer's own process does, on connections of its own."""

    kept: tuple[str, ...]  # once the portions are done: why less was forgotten than the retention says

    def portions(self) -> Generator[str, None, None]:
        """Do one portion after another, each in a transaction of its own; of each what it did. Close it to let go of everything.

        Raises:
            DedupError: a portion failed; those before it are done.

        Crash: each portion is done or not; the next turn goes on, of whatever process.
        """

    def stop(self) -> None:
        """End the portion that runs now as soon as that can be done. Called by another thread."""


@dataclass(frozen=True)
class Upkept:
    """One thing that `upkeep` did, or would do."""

    what: str  # "tables of reservations", "reservations", "sent messages"
    consumer: str  # empty: of all consumers
    count: int
    kept: tuple[str, ...] = ()  # why less than was asked for
    failed: str | None = None  # the error that ended it


class HasMessages(Protocol):
    """What has the messages of consumers: a store."""

    def consumers(self) -> list[str]:
        """Names."""

    def outbox(self, consumer: str) -> Outbox:
        """The messages that this consumer has published."""


Part = tuple[Upkept, Callable[[], Upkept]]
"""One thing to do: the line with its error if it fails, and what does it."""


def purge_messages(store: HasMessages, before: dt.datetime, *, dry_run: bool) -> Iterator[Upkept]:
    """Delete the messages of all consumers that were sent or discarded before that time.

    Crash: of each consumer all of it, or nothing; the next upkeep does the rest.
    """
    yield from (alone(*part) for part in message_purges(store, before, dry_run=dry_run))


def message_purges(store: HasMessages, before: dt.datetime, *, dry_run: bool) -> list[Part]:
    """What `purge_messages` does, for each consumer."""
    names = store.consumers()
    return [(Upkept("sent messages", name, 0), partial(_purge_messages, store, name, before, dry_run)) for name in names]


def _purge_messages(store: HasMessages, consumer: str, before: dt.datetime, dry_run: bool) -> Upkept:
    return Upkept("sent messages", consumer, store.outbox(consumer).purge(before, dry_run=dry_run))


def alone(line: Upkept, act: Callable[[], Upkept]) -> Upkept:
    """What `act` did, or the line with its error: one consumer that is broken holds no other one up.

    Raises StoreUnavailable: then there is nothing to be done for any.
    """
    try:
        return act()
    except StoreUnavailable:
        raise
    except DedupError as error:
        return replace(line, failed=str(error))


def apart(parts: Iterable[Part], ask: Callable[[], object]) -> list[Upkept]:
    """What each of them did, or its line with its error: for consumers that share nothing, so that only one of them may be out of reach.

    Args:
        ask: asks the store itself something. If one is out of reach, that tells whether all are: each of them would be waited for.

    Raises StoreUnavailable where all of them are.
    """
    lines, away = list[Upkept](), list[StoreUnavailable]()
    for line, act in parts:
        try:
            lines.append(alone(line, act))
        except StoreUnavailable as error:
            ask()
            away.append(error)
            lines.append(replace(line, failed=str(error)))
    if away and len(away) == len(lines):
        raise away[0]
    return lines


def read_to(
    checkpoints: Mapping[Partition, Checkpoint], decided: Mapping[Partition, dt.datetime], before: dt.datetime | None = None
) -> dt.datetime:
    """The time of the log up to which everything is decided.

    Args:
        decided: partition -> when its newest positions were decided; not empty. Of those that were decided long ago some may lack.
        before: a partition without a decision since then was read to its end by then; None: by now, if it had none in ACTIVE.
    """
    last = max(decided.values())
    active = {p for p, at in decided.items() if (at >= last - ACTIVE if before is None else at > before)}
    times = [point.enqueued_time for p, point in checkpoints.items() if p in active]
    quiet = [before] if before is not None and before > NEVER and not active.issuperset(checkpoints) else []
    return min([last, *quiet, *(time for time in times if time is not None)])


def bounded(consumer: str, reached: dt.datetime, before: dt.datetime, now: dt.datetime) -> PurgeBound:
    """As much before `reached` as `before` is before `now`, and not later than `before`."""
    return PurgeBound(consumer, reached, min(before, reached - max(now - before, dt.timedelta())))


def _shown(time: dt.datetime) -> str:
    return f"{time.astimezone(dt.UTC):%Y-%m-%d %H:%M:%S} UTC"
