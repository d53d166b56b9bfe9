"""A person sends dead letters through the same door again: the same preparation, the same handler, the same kind of transaction.

Letters go in pages, in position order, each page one transaction in which their status changes; letters whose columns have other types than
those before them get one of their own. A page takes no epoch and no checkpoint: it works while the stream runs. What a page has committed
is done; a second call goes on with the letters that are left.

Letters become events again as a table that goes through the same preparation as a batch, with the judgement of its keys. What becomes of
them is a new state and what is appended to their history. Called by `reprocess` of the public names and by `dedup dead-letter
reprocess`.
"""

from __future__ import annotations

import datetime as dt
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from checkpoint import given
from checkpoint.errors import ConfigError, LettersUnread, ReprocessStopped
from checkpoint.head import Run
from checkpoint.position import Bools
from deadletter import hiding, plans
from deadletter.letter import Action, Kind, Status
from deadletter.outage import with_replanning
from deadletter.plans import given_a_key, history
from deadletter.selection import Selection
from deadletter.store import Change, Commit, Free
from deadletter.work import known
from dedup.consumer import Consumer, open_batch
from dedup.core.index import Index
from dedup.core.keys import LETTER
from dedup.core.letters import letter_rows
from dedup.core.planning import DUPLICATE, WAITING, Order, Settled
from dedup.core.rows import frame_of, picked
from dedup.core.steps import Step
from dedup.core.store import Store, Transaction
from dedup.pipeline import commit, company, reentry
from dedup.pipeline.batch import EvaluatedBatch
from dedup.pipeline.commit import Job
from dedup.reprocessing import unsent
from dedup.reprocessing.behind import Behind
from dedup.reprocessing.events import (
    as_they_came,
    events_of,
    held_keys,
    kept_order,
    of_one_form,
    refuse_erased,
    restored,
    settle_held,
    sift_asked,
)
from dedup.reprocessing.from_log import WholeEvent, coverage, fill, matching, no_reader, read_bodies
from dedup.reprocessing.options import FIRST_PAGE, LARGEST_PAGE, PAGE_BYTES, Reprocessed, ReprocessOptions, Unread
from dedup.reprocessing.outcomes import Tried, change_of, succeeded, untold

RUNNABLE = (Status.OPEN.value, Status.BLOCKED.value)

PLACE = ["id", "source", "topic", "partition", "sequence_number"]

LISTED = [
    *PLACE, "part", "generation", "incarnation", "kind", "status", "sequence", "body_size", "body_sha256", "first_failed_at",
    "last_failed_at",
]  # fmt: skip

Keep = Callable[[pa.Table], pa.Table]
"""(letters) -> those of them that are meant: they are due, or not too old."""

GONE = "The log does not have the event any more. Leave it out, or record it as LOST with --skip-missing."
"""Why a letter is not run whose event the log has lost."""

TOLD = 10
"""Letters of one reason, and reasons, that a message names."""


