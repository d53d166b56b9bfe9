"""Run the handler over the new rows of a chunk until each row is decided: retries, bisect, order, budget, deaths.

The handler first gets all rows together. If it fails, the rows are halved in position order until the rows that fail are alone. What a
failed part wrote is undone. Called by the pipeline inside the chunk's transaction.
"""

from __future__ import annotations

import bisect
import datetime as dt
import inspect
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from checkpoint.errors import BudgetExceeded, DedupError, HandlerError, RowsRefused, SinkMismatch, ValuesRefused, command
from checkpoint.head import Head, Spent
from checkpoint.position import Ints
from deadletter import outage
from deadletter.classify import classify, killed_a_worker, outlasted
from deadletter.crashes import CrashMarker
from deadletter.failure import Failure, describe
from deadletter.known import PERMANENT, SYSTEMIC, TRANSIENT, ErrorClass
from deadletter.letter import Kind
from deadletter.outage import TriedOnceMore
from deadletter.policy import OwnPolicy, Used
from dedup.core import decision
from dedup.core.planning import Order, Settled
from dedup.core.rows import named
from dedup.core.store import Transaction
from dedup.pipeline import company, reentry
from dedup.pipeline.batch import EvaluatedBatch
from dedup.pipeline.performance import EventsFailed, are_the_columns
from dedup.pipeline.reentry import limited
from dedup.pipeline.tx import Handler, Tx, refuse_unknown_name

log = logging.getLogger("dedup")


@dataclass
class HandlerOutcome:
    """What became of the rows that the handler was given. A row that is in none of these was processed."""

    rejected: dict[int, str] = field(default_factory=dict)  # row -> reason
    skipped: set[int] = field(default_factory=set)
    failed: dict[int, list[Failure]] = field(default_factory=dict)  # row -> its failures, oldest first
    waiting: set[int] = field(default_factory=set)  # behind a letter of their sequence


class HandlerExited(Exception):
    """The handler called sys.exit, was cancelled, or raised what is no Exception: this ends the handler, not the process."""


class _OutOfOrder(Exception):
    """A run decided rows that have to wait behind one that it rejected."""

    def __init__(self, rejected: dict[int, str]) -> None:
        super().__init__()
        self.rejected = rejected


