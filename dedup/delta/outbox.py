"""The outbox on Delta: messages are a table of their own, filled from the ledger's decisions; what became of them is another one.

The table of messages is a sink like any other: its files are written before the decision that names them, and published after it. The
table of marks has one dispatcher at a time: each commit is tried against exactly the snapshot that was read, and whoever began last wins.
"""

from __future__ import annotations

import datetime as dt
import logging
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import pyarrow as pa

from checkpoint.errors import CommitConflict, Fenced, PublicationStuck, StoreRestored, StoreUnavailable
from dedup.delta import tables
from dedup.delta.outbox_tables import MARKS, MESSAGES_TABLE, OUTBOX_SINK, Found, create, numbered
from dedup.delta.states import States
from dedup.outbox.message import Entry, Lag, Message, Messages, State
from dedup.outbox.store import Asked, Chosen, Failed, Marks

log = logging.getLogger("dedup")

CONFLICT_ATTEMPTS = 20

Plan = Callable[[Found], list[dict[str, Any]]]
"""What is there -> rows of MARKS to add."""

CLAIM = -1
"""The number of a row of marks that says who dispatches."""


class MessageWrites:
    """The messages of one decision, on their way into files that no commit names yet."""

    def __init__(self, state: Any, writes: Any) -> None:
        self._state, self._writes = state, writes

    def add(self, messages: Messages) -> None:
        """List messages with the decision, behind those before.

        Crash: files that no commit names are invisible; VACUUM takes them.
        """
        uri = self._state.outbox_uris()[0]
        create(self._state.sinks.engine, uri, MESSAGES_TABLE, self._state.ledger.consumer)
        sink = self._state.sinks.open(OUTBOX_SINK, uri)
        self._writes.require_same(sink)
        before = self._writes.count(OUTBOX_SINK)
        self._writes.own(sink, numbered(messages, self._state.header.head.seq + 1, before, dt.datetime.now(dt.UTC)))


class DeltaTurn:
    """Messages in hand. There is no lock: who marks first is right, and the other one stops."""

    def __init__(self, outbox: DeltaOutbox, messages: Sequence[Message]) -> None:
        self.messages = messages
        self._outbox = outbox

    def mark(self, marks: Marks) -> None:
        """Note what became of them. What somebody has decided about meanwhile is left alone, unless it was sent.

        Raises:
            Fenced: another dispatcher has taken over; these messages are sent again by it, with the same ids.

        Crash: all of it is noted, or nothing.
        """
        attempts = {m.number: m.attempts for m in self.messages}
        failed = [(state, f) for state, some in ((State.DEAD, marks.dead), (State.WAITING, marks.tried)) for f in some]

        def plan(found: Found) -> list[dict[str, Any]]:
            still = found.open([f.number for _, f in failed]) if failed else set()
            sent = [_row(number, State.SENT) for number in marks.sent]
            return sent + [_row(f.number, state, attempts[f.number] + 1, f) for state, f in failed if f.number in still]

        self._outbox.note(plan, dispatching=True)