def reprocess(
    selection: Selection,
    consumer: Consumer,
    *,
    spark: Any | None = None,
    from_log: bool = False,
    due: bool = False,
    dry_run: bool = False,
    options: ReprocessOptions | None = None,
) -> Reprocessed:
    """Run the selected letters that are open or blocked through the consumer's handler.

    Letters of messages (kind UNSENT) are selected by that kind, or by their ids, alone; no handler runs, and the messages wait to be sent
    again.

    A letter that passes is REPROCESSED, and the letters that waited behind it are run, too, oldest first. One that fails again stays as it
    is, with one more attempt. How many are run at most is `options.limit`; that of the selection is not looked at. Letters that are older
    than the consumer's `reprocess_within` are counted as expired and left.

    Args:
        spark: the session, for handlers that take DataFrames; without it they get pyarrow tables.
        from_log: run no letters but the positions of the selected range that were never delivered, as those of an accepted gap.
        due: run only those that `Retry(later=...)` of the consumer says are due now. One that fails again waits for the next time, and
            after the last one for a person.
        dry_run: count what is selected, by kind, and what waits behind it; name what could not be read. No handler runs and nothing
            changes.

    Raises:
        ReprocessStopped: `options.stop_after` letters in a row failed; `report` of the error says what was done before.
        LettersUnread: the log alone has the whole event of some letters, and it could not be read: nothing is registered with
            `consumer.register_log_reader`, the log does not have the event any more (see `options.skip_missing`) or has another one, or
            the broker does not answer. Or a letter is sealed and cannot be opened, or has other columns that no event can have. All other
            letters were run; `report.unread` of the error names each that was not, and why.
        SealUnavailable: the text of a new failure could not be sealed; the letters of its transaction were not changed.
        PositionsMissing: with from_log; absent positions are not in the log; without `options.skip_missing`.
        HandlerError: this is called inside the consumer's own handler.
        Refused: one of `selection.ids` is a letter whose contents were erased.
        ConfigError: ids of messages are mixed with those of events; from_log without a topic, or nothing is registered with
            `consumer.register_log_reader`; no handler is registered; due without `Retry(later=...)`, or with a kind of letter that is never
            due.

    Crash: each letter is done or not, with the others of its transaction; a second call goes on.
    """
    reentry.refuse(consumer.identity, "A reprocess")
    chosen, store, how = replace(selection, consumer=consumer.name), consumer.store, options or ReprocessOptions()
    keep = None
    if due:
        keep = _due_ones(consumer, chosen, from_log=from_log)
        chosen = replace(chosen, kind=Kind.HANDLER_ERROR.value)
    if unsent.is_meant(selection) or (chosen.kind is None and unsent.meant_by(store, selection.ids or (), "reprocess")):
        return unsent.reprocess(store, replace(chosen, limit=how.limit), by=how.by, reason=how.reason, dry_run=dry_run)
    if selection.ids:
        refuse_erased(store.letters(Selection(consumer.name, ids=selection.ids, limit=None), ["id", "reason"]))
    head = consumer.known_head()
    report = Reprocessed(dry_run=dry_run)
    young = _young_ones(consumer.reprocess_within, report)
    if from_log:
        filled = fill(chosen, consumer, dry_run=dry_run, options=how)
        report.absent, report.filled, report.lost = filled.absent, filled.ran, len(filled.lost)
        return report
    keep = young if keep is None else _both(keep, young)
    after = Behind() if dry_run else None
    report.by_kind, report.unread = count(store, chosen, how, keep, partial(unreadable, consumer) if dry_run else None, after)
    report.selected = sum(report.by_kind.values())
    if after is not None:
        left = None if how.limit is None else how.limit - (report.selected - len(report.unread))
        report.behind = after.count(store, consumer.name, young, left)
    if chosen.topic is not None and (chosen.first is not None or chosen.last is not None):
        covers = [coverage(store, head, p, chosen) for p in matching(head, chosen)]
        report.processed, report.absent = sum(len(c.processed) for c in covers), sum(len(c.absent) for c in covers)
    job = consumer.job() if report.selected else None  # a dry run refuses a consumer without a handler, too
    if job is not None and not dry_run:
        _Reprocess(job, spark, how, report, young).run(chosen, keep)
        refuse_unread(report)
    return report


def _due_ones(consumer: Consumer, chosen: Selection, *, from_log: bool) -> Keep:
    """Which letters of a page are due, as of now."""
    later, now = consumer.on_failure.retry.later, dt.datetime.now(dt.UTC)
    if not later:
        raise ConfigError(
            f"Consumer {consumer.name!r} does not say when letters are due: FailurePolicy(retry=Retry(later=[60, 600, 3600])) runs them "
            "again after a minute, ten minutes and an hour."
        )
    if from_log or chosen.kind not in (None, Kind.HANDLER_ERROR):
        raise ConfigError(f"Only open letters of the kind {Kind.HANDLER_ERROR} are ever due. Leave out what selects others.")
    return lambda page: page.filter(due_now(page, later, now))


def _young_ones(within: dt.timedelta | None, report: Reprocessed) -> Keep:
    """Which letters of a page the consumer still runs, as of now. The others are expired: the report counts each of them once."""
    old: set[str] = set()

    def young(page: pa.Table) -> pa.Table:
        if within is None:
            return page
        is_young = pc.greater_equal(page["first_failed_at"], dt.datetime.now(dt.UTC) - within)
        old.update(page.filter(pc.invert(is_young))["id"].to_pylist())
        report.expired = len(old)
        return page.filter(is_young)

    return young