@dataclass
class Attempts:
    """The attempts of one chunk. Use once."""

    batch: EvaluatedBatch
    settled: Settled
    order: Order
    transaction: Transaction
    handler: Handler
    on_failure: OwnPolicy
    marker: CrashMarker
    on_step: Callable[[str], None]
    culprits: set[int] = field(default_factory=set)  # rows that halves found when this chunk was tried before: tried alone at once
    outcome: HandlerOutcome = field(default_factory=HandlerOutcome)

    def __post_init__(self) -> None:
        self._head: Head = self.transaction.head
        self._new = self.settled.new
        self._spent = self._head.spent.get(Kind.HANDLER_ERROR, Spent())
        self._failures = list(self._spent.failures)
        self._standing = np.zeros(0, dtype=np.int64)  # rejected by a run whose other effects were undone
        self._frameless: Exception | None = None  # what was raised where the handler's frame could not be made
        self._brownout = Brownout(frozenset(self.culprits), self._spent.out_of_time)

    def run(self) -> HandlerOutcome:
        """Decide every new row.

        Raises:
            TriedOnceMore: events ran out of time before others passed. All of them are `culprits` now, so that one more try is enough.
            BudgetExceeded: too many of them fail.
            Whatever is not the fault of an event: errors of the store, broken rules, systemic errors; with bisect=False everything but
            what a handler of single events raises for one of them.

        Crash: nothing is true before the commit; the crash marker says what was being tried.
        """
        try:
            for rows in self._parts():
                self._bisect(rows, fails=False)
            self._check_budget()
        except BaseException:
            self.marker.survived()
            raise
        if self.marker.deaths:  # whoever dies at the commit must not be taken for one that the last events killed
            self.marker.survived()
        return self.outcome

    def _parts(self) -> Iterator[Ints]:
        """The rows to try together. Known culprits come alone, each in its place: it may pass now, and what it writes keeps its order."""
        known = np.flatnonzero(np.isin(self._new, sorted(self.culprits)))
        if not len(known) or self.order.kept or self.marker.careful:
            yield self._new
            return
        yield from (part for part in np.split(self._new, np.unique([known, known + 1])) if len(part))

    def _bisect(self, rows: Ints, *, fails: bool) -> bool:
        """Try these rows, and halve them where they fail; returns whether any of them failed.

        Args:
            fails: they were seen to fail together with others that passed alone: not tried together again.
        """
        rows = self._pending(rows)
        if not len(rows):
            return False
        if self.marker.careful and self.marker.kills(rows):
            if len(rows) == 1:
                self._park_crashed(int(rows[0]))
                return True
        elif not (fails and len(rows) > 1):
            if (failures := self._try(rows)) is None:
                return False
            rows = self._pending(rows)
            if len(rows) == 1:
                self.culprits.add(int(rows[0]))  # those that a handler of events names are found in one run, however often
                self._park(int(rows[0]), failures)
                return True
        middle = (len(rows) + 1) // 2
        first_failed = self._bisect(rows[:middle], fails=False)
        # If the failure is of single events, it must be in the other half.
        second_failed = self._bisect(rows[middle:], fails=not first_failed and not self.marker.careful)
        return first_failed or second_failed

    def _pending(self, rows: Ints) -> Ints:
        """Without those that are decided although the run that decided them was undone, and those that have to wait."""
        rows = np.setdiff1d(rows, self._standing) if len(self._standing) else rows
        if not self.order.kept:
            return rows
        waits = self.order.waits(rows)
        self.outcome.waiting.update(rows[waits].tolist())
        return rows[~waits]

    def _try(self, rows: Ints) -> list[Failure] | None:
        """Run the handler on these rows, again where the error may pass; the failures if it is the fault of one of them."""
        failures: list[Failure] = []
        whole = len(rows) == 1 or len(rows) == len(self._new)
        policy = self.on_failure
        retrying = policy.retry.retrying(self._class_here, self._tell_retry, None, killed_a_worker, policy.sleep, policy.clock)
        try:
            if whole:
                retrying(self._once, rows, failures)
            else:  # the halves of what failed are not worth waiting for
                self._once(rows, failures)
        except Exception as error:
            if not self.on_failure.bisect or (self._is_not_of_an_event(error) and not outage.may_pass_in_parts(error, len(rows))):
                raise
            left = self._pending(rows)  # without those that the runs before the last one decided
            if len(left) == 1 and self._class_here(error) == TRANSIENT and not killed_a_worker(error):
                self._out_of_time(int(left[0]), failures)
            return failures
        if not self.outcome.waiting.union(self.outcome.failed).issuperset(rows.tolist()):  # a handler of events may have named all
            self._brownout.passed()
        return None

    def _try_once_more(self) -> None:
        """Raise TriedOnceMore where an outage is over that events ran out of time in."""
        if self._brownout.again and self.on_failure.budget:
            raise TriedOnceMore(f"Consumer {self._head.consumer!r}: {self._brownout.again} {_AGAIN}")

    def _out_of_time(self, row: int, failures: list[Failure]) -> None:
        """Raise BudgetExceeded where so many run out of time, one after another, that it must be an outage."""
        if self._clock(row) <= self._spent.lifted:  # a person has said that it is slow
            return
        if self._brownout.add(row) and self.on_failure.budget:
            self.culprits.add(row)
            raise BudgetExceeded(_out_of_time(self._head.consumer, self.settled.index.describe(row), failures[-1]))

    def _class_of(self, error: BaseException) -> ErrorClass:
        return classify(error, self.on_failure.errors)

    def _class_here(self, error: BaseException) -> ErrorClass:
        """Whether to try again inside this transaction: after an error of the store it is at an end, and only a new one can pass.

        A frame that cannot be made is no event's fault, and what may pass of that is tried again with the batch.
        """
        return SYSTEMIC if is_ours(error) or error is self._frameless else self._class_of(error)

    def _is_not_of_an_event(self, error: Exception) -> bool:
        if isinstance(error, RowsRefused):
            return False
        found = self._class_here(error)
        return SYSTEMIC in (found, outlasted(error) if found == TRANSIENT else None)

    def _tell_retry(self, number: int, error: BaseException, wait: float) -> None:
        failure = describe(error, _now())
        said = failure.message if self.on_failure.redact is None else failure.error_type  # what letters hide is not for logs
        log.warning("%s: attempt %d failed (%s), again in %.2f s", self._head.consumer, number, said, wait)

    def _once(self, rows: Ints, failures: list[Failure]) -> None:
        rows = self._pending(rows)  # a retry: what the try before it rejected stands
        while len(rows):
            try:
                return self._run(rows)
            except _OutOfOrder as found:
                rows = self._keep_rejected(rows, found.rejected)
            except EventsFailed as found:
                self._refuse_misfits(rows, [why for why, misfits in found.misfits.values() if are_the_columns(misfits, len(rows))])
                rows = self._park_found(rows, found, failures)
            except Exception as error:
                if isinstance(error, ValuesRefused):
                    self._refuse_misfits(rows, [why for why, _ in error.misfits.values()])
                failures.append(describe(error.__cause__ if isinstance(error, HandlerExited) and error.__cause__ else error, _now()))
                raise

    def _run(self, rows: Ints) -> None:
        """One run of the handler: all of it counts, or nothing."""
        index = self.settled.index
        tx = Tx(self.batch.frames, index, rows, self.transaction, self.order.lanes(rows))
        if self.marker.careful or len(rows) == len(self._new):
            self.marker.mark(rows)
        self.on_step("handler")
        limit = limited(self.on_failure.seconds_of_handler, f"{self._head.consumer}: a run of the handler", self._blame)
        with limit, self.transaction.attempt(), reentry.handling(self.on_failure.owner), self.batch.frames.answering():
            given = self._frame(index.order[index.arrived(rows)])
            try:
                refuse_answer(self.handler(given, tx))  # type: ignore[func-returns-value]
            except BaseException as left:
                refuse_unknown_name(left, tx)
                if _is_of_the_handler_alone(left):
                    raise HandlerExited from left
                raise
            finally:
                tx.close()
            tx.perform_writes()
            self._check_order(rows, tx)
        self.outcome.rejected |= tx.rejected
        self.outcome.skipped.update(tx.skipped.tolist())
        self.order.block_behind(np.array(sorted(tx.rejected), dtype=np.int64))  # only here: the end of the attempt may undo the run

    def _frame(self, rows: Ints) -> Any:
        """What the handler is given."""
        try:
            return self.batch.frame(rows)
        except Exception as error:
            self._frameless = error
            raise

    def _blame(self) -> None:
        company.blame(self.marker)

    def _check_order(self, rows: Ints, tx: Tx) -> None:
        """What stands behind a rejected event of its sequence must not have been decided with it."""
        if not self.order.kept or not tx.rejected:
            return
        then = self.order.copy()
        then.block_behind(np.array(sorted(tx.rejected), dtype=np.int64))
        behind = set(rows[then.waits(rows)].tolist())
        if behind:
            raise _OutOfOrder({row: reason for row, reason in tx.rejected.items() if row not in behind})

    def _keep_rejected(self, rows: Ints, rejected: dict[int, str]) -> Ints:
        """The rejections stand, as the handler gave them; the rows that are left are tried again without them."""
        gone = np.array(sorted(rejected), dtype=np.int64)
        self.outcome.rejected |= rejected
        self._standing = np.union1d(self._standing, gone)
        self.order.block_behind(gone)
        self._brownout.passed()  # the handler has answered, and these are not given to it again
        return self._pending(rows)

    def _park_found(self, rows: Ints, found: EventsFailed, failures: list[Failure]) -> Ints:
        """The events that failed are parked, the rows that are left are tried again without them."""
        for error in found.errors:
            if self._class_of(error) != PERMANENT:  # it may pass, or is everybody's fault: not decided event by event
                failures.append(describe(error, _now()))
                raise error
        gone = self.settled.index.locate(found.positions)
        for row, error in zip(gone.tolist(), found.errors, strict=True):
            self._park(row, [describe(error, _now())])
        self._standing = np.union1d(self._standing, gone)
        return self._pending(rows)

    def _refuse_misfits(self, rows: Ints, misfits: Sequence[str]) -> None:
        """A column that fits no row of all that a new consumer was ever given is wrong itself, and no event. Raises SinkMismatch."""
        if misfits and not self._spent.decided and len(rows) == len(np.setdiff1d(self._new, self._standing)):
            raise SinkMismatch(_no_row_fits(misfits))

    def _park(self, row: int, failures: list[Failure]) -> None:
        self.outcome.failed[row] = failures
        self.order.block_behind(np.array([row]))
        clock = self._clock(row)
        bisect.insort(self._failures, clock)
        limits = self.on_failure.budget and self.on_failure.budget.of(Kind.HANDLER_ERROR)
        if limits and limits.surely_exceeded(self._failures, self._chunk_clock(), self._spent.lifted, newest=clock):
            self._check_budget()

    def _park_crashed(self, row: int) -> None:
        deaths = self.marker.deaths
        message = f"the process died {deaths} times while this event was handled, the last time with nothing else in hand"
        self.outcome.failed[row] = [describe(RuntimeError(message), _now(), Kind.CRASHED)]
        self.order.block_behind(np.array([row]))

    def _clock(self, row: int) -> int:
        return self._spent.decided + 1 + int(np.searchsorted(self._new, row))

    def _chunk_clock(self) -> range:
        return range(self._spent.decided + 1, self._spent.decided + 1 + len(self._new))

    def _check_budget(self) -> None:
        """Raise BudgetExceeded; SinkMismatch where all that failed are values that a sink's column cannot hold: the table is wrong.

        TriedOnceMore comes first, at the end of the chunk at the latest: what is tried again has not failed for good, and is known by then.
        """
        self._try_once_more()
        try:
            decision.require(self._head.consumer, self.on_failure.budget, self._head.spent, self.used)
        except BudgetExceeded as exceeded:
            if (misfit := self._only_misfits()) is None:
                raise
            why = f"{misfit} More events fail in this way than the budget allows. None of this batch was parked."
            raise SinkMismatch(why) from exceeded

    def _only_misfits(self) -> str | None:
        """What is wrong with the first event that failed, where all of them have values that a sink's column cannot hold."""
        last = [failures[-1] for failures in self.outcome.failed.values() if failures]
        only = len(last) > len(self.outcome.rejected) and all(failure.error_type == _VALUES for failure in last)
        return last[0].message if only else None

    @property
    def used(self) -> dict[Kind, Used]:
        """What the chunk uses of the budget: events that failed, and events that were rejected."""
        failed = [clock - self._spent.decided for clock in self._failures if clock > self._spent.decided]
        rejected = self.outcome.rejected
        numbers = (np.flatnonzero(np.isin(self._new, list(rejected))) + 1).tolist() if rejected else ()
        example = f"{self.settled.index.describe(row)}: {rejected[row]}" if (row := min(rejected, default=-1)) >= 0 else ""
        return {
            Kind.HANDLER_ERROR: Used(len(self._new), failed, _example(self.settled, self.outcome), *self._brownout.last),
            Kind.REJECTED: Used(len(self._new), numbers, example),
        }