class DeltaOutbox:
    """The messages of one consumer. One dispatcher at a time: the one that began last."""

    parallel: ClassVar[bool] = False

    def __init__(self, consumer: str, states: States, publish: Any) -> None:
        self.consumer, self._states, self._publish = consumer, states, publish
        self._me = uuid.uuid4().hex
        self._claimed = False
        self._found: Found | None = None

    @contextmanager
    def turn(self, asked: Asked) -> Iterator[DeltaTurn]:
        """The first waiting messages of each key, ascending.

        Raises:
            Fenced: another dispatcher has taken over.

        Crash: what was not marked is taken again.
        """
        self._publish(self.consumer)
        found = self._look()
        if found is None:
            yield DeltaTurn(self, ())
            return
        if not self._claimed:
            self.note(lambda _: [_row(CLAIM, State.WAITING)], dispatching=False)
            self._claimed = True
            found = self._look()
            assert found is not None
        self._require_mine(found)
        chosen = found.waiting(asked)
        yield DeltaTurn(self, found.messages(chosen) if chosen.num_rows else ())

    def _require_mine(self, found: Found) -> None:
        if found.dispatcher != self._me:
            raise Fenced(f"Another dispatcher of {self.consumer!r} has begun: on Delta there is one at a time. Stop this one.")

    def _look(self, *, anew: bool = False) -> Found | None:
        """What is there now; None where nothing was ever published."""
        with self._states.caught_up(self.consumer) as state:
            uris = state.outbox_uris()
        engine = self._states.engine
        messages = engine.handle(uris[0]).look()
        if messages is None:
            return None
        create(engine, uris[1], MARKS, self.consumer)
        marks = engine.handle(uris[1]).look()
        if marks is None:
            raise StoreUnavailable(f"The table {uris[1]} is not there although it was made just now.")
        if anew or self._found is None or not self._found.follow(messages, marks):
            self._found = Found(messages, marks)
        return self._found

    def note(self, plan: Plan, *, dispatching: bool) -> int:
        """Commit rows of MARKS against the very snapshot they were planned on; planned again where somebody else came first.

        Returns how many it were.

        Raises:
            Fenced: `dispatching`, and another dispatcher has taken over. CommitConflict: others commit all the time.

        Crash: all of it is noted, or nothing.
        """
        attempt = f"{self._me}/{uuid.uuid4().hex}"
        for _ in range(CONFLICT_ATTEMPTS):
            found = self._look()
            assert found is not None
            if dispatching:
                self._require_mine(found)
            if not (rows := plan(found)) or self._commit(found, rows, attempt):
                return len(rows)
        raise CommitConflict(f"The outbox of {self.consumer!r} is changed all the time; nothing was noted. Try again.")

    def _commit(self, found: Found, rows: list[dict[str, Any]], attempt: str) -> bool:
        turn, now = found.turn + 1, dt.datetime.now(dt.UTC)
        mine = {"turn": turn, "at": now, "attempt": attempt}
        table = pa.Table.from_pylist([{**row, **mine} for row in rows], schema=MARKS)
        try:
            self._states.engine.append(found.marks, table, {"dedup-outbox": turn})
        except tables.FAILED:
            return self._landed(attempt)
        if self._states.engine.skips:
            return self._landed(attempt)
        found.took(table)
        return True

    def _landed(self, attempt: str) -> bool:
        again = self._look(anew=True)
        return again is not None and again.landed(attempt)

    def entries(self, chosen: Chosen) -> list[Entry]:
        """Messages without their bodies, ascending."""
        found = self._readable()
        return found.entries(chosen) if found is not None else []

    def message(self, number: int) -> Message | None:
        """One message with its body."""
        found = self._readable()
        return next(iter(found.messages(found.numbered(number))), None) if found is not None else None

    def lag(self, topics: Sequence[str] = ()) -> Lag:
        """What is not sent yet."""
        states = (State.WAITING, State.DEAD, State.BEHIND)
        found = [e for e in self.entries(Chosen(states=states, limit=None)) if not topics or e.topic in topics]
        count = {s: sum(e.state == s for e in found) for s in states}
        return Lag(count[State.WAITING], min((e.created_at for e in found), default=None), count[State.DEAD], count[State.BEHIND])

    def _readable(self) -> Found | None:
        """As `_now`; where a sink is stuck or the state was restored, what is there: whoever looks for the cause has to see it."""
        try:
            return self._now()
        except (PublicationStuck, StoreRestored) as error:
            log.warning("messages of %s that are decided may be missing: %s", self.consumer, error)
            return self._look()

    def _now(self) -> Found | None:
        self._publish(self.consumer)
        return self._look()

    def retry(self, numbers: Sequence[int]) -> int:
        """Let dead messages be sent again.

        Crash: all of it, or nothing.
        """
        return self._decide(numbers, (State.DEAD,), State.WAITING)

    def discard(self, numbers: Sequence[int]) -> int:
        """Give up messages that are not sent. One that a dispatcher has in hand may be sent all the same.

        Crash: all of it, or nothing.
        """
        return self._decide(numbers, (State.WAITING, State.BEHIND, State.DEAD), State.DISCARDED)

    def _decide(self, numbers: Sequence[int], of: tuple[State, ...], to: State) -> int:
        if not numbers or self._now() is None:
            return 0
        chosen = Chosen(of, numbers=tuple(numbers), limit=None)
        return self.note(
            lambda found: [_row(e.number, to, e.attempts if to == State.DISCARDED else 0) for e in found.entries(chosen)], dispatching=False
        )

    def purge(self, before: dt.datetime, *, dry_run: bool = False) -> int:
        """Delete what was sent or discarded before that time, up to the first decision with a message that was not; returns how many.

        Crash: messages go first; marks without a message are harmless, and the next purge takes them.
        """
        found = self._now()
        last = found.finished_before(before) if found is not None else None
        if found is None or last is None:
            return 0
        count = found.count_up_to(last)
        if not dry_run:
            self._delete(found, last)
        return count

    def _delete(self, found: Found, last: int) -> None:
        try:
            self._states.engine.delete(found.table, f"seq <= {last}")
            self._states.engine.delete(found.marks, f"number >= 0 and number < {(last + 1) << 24}")
        except tables.FAILED as error:
            raise CommitConflict(f"The outbox of {self.consumer!r} was changed while it was purged: {error}. Run it again.") from error
        finally:
            self._found = None


def _row(number: int, state: State, attempts: int = 0, failed: Failed | None = None) -> dict[str, Any]:
    error = {"error_type": failed.error_type, "error_message": failed.error_message} if failed else {}
    return {"number": number, "state": int(state), "attempts": attempts, **error}