def _both(first: Keep, second: Keep) -> Keep:
    """What both keep; the second sees only what the first has kept."""
    return lambda page: second(first(page))


def due_now(letters: pa.Table, later: Sequence[given.Duration], now: dt.datetime) -> pa.ChunkedArray:
    """For each letter whether a time of `later` has come at which it was not run yet: a moment, and no failure since.

    Args:
        letters: with kind, status, first_failed_at and last_failed_at.
    """
    first, last = letters["first_failed_at"], letters["last_failed_at"]
    found, moment = pa.chunked_array([pa.repeat(False, letters.num_rows)]), dt.timedelta(0)
    for wait in later:
        moment += given.to_timedelta(wait)
        at = pc.add(first, pa.scalar(moment, pa.duration("us")))
        found = pc.or_(found, pc.and_(pc.less_equal(at, pa.scalar(now, first.type)), pc.less(last, at)))
    of_kind = pc.and_(pc.equal(letters["kind"], Kind.HANDLER_ERROR.value), pc.equal(letters["status"], Status.OPEN.value))
    return pc.and_(found, of_kind)


class _Transacted(NamedTuple):
    """What one transaction has made of letters."""

    states: dict[str, int]  # letter -> what became of it
    closed: dict[str, str]  # letters whose events cannot be had, and why
    lost: frozenset[str]  # letters that became LOST
    left: list[str]  # letters that can be run, in a transaction of their own


