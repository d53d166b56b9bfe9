"""A person sends dead letters through the same door again: the same preparation, the same handler, the same kind of transaction.

Letters go in pages, in position order, each page one transaction in which their status changes. A page takes no epoch and no checkpoint: it
works while the stream runs. What a page has committed is done; a second call goes on with the letters that are left.
"""

from __future__ import annotations

import datetime as dt
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from checkpoint.errors import PositionsMissing, ReprocessStopped
from deadletter.selection import Selection
from dedup import letter_plans, resolved, unsent
from dedup.absent import fill
from dedup.consumer import Consumer, open_batch
from dedup.coverage import coverage, matching
from dedup.index import Index
from dedup.keys import LETTER, SEQUENCE
from dedup.letter_events import as_they_came, events_of, held_keys, settle_held, sift_asked
from dedup.letter_keys import was_given
from dedup.letter_work import known
from dedup.letters import letter_rows
from dedup.order import Order
from dedup.outage import with_replanning
from dedup.pages import (
    FIRST_PAGE,
    LARGEST_PAGE,
    LISTED,
    RUNNABLE,
    Reprocessed,
    ReprocessOptions,
    alike,
    count,
    eligible,
    losing,
    outcome,
    pages,
)
from dedup.pipeline import commit, company, guards
from dedup.pipeline.batch import EvaluatedBatch
from dedup.pipeline.commit import Job
from dedup.planning import WAITING, Settled
from dedup.readlog import read_bodies
from dedup.rows import for_spark, picked
from dedup.steps import Change, Commit, Step
from dedup.store import Run, Transaction


def reprocess(
    selection: Selection,
    consumer: Consumer,
    *,
    spark: Any | None = None,
    from_log: bool = False,
    dry_run: bool = False,
    options: ReprocessOptions | None = None,
) -> Reprocessed:
    """Run the selected letters that are open or blocked through the consumer's handler.

    Letters of messages (kind UNSENT) are selected by that kind alone; no handler runs, and the messages wait to be sent again.

    A letter that passes is REPROCESSED, and the letters that waited behind it are run, too, oldest first. One that fails again stays as it
    is, with one more attempt. How many are run at most is `options.limit`; that of the selection is not looked at.

    Args:
        spark: the session, for handlers that take DataFrames; without it they get pyarrow tables.
        from_log: run no letters but the positions of the selected range that were never delivered, as those of an accepted gap.
        dry_run: count what is selected, by kind; nothing runs and nothing changes.

    Raises:
        ReprocessStopped: `options.stop_after` letters in a row failed.
        PositionsMissing: bodies that are not kept whole, or absent positions, are not in the log; without `options.skip_missing`.
        IncarnationChanged: the log has another event where the body of a letter has to be read.
        HandlerError: this is called inside the consumer's own handler.
        ConfigError: from_log without a topic, or nothing is registered with `consumer.log`.

    Crash: each page is done or not; a second call goes on.
    """
    guards.refuse(consumer.identity, "A reprocess")
    if unsent.is_meant(selection):
        return unsent.reprocess(consumer.store, replace(selection, consumer=consumer.name), dry_run=dry_run)
    head = consumer.known_head()
    chosen, store, how = replace(selection, consumer=consumer.name), consumer.store, options or ReprocessOptions()
    report = Reprocessed(dry_run=dry_run)
    if from_log:
        filled = fill(chosen, consumer, dry_run=dry_run, options=how)
        report.absent, report.filled, report.lost = filled.absent, filled.ran, len(filled.lost)
        return report
    report.by_kind = count(store, chosen, how)
    report.selected = sum(report.by_kind.values())
    if chosen.topic is not None and (chosen.first is not None or chosen.last is not None):
        covers = [coverage(store, head, p, chosen) for p in matching(head, chosen)]
        report.processed, report.absent = sum(len(c.processed) for c in covers), sum(len(c.absent) for c in covers)
    if not dry_run and report.selected:
        _Reprocess(consumer.job(), spark, how, report).run(chosen)
    return report