def _is_of_the_handler_alone(error: BaseException) -> bool:
    """Whether this is about what the handler did, unlike an interrupt: as a panic of a library in Rust, or a time-out of `func_timeout`.

    An end of the process that `dedup.testing` plays is none.
    """
    played = type(error).__module__.startswith("dedup.")
    return not (played or isinstance(error, Exception | KeyboardInterrupt | GeneratorExit))


def _no_row_fits(misfits: Sequence[str]) -> str:
    return "No row of the first batch fits: " + "; ".join(misfits)


_VALUES = f"{ValuesRefused.__module__}.{ValuesRefused.__qualname__}"


def _example(settled: Settled, outcome: HandlerOutcome) -> str:
    """The first event that was found to fail, and how."""
    row, failures = next(iter(outcome.failed.items()), (-1, []))
    return f"{settled.index.describe(row)}: {failures[-1].error_type}: {failures[-1].message[:300]}" if failures else ""


def _out_of_time(consumer: str, where: str, last: Failure) -> str:
    lift = command("budget", "lift", consumer, "--kind", Kind.HANDLER_ERROR, "--events", 10 * IN_A_ROW)
    return (
        f"Consumer {consumer!r}: {IN_A_ROW} events in a row run out of time with all their tries, and none passes in between: an outage, "
        f"not bad events. None of this batch was parked. The last one is {where}: {last.error_type}: {last.message[:300]}. Repair the "
        f"cause; or, if these events are known to be slow, {lift}."
    )