class _Reprocess:
    """One call."""

    def __init__(self, job: Job, spark: Any | None, options: ReprocessOptions, report: Reprocessed, young: Keep) -> None:
        self.job, self.spark, self.options, self.report, self.young = job, spark, options, report, young
        self.size, self.in_a_row, self.away = FIRST_PAGE, 0, ""  # why the broker is not asked again
        self.idle = 0  # letters that could not be read since one was run
        self.done: set[str] = set()
        self.passed: set[str] = set()
        self.started = time.monotonic()

    def run(self, selection: Selection, keep: Keep) -> None:
        """Page by page."""
        for page in pages(self.job.store, selection, self._many, keep):
            self._run_with_followers(self._not_done(page))  # some were run as followers since they were listed

    def _run_with_followers(self, page: pa.Table) -> None:
        released: set[bytes] | None = None  # sequences of which a letter passed, and whose next ones were not tried yet
        while page.num_rows and self._room():
            self._run_all(page)
            # Of the selected letters any may stand first; of those behind one that passed, what was not run holds up all others.
            released = self._sequences(page, passed=True) if released is None else released - self._sequences(page, passed=False)
            page = self._followers(tuple(released)) if released else page.slice(0, 0)

    def _run_all(self, page: pa.Table) -> None:
        """These letters, as far as there is room."""
        while many := min(self._many(), page.num_rows):
            for part in alike(page.slice(0, many)):
                self._run(part)
            page = page.slice(many)
            self.options.on_progress(self.report.tried, max(self.report.selected, self.report.tried))

    def _sequences(self, page: pa.Table, *, passed: bool) -> set[bytes]:
        """The sequences in which a letter of the page has passed, or has not."""
        pairs = zip(page["id"].to_pylist(), page["sequence"].to_pylist(), strict=True)
        return {s for letter, s in pairs if s is not None and (letter in self.passed) == passed}

    def _room(self) -> int:
        """Letters that may still be run. Those that cannot be read take no room: else they would keep all behind them from running."""
        return room(self.options.limit, self._ran)

    @property
    def _ran(self) -> int:
        """Letters that were dealt with, without those that could not be read."""
        return self.report.tried - len(self.report.unread)

    def _most(self) -> int:
        """Letters that may be run in the next transaction."""
        return min(self.size, self.options.at_once, self._room())

    def _many(self) -> int:
        """Letters to look at next."""
        return ahead(self._most(), self.idle)

    def _pause(self) -> None:
        """So long that no more letters than the rate says were run since the beginning."""
        if self.options.rate is not None:
            self.options.sleep(max(0.0, self._ran / self.options.rate - (time.monotonic() - self.started)))

    def _followers(self, sequences: tuple[bytes, ...]) -> pa.Table:
        """Letters of these sequences that nothing blocks any more and that were not tried yet."""
        asked = Selection(self.job.name, sequences=sequences, statuses=RUNNABLE, limit=LARGEST_PAGE)
        found = self.job.store.letters(asked, LISTED)
        return self.young(self._not_done(found))

    def _run(self, page: pa.Table) -> None:
        bodies, lost = self._whole_bodies(self.young(page))
        page = self._not_done(page)
        while (page := self.young(page)).num_rows and (many := self._many()):  # a rate may have kept it waiting
            left = self._run_at_once(page.slice(0, many), lost, bodies)
            page = pa.concat_tables([left, page.slice(many)])
            self._pause()

    def _run_at_once(self, page: pa.Table, lost: set[str], bodies: Mapping[str, WholeEvent]) -> pa.Table:
        """One transaction of a page; returns the letters that are left for the next one."""
        gone = lost & set(page["id"].to_pylist())
        tried = with_replanning(lambda: self._transact(page, gone, bodies))
        left = pc.is_in(page["id"], value_set=pa.array(tried.left, pa.string()))
        mine, page = page.filter(pc.invert(left)), page.filter(left)
        self._note_unread(mine, tried.closed)
        mine = self._not_done(mine)
        self.done.update(mine["id"].to_pylist())
        self.passed.update(letter for letter, state in tried.states.items() if succeeded(state))
        self._count(mine, tried.states, tried.lost)
        return page

    def _not_done(self, letters: pa.Table) -> pa.Table:
        return picked(letters, np.flatnonzero([letter not in self.done for letter in letters["id"].to_pylist()]))

    def _note_unread(self, letters: pa.Table, why: Mapping[str, str]) -> None:
        """Report those of these letters that cannot be read, and have done with them."""
        unread = [Unread(**row, why=why[row["letter"]]) for row in places(letters) if row["letter"] in why]
        self.report.unread += unread
        self.done.update(one.letter for one in unread)
        self.idle += len(unread)

    def _whole_bodies(self, page: pa.Table) -> tuple[Mapping[str, WholeEvent], set[str]]:
        """The events that only the log has whole, and the letters whose event is lost; those that cannot be read are done with."""
        large = page.filter(pc.is_valid(page["body_sha256"]))
        if not large.num_rows:
            return {}, set()
        bodies = read_bodies(self.job, large, self.away)
        self.away = bodies.away
        missing = {} if self.options.skip_missing else dict.fromkeys(bodies.gone, GONE)
        self._note_unread(large, {**bodies.unread, **missing})
        return bodies.whole, bodies.gone - missing.keys()

    def _first(self, page: pa.Table) -> list[str]:
        """Those that nothing blocks but others of these. The rest is not locked: who lets one go on would wait for our handler."""
        if Status.BLOCKED not in page["status"].to_pylist():
            return list(page["id"].to_pylist())
        now = self.job.store.letters(Selection(ids=tuple(page["id"].to_pylist()), limit=None), ["id", "status", "blocked_by"])
        return list(eligible(now)["id"].to_pylist())

    def _transact(self, page: pa.Table, lost: set[str], bodies: Mapping[str, WholeEvent]) -> _Transacted:
        """One transaction. Of letters that can be read it takes no more than may be run; the others of the page are left.

        Crash: what became of all its letters is true, or of none.
        """
        job, store, first = self.job, self.job.store, self._first(page)
        with company.taken(job.name), store.begin_letters(job.name) as transaction:
            letters, redact = transaction.lock(sorted({*first, *lost})), job.policy.on_failure.redact
            letters, closed = restored(letters, bodies, redact, lost, decodes=job.policy.decodes)
            rest = page.slice(within(page, closed, self._most()))["id"].to_pylist()
            letters = letters.filter(pc.invert(pc.is_in(letters["id"], value_set=pa.array(rest, pa.string()))))
            gone, letters, left = _at_once(eligible(letters), lost)
            steps: list[Step] = [*losing(gone, self._held(gone, transaction), self.options)] if gone.num_rows else []
            states: dict[str, int] = {}
            if letters.num_rows:
                change, states = self._try(letters, transaction)
                steps.append(change)
            for step in (*steps, Commit()) if steps else ():
                store.on_step(step.name)
                transaction.execute(step)
        return _Transacted(states, closed, frozenset(gone["id"].to_pylist()), [*left, *rest])

    def _try(self, letters: pa.Table, transaction: Transaction) -> tuple[Change, dict[str, int]]:
        job, head = self.job, transaction.head
        first = letters.select(["source", "topic", "incarnation"]).slice(0, 1).to_pylist()[0]
        events = events_of(letters, positions=job.preparation.positions, decodes=job.policy.decodes)
        frame = events if self.spark is None else frame_of(self.spark, events)
        spec = as_they_came(job.prepare(head), {(first["source"], first["topic"]): first["incarnation"]})
        with open_batch(frame, job.scratch).evaluate(spec) as rows:
            index, content = Index.of(rows.index, rows.payload_hashes), rows.content(np.arange(letters.num_rows))
            ids = [content[LETTER][int(row)].as_py() for row in index.order]
            held = held_keys(index, ids, letters, self._given_keys(index, ids, letters))
            sifted = sift_asked(held)
            settled, won = settle_held(held, sifted, transaction.reserve(sifted.reserve), job.policy.on_key_conflict)
            settled, why = self._handle(rows, settled, kept_order(letters, ids), transaction)
            texts = [content["_key_text"][int(row)].as_py() for row in index.order]
        by_id = {letter["id"]: letter for letter in letters.drop_columns(["body", "properties", "extras"]).to_pylist()}
        redact = job.policy.on_failure.redact
        tried = Tried(settled, why, [by_id[i] for i in ids], texts, frozenset(won.tolist()), job.policy.max_body, redact)
        change = change_of(tried, self.options.by, self.options.reason, dt.datetime.now(dt.UTC))
        return change, {letter: tried.state(row) for row, letter in enumerate(ids)}

    def _handle(self, rows: EvaluatedBatch, settled: Settled, order: Order, transaction: Transaction) -> tuple[Settled, Any]:
        job = self.job
        order.block_behind(letter_rows(settled))
        chunk = commit.Chunk(rows, settled.index, Run("reprocess", 0), transaction.head)
        policy = job.policy.unwatched()
        undecodable = commit.why_undecodable(chunk, settled, policy)
        settled, why, _ = commit.handle(chunk, settled, order, transaction, policy, job.store.on_step)
        return settled, replace(why, undecodable=undecodable)

    def _held(self, letters: pa.Table, transaction: Transaction) -> dict[str, list[bytes]]:
        """Letter -> the keys that are reserved for it, those that edits replaced included."""
        own = plans.held(letters, self.job.store.history(*letters["id"].to_pylist()))
        there = set(known(self.job.store, self.job.name, (key for keys in own.values() for key in keys), transaction))
        return {letter: [key for key in keys if key in there] for letter, keys in own.items()}

    def _given_keys(self, index: Index, ids: Sequence[str], letters: pa.Table) -> Bools:
        """Rows whose letter holds another key than its body says, because a person gave it."""
        plain = held_keys(index, ids, letters, np.zeros(len(index), dtype=bool))
        holds = dict(zip(letters["id"].to_pylist(), letters["holds_key"].to_pylist(), strict=True))
        doubtful = [row for row in np.flatnonzero(plain.asked).tolist() if holds[ids[row]]]
        by_hand = given_a_key(self.job.store.history(*(ids[row] for row in doubtful))) if doubtful else set()
        return np.array([letter in by_hand for letter in ids], dtype=bool)

    def _count(self, page: pa.Table, states: Mapping[str, int], lost: Collection[str]) -> None:
        if not page.num_rows:
            return
        report, longest, self.idle = self.report, 0, 0
        for letter, status in zip(page["id"].to_pylist(), page["status"].to_pylist(), strict=True):
            counted = "lost" if letter in lost else outcome(states.get(letter), status)
            setattr(report, counted, getattr(report, counted) + 1)
            if counted in ("reprocessed", "duplicates", "failed"):
                self.in_a_row = self.in_a_row + 1 if counted == "failed" else 0
            longest = max(longest, self.in_a_row)
        failed = any(not succeeded(state) and state != WAITING for state in states.values())
        self.size = FIRST_PAGE if failed else min(2 * self.size, LARGEST_PAGE)
        if longest >= self.options.stop_after:
            error = ReprocessStopped(
                f"{longest} letters in a row failed again; {report.reprocessed} were reprocessed before. "
                f"`dedup dead-letter group` shows why. A second call goes on with what is left."
            )
            error.report = report
            raise error


