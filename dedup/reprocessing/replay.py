"""A person repeats positions that were processed, on purpose, with their effect replaced or taken back: the handler had a bug.

Replacing is what `tx.merge` does; taking back is what the function registered with `consumer.compensate` does. Compensation and new effect
are one transaction; who did it and when is in the letter history. Where an event fails, or is rejected now, nothing of its page changes.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from checkpoint.errors import ConfigError, HandlerError, IncarnationChanged, PositionsMissing, ReprocessStopped
from checkpoint.head import Run
from checkpoint.position import Ints, Partition, Ranges
from deadletter.letter import LETTERS, Action, Status
from deadletter.outage import with_replanning
from deadletter.plans import REASONS, history
from deadletter.selection import Selection
from deadletter.store import Change, Commit
from dedup.consumer import Consumer
from dedup.core import planning
from dedup.core.envelope import POSITION
from dedup.core.index import Index, first_of_each_key
from dedup.core.messages import Messages
from dedup.core.planning import LETTER_KINDS, NEW, NO_KEY, SKIPPED, UNDECODABLE, Settled
from dedup.core.rows import Rows
from dedup.core.steps import Merge
from dedup.core.store import Transaction
from dedup.pipeline import commit, company, reentry
from dedup.pipeline.batch import EvaluatedBatch
from dedup.pipeline.commit import Job
from dedup.pipeline.tx import Tx
from dedup.reprocessing.from_log import Coverage, coverage, partitions_of, read_again, require_reader, span_of, windows
from dedup.reprocessing.options import ReprocessOptions

REFUSED = ("tx.write", "tx.publish", "tx.connection", "tx.merge(newer_by=)")
"""What a handler may not use in a replay where nothing takes the old effect back, and doubles are not accepted."""


@dataclass
class Replayed:
    """What a replay found and did, in positions."""

    processed: int = 0  # in the range, up to the checkpoint: these are repeated
    lettered: int = 0  # dead letters: those are reprocessed, not replayed
    duplicates: int = 0
    skipped: int = 0
    absent: int = 0  # never delivered: `reprocess --from-log`
    replayed: int = 0
    missing: Ranges = field(default_factory=Ranges)  # processed and not in the log any more: left as they are
    refused: tuple[str, ...] = ()  # the calls of REFUSED, if a handler that makes one of them ends this replay with HandlerError
    dry_run: bool = False


def replay(
    selection: Selection,
    consumer: Consumer,
    *,
    accept_double: bool = False,
    accept_other_keys: bool = False,
    dry_run: bool = False,
    options: ReprocessOptions | None = None,
) -> Replayed:
    """Repeat the processed positions of the selected range; needs `consumer.register_log_reader`.

    Args:
        accept_double: let `tx.write` append again what it wrote before, although nothing takes the old rows back.
        accept_other_keys: do not compare the events of the log with those that were processed: `decode` or its schema reads other keys
            than then, on purpose. The new keys are reserved beside the old ones.
        dry_run: count the positions; nothing runs and nothing changes. It raises what can be known without the log and the handler;
            `refused` of the result says which calls of the handler the replay refuses.

    Raises:
        ConfigError: no topic is selected, or no handler or nothing with `consumer.register_log_reader` is registered; a purge has left
            nothing that tells processed events from duplicates, and doubles are not accepted.
        HandlerError: the handler writes with `tx.write`, and there is neither `consumer.compensate` nor `accept_double`; or this is called
            inside the consumer's own handler.
        IncarnationChanged: the log holds other events at these positions than those that were processed, as of a topic that was created
            again; nothing of the page was changed.
        ReprocessStopped: an event fails, is rejected, does not decode or has no key now. Pages before it are done; `report`
            of the error has them.
        PositionsMissing: the log does not have some positions any more; without `options.skip_missing`.

    Crash: each page is repeated or not. A second call repeats all of them once more, which changes nothing where compensate or merge say
        so.
    """
    reentry.refuse(consumer.identity, "A replay")
    how, store = options or ReprocessOptions(), consumer.store
    head = consumer.known_head()
    covers = [coverage(store, head, p, selection) for p in partitions_of(head, selection)]
    done = Replayed(dry_run=dry_run)
    for name in ("processed", "lettered", "duplicates", "skipped", "absent"):
        setattr(done, name, sum(len(getattr(cover, name)) for cover in covers))
    if not accept_double:
        _refuse_forgotten(covers)
    job = consumer.job()
    done.refused = () if accept_double or job.take_back else REFUSED
    if done.processed:
        require_reader(job)
    if dry_run:
        return done
    for cover in covers:
        for asked in windows(cover.processed):
            page = _Page(job, cover.partition, asked, selection, how, accept_double, accept_other_keys)
            try:
                with_replanning(partial(_replay, page, done))
            except ReprocessStopped as stopped:
                stopped.report = done
                raise
            how.on_progress(done.replayed, done.processed)
    return done


def _refuse_forgotten(covers: Iterable[Coverage]) -> None:
    for cover in covers:
        if forgotten := cover.processed & cover.forgotten:
            raise ConfigError(
                f"{cover.partition} {forgotten}: the records of these positions were purged with their reservations, so duplicates and "
                "skipped events among them would count as processed. Select positions from "
                f"{forgotten.items[-1].last + 1} on, or accept that with --accept-double."
            )


@dataclass(frozen=True)
class _Page:
    job: Job
    partition: Partition
    asked: Ranges
    selection: Selection
    options: ReprocessOptions
    accept_double: bool
    accept_other_keys: bool


def _replay(page: _Page, done: Replayed) -> None:
    """One transaction, alone with the consumer's positions: no other replay and no batch runs beside it."""
    job, store = page.job, page.job.store
    with (
        company.taken(job.name),
        store.begin_letters(job.name, positions=True) as transaction,
        _events(page, transaction) as (rows, index, missing),
    ):
        if missing and not page.options.skip_missing:
            raise PositionsMissing(f"{page.partition} {missing} were processed, but are not in the log (--skip-missing).")
        if len(index):
            _refuse_unusable(page, rows, index, transaction)
            keys = index.keys_of(first_of_each_key(index, ~index.no_key))  # as decode reads them now; those there were stay reserved
            reserved = keys.num_rows - transaction.reserve(keys).num_rows
            _take_back(page, rows, index, transaction)
            _handle(page, rows, index, transaction)
            for step in (_note(page, len(index), reserved), Commit()):
                store.on_step(step.name)
                transaction.execute(step)
    done.replayed += len(Ranges.of_numbers(index.numbers))
    done.missing |= missing