def is_ours(error: BaseException) -> bool:
    """Whether the store or a broken rule caused this error, and not an event."""
    return isinstance(error, DedupError) and not isinstance(error, RowsRefused)


def _now() -> dt.datetime:
    return dt.datetime.now(dt.UTC)


_AGAIN = "events ran out of time, one right after another, and then one passed: they are tried once more."

IN_A_ROW = 5
"""Events that run out of time one after another, with none that passes in between, before it must be an outage."""


@dataclass
class Brownout:
    """Tell a slow event from an overloaded database, by the events that ran out of time since one passed.

    If all tries of an event end in a time-out, either its own statement is too slow or its row is locked, or the database is overloaded. In
    the second case the events after it run out of time as well.

    Args:
        known: rows that failed alone when this chunk was tried before.
        before: events before this chunk that ran out of time, without one that passed since.
    """

    known: Collection[int]
    before: int = 0
    rows: list[int] = field(default_factory=list)  # that ran out of time since one passed
    any_passed: bool = False
    again: int = 0  # events that must be tried again, as an outage is over

    def add(self, row: int) -> bool:
        """Note that all tries of this event ran out of time; returns whether it must be an outage."""
        self.rows.append(row)
        return self.before + len(self.rows) >= IN_A_ROW

    def passed(self) -> bool:
        """Note that an event passed; returns whether an outage is over, so that the events that ran out of time must be tried again.

        A single event that ran out of time between others that passed is not tried again: it is slow by itself.
        """
        over = len(self.rows) > 1 and any(row not in self.known for row in self.rows)
        self.again += len(self.rows) if over else 0
        self.rows, self.before, self.any_passed = [], 0, True
        return over

    @property
    def last(self) -> tuple[int, bool]:
        """How many of this chunk ran out of time since one passed, and whether one passed: as `Used` has it."""
        return len(self.rows), self.any_passed


_FRAMES = ("DataFrame", "Table", "RecordBatch")


def refuse_answer(answer: object) -> None:
    """Raise HandlerError if a handler of batches returned something: rows that it meant to write, or a coroutine."""
    if inspect.iscoroutine(answer):
        answer.close()  # else Python warns that nobody has awaited it
    lazy = inspect.isawaitable(answer) or inspect.isgenerator(answer) or inspect.isasyncgen(answer)
    if lazy or _are_rows(answer):
        raise HandlerError(
            f"The handler of batches returned a {type(answer).__name__}, which dedup does not use. Rows go through tx.write, "
            "tx.merge or tx.publish; the handler returns nothing."
        )


def _are_rows(answer: object) -> bool:
    """Whether this is a frame or a row, or has one among its items. A lambda of several calls returns a tuple of None."""
    if type(answer).__name__ in _FRAMES or isinstance(named(answer), Mapping):
        return True
    return isinstance(answer, list | tuple) and any(map(_are_rows, answer))