def room(limit: int | None, used: int) -> int:
    """How many letters may still be run, at most those of a page."""
    return LARGEST_PAGE if limit is None else max(0, limit - used)


def ahead(most: int, idle: int) -> int:
    """How many letters to look at where `most` may be run: as many again as could not be read in a row, so that few steps pass them all."""
    return max(most, min(idle, LARGEST_PAGE)) if most else 0


def within(page: pa.Table, unread: Collection[str], most: int) -> int:
    """How many letters of a page stand before the place where `most` of those that can be read have been taken."""
    good = np.array([letter not in unread for letter in page["id"].to_pylist()], dtype=bool)
    return int(np.count_nonzero(np.cumsum(good) - good < most))


def pages(store: Store, selection: Selection, many: Callable[[], int], keep: Keep) -> Iterator[pa.Table]:
    """The letters that can be run, in position order, a page at a time.

    Args:
        many: how many are wanted next; asked before each page. 0 ends it.
        keep: leaves some out of a page.
    """
    after = selection.after
    while many() > 0:
        page = store.letters(replace(selection, statuses=RUNNABLE, limit=LARGEST_PAGE, after=after), LISTED)
        if not page.num_rows:
            return
        after, chosen = page["id"][-1].as_py(), keep(page)
        while (part := chosen.slice(0, many())).num_rows:
            yield part
            chosen = chosen.slice(part.num_rows)