@contextmanager
def _events(page: _Page, transaction: Transaction) -> Iterator[tuple[EvaluatedBatch, Index, Ranges]]:
    """The events of the page that are still processed ones now, and which of them the log does not have."""
    first, last = span_of(page.asked)
    window = replace(page.selection, first=first, last=last)
    now = page.asked & coverage(page.job.store, transaction.head, page.partition, window).processed
    with read_again(page.job, page.partition, page.asked, transaction.head) as (rows, index):
        there = index.only(np.flatnonzero(now.contains(index.numbers)))
        if not page.accept_other_keys:
            _refuse_other_events(page, commit.Chunk(rows, there, Run("replay", 0), transaction.head), now, transaction)
        yield rows, _without_duplicates(there, page.job), now - Ranges.of_numbers(index.numbers)


def _refuse_other_events(page: _Page, chunk: commit.Chunk, processed: Ranges, transaction: Transaction) -> None:
    """The stream's own check of redeliveries: each position has to hold the event that was processed there."""
    index, store, head = chunk.index, page.job.store, transaction.head
    sifted = planning.sift(index, head, {page.partition: processed}, commit.repeats_in(index, chunk.batch))
    try:
        commit.refuse_other_events(chunk, sifted, transaction, store, page.job.policy.on_key_conflict)
    except IncarnationChanged as error:
        advice = "Nothing of these positions was changed. Only if they are the same events, read with other keys on purpose:"
        raise IncarnationChanged(f"{error} {advice} --accept-other-keys.") from error


def _without_duplicates(index: Index, job: Job) -> Index:
    """Without parts of an event that were duplicates, while others of its parts were processed: later rows of a key, or of a letter's."""
    _, first = index.groups(np.arange(len(index)))
    chosen = index.no_key.copy()
    chosen[first] = True
    if (index.parts != 0).any():
        waiting = Selection(job.name, statuses=(Status.OPEN, Status.BLOCKED, Status.DISCARDED), limit=None)
        letters = job.store.letters(waiting, ["key", "holds_key"])
        held = pc.is_in(index.keys_of(np.arange(len(index)))["key"], value_set=letters.filter(letters["holds_key"])["key"].combine_chunks())
        chosen &= ~held.to_numpy()
    return index.only(np.flatnonzero(chosen))


def _refuse_unusable(page: _Page, rows: EvaluatedBatch, index: Index, transaction: Transaction) -> None:
    """Raise ReprocessStopped where the stream would park an event before its handler: its body does not decode, or it has no key."""
    wrong = np.flatnonzero(index.undecodable | index.no_key)
    if not len(wrong):
        return
    first = index.only(wrong[:1])
    state = np.where(first.undecodable, UNDECODABLE, NO_KEY)
    chunk = commit.Chunk(rows, first, Run("replay", 0), transaction.head)
    whys = commit.why_undecodable(chunk, Settled(first, state, np.zeros(1, dtype=bool), 0), page.job.policy)
    raise _stopped(index, wrong, whys[0].text if whys else REASONS[LETTER_KINDS[int(state[0])]])