class _Reprocess:
    """One call."""

    def __init__(self, job: Job, spark: Any | None, options: ReprocessOptions, report: Reprocessed) -> None:
        self.job, self.spark, self.options, self.report = job, spark, options, report
        self.size, self.in_a_row = FIRST_PAGE, 0
        self.done: set[str] = set()
        self.started = time.monotonic()

    def run(self, selection: Selection) -> None:
        """Page by page."""
        for page in pages(self.job.store, selection, self.options.limit, lambda: min(self.size, self.options.at_once)):
            self._run_with_followers(page)

    def _run_with_followers(self, page: pa.Table) -> None:
        while (page := page.slice(0, self._room())).num_rows:
            before = self.report.reprocessed + self.report.duplicates
            for start in range(0, page.num_rows, self.options.at_once):
                for part in alike(page.slice(start, self.options.at_once)):
                    self._run(part)
                self.options.on_progress(self.report.tried, max(self.report.selected, self.report.tried))
                self._pause()
            sequences = tuple({s for s in page["sequence"].to_pylist() if s is not None})
            released = self.report.reprocessed + self.report.duplicates > before
            page = self._followers(sequences) if sequences and released else page.slice(0, 0)

    def _room(self) -> int:
        """Letters that may still be run."""
        return LARGEST_PAGE if self.options.limit is None else max(0, self.options.limit - self.report.tried)

    def _pause(self) -> None:
        """So long that no more letters than the rate says were run since the beginning."""
        if self.options.rate is not None:
            self.options.sleep(max(0.0, self.report.tried / self.options.rate - (time.monotonic() - self.started)))

    def _followers(self, sequences: tuple[bytes, ...]) -> pa.Table:
        """Letters of these sequences that nothing blocks any more and that were not tried yet."""
        asked = Selection(self.job.name, sequences=sequences, statuses=RUNNABLE, limit=LARGEST_PAGE)
        found = self.job.store.letters(asked, LISTED)
        return self._not_done(found)

    def _run(self, page: pa.Table) -> None:
        if self.job.reprocess_within is not None:
            young = pc.greater_equal(page["first_failed_at"], dt.datetime.now(dt.UTC) - self.job.reprocess_within)
            self.report.expired += page.num_rows - page.filter(young).num_rows
            page = page.filter(young)
        if not page.num_rows:
            return
        bodies, lost = self._whole_bodies(page)
        page = self._not_done(page)
        ids = page["id"].to_pylist()
        states = with_replanning(lambda: self._transact([i for i in ids if i not in lost], lost, bodies))
        self.done.update(ids)
        self._count(page, states, lost)

    def _not_done(self, letters: pa.Table) -> pa.Table:
        return picked(letters, np.flatnonzero([letter not in self.done for letter in letters["id"].to_pylist()]))

    def _whole_bodies(self, page: pa.Table) -> tuple[Mapping[str, bytes], set[str]]:
        large = page.filter(pc.is_valid(page["body_sha256"]))
        if not large.num_rows:
            return {}, set()
        letters = self.job.store.letters(Selection(ids=tuple(large["id"].to_pylist()), limit=None))
        bodies = read_bodies(self.job, letters)
        lost = {i for i in letters["id"].to_pylist() if i not in bodies}
        if lost and not self.options.skip_missing:
            where = ", ".join(f"{x['topic']}/{x['partition']} {x['sequence_number']}" for x in letters.to_pylist() if x["id"] in lost)
            raise PositionsMissing(
                f"The bodies at {where} are larger than max_body and cannot be had from the log any more. "
                "Leave them out, or record them as LOST with --skip-missing."
            )
        return bodies, lost

    def _transact(self, ids: Sequence[str], lost: set[str], bodies: Mapping[str, bytes]) -> dict[str, int]:
        """One transaction; letter -> what became of it."""
        job, store = self.job, self.job.store
        with company.taken(job.name), store.begin_letters(job.name) as transaction:
            letters = eligible(transaction.lock(sorted({*ids, *lost})))
            is_lost = np.array([letter in lost for letter in letters["id"].to_pylist()], dtype=bool)
            gone, letters = picked(letters, np.flatnonzero(is_lost)), picked(letters, np.flatnonzero(~is_lost))
            steps: list[Step] = [*losing(gone, self._held(gone, transaction), self.options)] if gone.num_rows else []
            states: dict[str, int] = {}
            if letters.num_rows:
                change, states = self._try(letters, bodies, transaction)
                steps.append(change)
            if not steps:
                return states
            for step in (*steps, Commit()):
                store.on_step(step.name)
                transaction.execute(step)
        return states

    def _try(self, letters: pa.Table, bodies: Mapping[str, bytes], transaction: Transaction) -> tuple[Change, dict[str, int]]:
        job, head = self.job, transaction.head
        first = letters.select(["source", "topic", "incarnation"]).slice(0, 1).to_pylist()[0]
        events = events_of(letters, bodies, positions=job.preparation.positions)
        given = events if self.spark is None else self.spark.createDataFrame(for_spark(events))
        spec = as_they_came(job.prepare(head), {(first["source"], first["topic"]): first["incarnation"]})
        with open_batch(given, job.scratch).evaluate(spec) as rows:
            index, content = Index.of(rows.index, rows.payload_hashes), rows.content(np.arange(letters.num_rows))
            ids = [content[LETTER][int(row)].as_py() for row in index.order]
            held = held_keys(index, ids, letters, self._given_keys(index, ids, letters))
            sifted = sift_asked(held)
            settled, won = settle_held(held, sifted, transaction.reserve(sifted.reserve), job.policy.on_key_conflict)
            settled, why = self._handle(rows, settled, transaction)
            texts = [content["_key_text"][int(row)].as_py() for row in index.order]
        by_id = {letter["id"]: letter for letter in letters.drop_columns(["body", "properties", "extras"]).to_pylist()}
        tried = resolved.Tried(settled, why, [by_id[i] for i in ids], texts, frozenset(won.tolist()))
        change = resolved.change_of(tried, self.options.by, self.options.reason, dt.datetime.now(dt.UTC))
        return change, {letter: tried.state(row) for row, letter in enumerate(ids)}

    def _handle(self, rows: EvaluatedBatch, settled: Settled, transaction: Transaction) -> tuple[Settled, Any]:
        job, columns = self.job, rows.index.column_names
        sequences = rows.index[SEQUENCE[0]].take(pa.array(settled.index.order)) if SEQUENCE[0] in columns else None
        order = Order(sequences, len(settled.index))
        order.block_behind(letter_rows(settled))
        chunk = commit.Chunk(rows, settled.index, Run("reprocess", 0), transaction.head)
        policy = job.policy.unwatched()
        settled, why, _ = commit.handle(chunk, settled, order, transaction, policy, job.store.on_step)
        return settled, why

    def _held(self, letters: pa.Table, transaction: Transaction) -> dict[str, list[bytes]]:
        """Letter -> the keys that are reserved for it, those that edits replaced included."""
        own = letter_plans.held(letters, self.job.store.history(*letters["id"].to_pylist()))
        there = set(known(self.job.store, self.job.name, (key for keys in own.values() for key in keys), transaction))
        return {letter: [key for key in keys if key in there] for letter, keys in own.items()}

    def _given_keys(self, index: Index, ids: Sequence[str], letters: pa.Table) -> Any:
        """Rows whose letter holds another key than its body says, because a person gave it."""
        plain = held_keys(index, ids, letters, np.zeros(len(index), dtype=bool))
        holds = dict(zip(letters["id"].to_pylist(), letters["holds_key"].to_pylist(), strict=True))
        doubtful = [row for row in np.flatnonzero(plain.asked).tolist() if holds[ids[row]]]
        given = np.zeros(len(index), dtype=bool)
        for row in doubtful:
            given[row] = was_given(self.job.store.history(ids[row]))
        return given

    def _count(self, page: pa.Table, states: Mapping[str, int], lost: set[str]) -> None:
        report, longest = self.report, 0
        for letter, status in zip(page["id"].to_pylist(), page["status"].to_pylist(), strict=True):
            counted = "lost" if letter in lost else outcome(states.get(letter), status)
            setattr(report, counted, getattr(report, counted) + 1)
            if counted in ("reprocessed", "duplicates", "failed"):
                self.in_a_row = self.in_a_row + 1 if counted == "failed" else 0
            longest = max(longest, self.in_a_row)
        failed = any(not resolved.succeeded(state) and state != WAITING for state in states.values())
        self.size = FIRST_PAGE if failed else min(2 * self.size, LARGEST_PAGE)
        if longest >= self.options.stop_after:
            raise ReprocessStopped(
                f"{longest} letters in a row failed again; {report.reprocessed} were reprocessed before. "
                f"`dedup dead-letters groups` shows why. A second call goes on with what is left."
            )