def count(
    store: Store,
    chosen: Selection,
    options: ReprocessOptions,
    keep: Keep,
    look: Callable[[pa.Table], list[Unread]] | None = None,
    behind: Behind | None = None,
) -> tuple[dict[str, int], list[Unread]]:
    """How many letters can be run, by kind; and what `look` finds in each page of them, which does not count for the limit.

    Args:
        behind: is told of all others.
    """
    kinds: Counter[str] = Counter()
    found: list[Unread] = []

    def left() -> int:
        return room(options.limit, kinds.total() - len(found))

    for page in pages(store, chosen, lambda: ahead(left(), len(found)), keep):
        unread = {one.letter: one for one in (look(page) if look else ())}
        page = page.slice(0, within(page, unread, left()))
        kinds.update(page["kind"].to_pylist())
        found.extend(unread[letter] for letter in page["id"].to_pylist() if letter in unread)
        if behind is not None:
            behind.add(page.filter(pc.invert(pc.is_in(page["id"], pa.array(list(unread), pa.string())))))
    return dict(sorted(kinds.items())), found


def unreadable(consumer: Consumer, letters: pa.Table) -> list[Unread]:
    """Those of these letters that a run could not read: the log alone has their bodies and nothing reads it, or no key opens them."""
    large = [] if consumer.read_log else places(letters.filter(pc.is_valid(letters["body_sha256"])))
    found = [Unread(**row, why=no_reader(consumer.name)) for row in large]
    return found + [one for part in alike(letters) for one in closed(consumer.store, part, consumer.on_failure.redact)]


def closed(store: Store, letters: pa.Table, redact: hiding.Redact | None) -> list[Unread]:
    """Those of these letters that are sealed and cannot be opened. Only sealed ones are read whole, and opened for it."""
    kept = store.letters(Selection(ids=tuple(letters["id"].to_pylist()), limit=None), ["id", "extras"])
    sealed = kept["id"].take(pa.array([row for row, mark in hiding.marks(kept).items() if not mark.masked], pa.int64())).to_pylist()
    if not sealed:
        return []
    whole = store.letters(Selection(ids=tuple(sealed), limit=None))
    _, why = hiding.open_letters(whole, redact)
    return [Unread(**row, why=why[row["letter"]]) for row in places(whole) if row["letter"] in why]


def places(letters: pa.Table) -> list[dict[str, Any]]:
    """Id and position of each letter, as Unread has them."""
    found: list[dict[str, Any]] = letters.select(PLACE).rename_columns(["letter", *PLACE[1:]]).to_pylist()
    return found