def _stopped(index: Index, wrong: Ints, said: str) -> ReprocessStopped:
    return ReprocessStopped(
        f"{len(wrong)} of {len(index)} events fail now, the first at {index.describe(int(wrong[0]))}: {said}. "
        "Nothing of these positions was changed."
    )


def _take_back(page: _Page, rows: EvaluatedBatch, index: Index, transaction: Transaction) -> None:
    take_back = page.job.take_back
    if take_back is None:
        return
    content = rows.content(index.order)
    tx = Tx(rows.frames, index, np.arange(len(index)), _Anew(transaction))
    with transaction.attempt():
        try:
            take_back(content.select([*POSITION, "_key_text"]).rename_columns([*POSITION, "idempotence_key"]), tx)
        finally:
            tx.close()
        tx.perform_writes()


def _handle(page: _Page, rows: EvaluatedBatch, index: Index, transaction: Transaction) -> None:
    job = page.job
    guarded = _Anew(transaction) if job.take_back or page.accept_double else _NoAppends(transaction)
    settled = Settled(index, np.zeros(len(index), dtype=np.int8), np.zeros(len(index), dtype=bool), 0)
    chunk = commit.Chunk(rows, index, Run("replay", 0), transaction.head)
    policy, order = job.policy.unwatched(), commit.sequences(chunk, settled)
    settled, why, _ = commit.handle(chunk, settled, order, guarded, policy, job.store.on_step)
    wrong = np.flatnonzero(~np.isin(settled.state, (NEW, SKIPPED)))
    if len(wrong):
        row = int(wrong[0])
        said = why.rejected.get(row) or f"{why.failed[row][-1].error_type}: {why.failed[row][-1].message[:300]}"
        raise _stopped(index, wrong, said)


PASSED_ON = frozenset({"head", "connection", "attempt", "apart", "write", "merge"})
"""What a handler that is run again may use of a transaction, beside `publish`. Whatever a transaction can do beyond that is refused."""


class _Anew:
    """A transaction whose messages are none that were sent before: a receiver must not take them for duplicates."""

    def __init__(self, transaction: Transaction) -> None:
        self._transaction = transaction

    def __getattr__(self, name: str) -> Any:
        if name not in PASSED_ON:
            raise AttributeError(f"The transaction of a replay has no {name!r}: handlers have {', '.join(sorted(PASSED_ON))} and enqueue.")
        return getattr(self._transaction, name)

    def enqueue(self, messages: Messages) -> None:
        """With ids of their own."""
        self._transaction.enqueue(messages.renamed() if messages.derived else messages)


class _NoAppends(_Anew):
    """A transaction in which what was appended before cannot be appended again."""

    @property
    def connection(self) -> Any:
        """Refused."""
        raise HandlerError(
            "The handler uses tx.connection, and dedup cannot tell what repeating its statements would do. Write with tx.merge, register "
            "what takes the old rows back with @consumer.compensate, or accept doubles with --accept-double."
        )

    def enqueue(self, messages: Messages) -> None:
        """Refused."""
        raise HandlerError(
            f"The handler publishes to {messages.topic!r}, and what was sent before cannot be taken back. Register what makes up for it "
            "with @consumer.compensate, or send the messages again, as new ones, with --accept-double."
        )

    def write(self, table: str, rows: Rows) -> int:
        """Refused."""
        raise HandlerError(
            f"The handler appends to {table!r}: repeating it would write the rows twice. Write them with tx.merge, register what takes the "
            "old rows back with @consumer.compensate, or accept doubles with --accept-double."
        )

    def merge(self, table: str, rows: Rows, merge: Merge) -> int:
        """As it is, unless it would change nothing."""
        if merge.newer_by is not None:
            raise HandlerError(
                f"tx.merge into {table!r} with newer_by={merge.newer_by!r} leaves rows of the same age as they are: repeating it would "
                "repair nothing. Register what takes the old rows back with @consumer.compensate, or run it all the same with "
                "--accept-double."
            )
        return self._transaction.merge(table, rows, merge)


def _note(page: _Page, events: int, reserved: int) -> Change:
    """Who repeated what, and when."""
    options, span = page.options, span_of(page.asked)
    entry = {
        "letter_id": f"replay {page.partition} {span.first}-{span.last}",
        "at": dt.datetime.now(dt.UTC),
        "action": Action.REPLAYED.value,
        "by": options.by,
        "reason": f"{events} events" + (f"; {options.reason}" if options.reason else ""),
        "reserved": reserved,
    }
    return Change(pa.table({"id": pa.array([], LETTERS.field("id").type)}), history([entry]))