def refuse_unread(report: Reprocessed) -> None:
    """Raise LettersUnread, with the report, where letters could not be read; name the first of each reason."""
    if not report.unread:
        return
    error = LettersUnread(
        f"{len(report.unread)} of {max(report.selected, report.tried)} letters were not run, because their whole events could not be read. "
        f"{report.reprocessed} were reprocessed. {told(report.unread)}"
    )
    error.report = report
    raise error


def told(unread: Sequence[Unread]) -> str:
    """These letters, by reason."""
    reasons: dict[str, list[Unread]] = {}
    for one in unread:
        reasons.setdefault(one.why, []).append(one)
    more = f" There are {len(reasons) - TOLD} more reasons: `report.unread` has all." if len(reasons) > TOLD else ""
    return " ".join(f"{some(those)}: {why}" for why, those in list(reasons.items())[:TOLD]) + more


def some(those: Sequence[Unread]) -> str:
    """The first of these letters."""
    return ", ".join(map(str, those[:TOLD])) + (f" and {len(those) - TOLD} more" if len(those) > TOLD else "")


def outcome(state: int | None, status: str) -> str:
    """The field of the report that counts a letter."""
    if state is None:  # not tried: it waits behind a letter that was not selected, or somebody else has it
        return "waiting" if status == Status.BLOCKED else "left"
    if state == WAITING:
        return "waiting"
    if state == DUPLICATE:
        return "duplicates"
    return "reprocessed" if succeeded(state) else "failed"


def alike(page: pa.Table) -> Iterator[pa.Table]:
    """Parts of a page whose letters are of one life of one topic, and together not too large."""
    same = [page[name].to_pylist() for name in ("generation", "source", "topic", "incarnation")]
    sizes, start, held = [size or 0 for size in page["body_size"].to_pylist()], 0, 0
    for row, life in enumerate(zip(*same, strict=True)):
        if row > start and (life != tuple(values[start] for values in same) or held + sizes[row] > PAGE_BYTES):
            yield page.slice(start, row - start)
            start, held = row, 0
        held += sizes[row]
    yield page.slice(start)


def eligible(letters: pa.Table) -> pa.Table:
    """Those that are open, and those that are blocked by nothing but others of these."""
    allowed: set[str] = set()
    chosen = []
    for letter, status, before in zip(*(letters[name].to_pylist() for name in ("id", "status", "blocked_by")), strict=True):
        good = status == Status.OPEN or (status == Status.BLOCKED and before in allowed)
        chosen.append(good)
        if good:
            allowed.add(letter)
    return picked(letters, np.flatnonzero(chosen))


def _at_once(letters: pa.Table, lost: Collection[str]) -> tuple[pa.Table, pa.Table, list[str]]:
    """Of letters that can be run: those that are lost, those that one handler's frame can hold, and the ids of the others."""
    is_lost = np.array([letter in lost for letter in letters["id"].to_pylist()], dtype=bool)
    fit = is_lost.copy()
    fit[~is_lost] = of_one_form(picked(letters, np.flatnonzero(~is_lost)))
    chosen = eligible(picked(letters, np.flatnonzero(fit)))  # without those behind one that does not fit
    gone = pc.is_in(chosen["id"], value_set=pa.array(list(lost), pa.string()))
    left = set(letters["id"].to_pylist()) - set(chosen["id"].to_pylist())
    return chosen.filter(gone), chosen.filter(pc.invert(gone)), sorted(left)


def losing(letters: pa.Table, keys: Mapping[str, Sequence[bytes]], options: ReprocessOptions) -> list[Change | Free]:
    """The events are lost: one that comes again counts as new.

    Args:
        keys: letter -> the keys that it holds.
    """
    now, rows = dt.datetime.now(dt.UTC), letters.drop_columns(["body", "properties", "extras"]).to_pylist()
    held = sorted({key for own in keys.values() for key in own})
    changed = pa.table({"id": letters["id"], "status": [Status.LOST.value] * len(rows), "holds_key": [False] * len(rows)})
    done = {"at": now, "action": Action.LOST.value, "by": options.by, "reason": options.reason}
    firsts = [entry for row in rows for entry in untold(row)]
    entries = [{**done, "letter_id": row["id"], "reserved": -len(keys.get(row["id"], ()))} for row in rows]
    return [Change(changed, history([*firsts, *entries])), Free(pa.table({"key": pa.array(held, pa.binary(16))}))]
