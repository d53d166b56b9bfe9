"""The outbox on Delta: one table of messages, filled by the ledger's decisions, and one table of marks, which say what became of them.

The table of messages is a sink like any other: its files are written before the decision that names them, and published after it. One
dispatcher at a time writes the table of marks: each commit is tried against exactly the snapshot that was read, and the dispatcher that
began last wins. Called by the transaction, and through the store by the dispatcher and `dedup outbox`.
"""

from __future__ import annotations

import datetime as dt
import logging
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable

from checkpoint.errors import CommitConflict, ConfigError, Fenced, PublicationStuck, StoreError, StoreRestored, StoreUnavailable
from deadletter.letter import ERASED
from dedup.core.messages import Asked, Chosen, Entry, Failed, Marks, Message, Messages, OutboxLag, State, erased_reason
from dedup.delta import tables
from dedup.delta.consumers import States
from dedup.delta.engine import Engine
from dedup.delta.erasure import Blank, blanked, changed
from dedup.delta.ledger import OUTBOX_SINK
from dedup.delta.messages import BLANK, DONE, MARKS, MESSAGES_TABLE, ROWS_BITS, OutboxSnapshot, read_columns
from dedup.delta.verify import Waiting, looked_again

log = logging.getLogger("dedup")

CONFLICT_ATTEMPTS = 20

APP = "dedup-outbox"
"""Transaction id of MARKS; its version is the turn."""

CLAIM = -1
"""The number of a row of marks that says who dispatches."""

Plan = Callable[[OutboxSnapshot], list[dict[str, Any]]]
"""What is there -> rows of MARKS to add."""


class MessageWrites:
    """The messages of one decision, on their way into files that no commit names yet."""

    def __init__(self, state: Any, writes: Any) -> None:
        self._state, self._writes = state, writes

    def add(self, messages: Messages) -> None:
        """List messages with the decision, behind those before.

        Crash: files that no commit names are invisible; VACUUM takes them.
        """
        self._state.require_read()  # the outbox is named by the ledger's id
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

        def plan(found: OutboxSnapshot) -> list[dict[str, Any]]:
            still = found.open([f.number for _, f in failed]) if failed else set()
            sent = [_row(number, State.SENT, attempts[number]) for number in marks.sent]
            return sent + [_row(f.number, state, attempts[f.number] + 1, f) for state, f in failed if f.number in still]

        self._outbox.note(plan, dispatching=True)


class DeltaOutbox:
    """The messages of one consumer. One dispatcher at a time: the one that began last."""

    parallel: ClassVar[bool] = False

    def __init__(
        self,
        consumer: str,
        states: States,
        publish: Callable[[str], int],
        waiting: Callable[[str], Sequence[Waiting]],
        on_step: Callable[[str], None],
    ) -> None:
        self.consumer, self._states, self._publish, self._waiting, self._on_step = consumer, states, publish, waiting, on_step
        self._me = uuid.uuid4().hex
        self._claimed = False
        self._found: OutboxSnapshot | None = None
        self._handles: dict[str, Any] = {}
        self._uris = ("", "")

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

    def _require_mine(self, found: OutboxSnapshot) -> None:
        if found.dispatcher != self._me:
            raise Fenced(f"Another dispatcher of {self.consumer!r} has started. On Delta only one may run at a time: stop this one.")

    def _look(self, *, anew: bool = False) -> OutboxSnapshot | None:
        """What is there now; None where nothing was ever published."""
        with self._states.caught_up(self.consumer) as state:
            self._uris = uris = state.outbox_uris()
        if (messages := self._table(uris[0])) is None:
            return None
        if (marks := self._table(uris[1])) is None:
            create(self._states.engine, uris[1], MARKS, self.consumer)
            marks = self._table(uris[1])
        if marks is None:
            raise StoreUnavailable(f"The table {uris[1]} was created, but cannot be found.")
        if anew or self._found is None or not self._found.follow(messages, marks):
            self._found = OutboxSnapshot(messages, marks)
        return self._found

    def _table(self, uri: str) -> DeltaTable | None:
        if uri not in self._handles:
            self._handles[uri] = self._states.engine.handle(uri)
        found: DeltaTable | None = self._handles[uri].look()
        return found

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
        raise CommitConflict(f"The outbox of {self.consumer!r} changes too often; nothing was recorded. Try again.")

    def _commit(self, found: OutboxSnapshot, rows: list[dict[str, Any]], attempt: str) -> bool:
        turn = found.turn + 1
        table = _of_turn(rows, turn, attempt)
        try:
            self._states.engine.append(found.marks, table, {APP: turn})
        except tables.FAILED:
            return self._landed(attempt)
        if self._states.engine.skips:
            return self._landed(attempt)
        if (marks := self._table(self._uris[1])) is None:
            self._found = None
        else:
            found.took(table, marks)
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

    def lag(self, topics: Sequence[str] = ()) -> OutboxLag:
        """What is not sent yet."""
        states = (State.WAITING, State.DEAD, State.BEHIND)
        found = [e for e in self.entries(Chosen(states=states, limit=None)) if not topics or e.topic in topics]
        count = {s: sum(e.state == s for e in found) for s in states}
        return OutboxLag(count[State.WAITING], min((e.created_at for e in found), default=None), count[State.DEAD], count[State.BEHIND])

    def count(self) -> int:
        """How many messages are stored, in whatever state."""
        found = self._readable()
        return found.count if found is not None else 0

    def topics(self) -> list[str]:
        """The topics of all messages that are stored."""
        found = self._readable()
        return found.topics() if found is not None else []

    def _readable(self) -> OutboxSnapshot | None:
        """What is there, with the messages that are decided and do not show yet. It publishes nothing.

        Where files are gone or the state was restored, what is there: whoever looks for the cause has to see it.
        """
        try:
            return looked_again(self._whole)
        except (PublicationStuck, StoreRestored) as error:
            log.warning("what %s has decided does not show everywhere, and messages of it may be missing: %s", self.consumer, error)
            return self._look()

    def _whole(self) -> OutboxSnapshot | None:
        waiting = self._waiting(self.consumer)  # before the look at the table, which shows what is published in between
        if (found := self._look()) is None:
            return None
        return found.beside([one.rows() for one in waiting if not one.publication.shown_by(found.table)])

    def _now(self) -> OutboxSnapshot | None:
        self._publish(self.consumer)
        return self._look()

    def retry(self, numbers: Sequence[int], *, by: str | None = None, reason: str | None = None) -> int:
        """Let dead messages be sent again. Who decides that and why is kept with them.

        Crash: all of it, or nothing.
        """
        return self._change_state(numbers, (State.DEAD,), State.WAITING, by, reason)

    def discard(self, numbers: Sequence[int], *, by: str | None = None, reason: str | None = None) -> int:
        """Give up messages that are not sent. Who decides that and why is kept with them.

        One that a dispatcher has in hand may be sent all the same.

        Crash: all of it, or nothing.
        """
        return self._change_state(numbers, (State.WAITING, State.BEHIND, State.DEAD), State.DISCARDED, by, reason)

    def _change_state(self, numbers: Sequence[int], of: tuple[State, ...], to: State, by: str | None, reason: str | None) -> int:
        if not numbers or self._now() is None:
            return 0
        chosen = Chosen(of, numbers=tuple(numbers), limit=None)
        person = {"set_by": by or "", "set_reason": reason or ""}  # a decision without a name is no mark of a dispatcher, which has null

        def plan(found: OutboxSnapshot) -> list[dict[str, Any]]:
            return [{**_row(e.number, to, e.attempts if to == State.DISCARDED else 0), **person} for e in found.entries(chosen)]

        return self.note(plan, dispatching=False)

    def about(self, ids: Sequence[str], keys: Sequence[bytes]) -> list[int]:
        """Numbers of the messages with one of these ids, and of those whose ids were made of one of these incoming keys; ascending."""
        found = self._now()
        return found.about(ids, keys) if found is not None else []

    def erase(self, numbers: Sequence[int], *, by: str, reason: str) -> int:
        """Erase bodies, keys and headers of messages that were sent or discarded, and what is told of their failures; returns how many.

        Who did it and why is kept with them. Messages that were not sent, or erased before, stay as they are. Older files hold what was
        erased until they are deleted: `DeltaStore.scrub` says until when.

        Crash: what is told of failures goes first, then it is noted who erases them, then the messages are erased; a second call goes on.
        """
        found = self._now() if numbers else None
        if found is None:
            return 0
        done = [e for e in found.entries(Chosen(DONE, numbers=tuple(numbers), limit=None)) if not found.is_blank(e.number)]
        if done:
            self._erase(found, done, {"set_by": by, "set_reason": erased_reason(reason)})
        return len(done)

    def _erase(self, found: OutboxSnapshot, done: Sequence[Entry], person: Mapping[str, str]) -> None:
        engine, numbers = self._states.engine, [e.number for e in done]
        try:
            self._on_step("failures")
            blanked(engine, found.marks.table_uri, _failures_of(numbers))
            self._on_step("noted")
            self.note(lambda _: [{**_row(e.number, e.state, e.attempts), **person} for e in done], dispatching=False)
            self._on_step("contents")
            blanked(engine, found.table.table_uri, _contents_of(numbers))
        finally:
            self._found = None

    def purge(self, before: dt.datetime, *, dry_run: bool = False) -> int:
        """Delete what was sent or discarded before that time, up to the first decision with a message that was not; returns how many.

        It publishes nothing: what was sent is published. The first message tells whether there is anything to look at.

        Raises:
            CommitConflict: others commit all the time. StoreError: whatever else a table refuses.
            StoreRestored: the ledger contradicts itself, or a table that it publishes to.

        Crash: messages go first; marks without a message are harmless, and the next purge takes them.
        """
        found = self._look() if self._has_older(before) else None
        last = found.finished_before(before) if found is not None else None
        if found is None or last is None:
            return 0
        count = found.count_up_to(last)
        if not dry_run:
            self._delete(found, last)
        return count

    def _has_older(self, before: dt.datetime) -> bool:
        """Whether the first message may have been stored before that time: no later one goes before it, and marks come after it."""
        with self._states.caught_up(self.consumer) as state:
            state.require_sound()
            messages = self._table(state.outbox_uris()[0])
        if messages is None or not self._states.engine.tells_files:
            return messages is not None
        first = first_seq(messages)
        stored = read_columns(messages, ["created_at"], pc.field("seq") == first if first is not None else None)["created_at"]
        return bool(pc.any(pc.less(stored, before)).as_py())

    def _delete(self, found: OutboxSnapshot, last: int) -> None:
        # Of the marks the newest one stays: Spark skips a turn that it has seen, so turns must not begin anew.
        marks = f"number >= 0 and number < {(last + 1) << ROWS_BITS} and turn < {found.turn}"
        engine, left = self._states.engine, "not all of what was to be purged has left it"
        try:
            for table, gone in ((found.table, f"seq <= {last}"), (found.marks, marks)):
                changed(engine, table.table_uri, partial(engine.delete, where=gone), left)
        except tables.FAILED as error:
            raise StoreError(f"The outbox of {self.consumer!r} was not purged whole: {error}. Run it again.") from error
        finally:
            self._found = None


def _row(number: int, state: State, attempts: int = 0, failed: Failed | None = None) -> dict[str, Any]:
    error = {"error_type": failed.error_type, "error_message": failed.error_message} if failed else {}
    return {"number": number, "state": int(state), "attempts": attempts, **error}


def _of_turn(rows: Sequence[Mapping[str, Any]], turn: int, attempt: str) -> pa.Table:
    """Rows of MARKS, all of one turn."""
    mine = {"turn": turn, "at": dt.datetime.now(dt.UTC), "attempt": attempt}
    return pa.Table.from_pylist([{**row, **mine} for row in rows], schema=MARKS)


def create(engine: Engine, uri: str, schema: pa.Schema, consumer: str) -> None:
    """The table, where it is not there yet. Crash: it is there or not."""
    properties = {"delta.enableDeletionVectors": "false", "delta.dataSkippingNumIndexedCols": "2"}
    engine.create(uri, schema, f"dedup outbox of {consumer}", properties)


def numbered(messages: Messages, seq: int, first: int, now: dt.datetime) -> pa.Table:
    """Messages as rows of MESSAGES_TABLE. Raises ConfigError for more messages in one decision than there are numbers."""
    count = messages.rows.num_rows
    if first + count >= 1 << ROWS_BITS:
        raise ConfigError(f"More than {1 << ROWS_BITS} messages in one decision. Make it smaller: Limits(max_events_per_transaction=...).")
    columns = {
        "seq": pa.repeat(pa.scalar(seq, pa.int64()), count),
        "number": pa.array((seq << ROWS_BITS) + first + np.arange(count)),
        "topic": pa.repeat(pa.scalar(messages.topic, pa.string()), count),
        **{name: messages.rows[name] for name in ("key", "id", "body", "headers")},
        "size": pc.binary_length(messages.rows["body"]).cast(pa.int64()),
        "created_at": pa.repeat(pa.scalar(now, pa.timestamp("us", tz="UTC")), count),
    }
    return pa.table([columns[f.name] for f in MESSAGES_TABLE], schema=MESSAGES_TABLE)


def first_seq(messages: DeltaTable) -> int | None:
    """The lowest number of a decision with messages, as the statistics of files say; None where they do not. Raises StoreUnavailable."""
    with tables.reading(messages.table_uri):
        files = pa.table(messages.get_add_actions(flatten=True))
    bounds = files["min.seq"] if "min.seq" in files.column_names else pa.chunked_array([pa.nulls(1)])
    return None if bounds.null_count else pc.min(bounds).as_py()


def take_turn(engine: Engine, marks: DeltaTable) -> None:
    """Claim the outbox for nobody, before marks are deleted. Raises what `tables.FAILED` names.

    Whoever dispatches is fenced, and turns go on: with engine="spark" one that was there before would be skipped.

    Crash: the claim is there or not.
    """
    last = pc.max(read_columns(marks, ["turn"])["turn"]).as_py()
    if last is not None:
        claim = _of_turn([_row(CLAIM, State.WAITING)], last + 1, f"nobody/{uuid.uuid4().hex}")
        engine.append(marks, claim, {APP: last + 1})


def _contents_of(numbers: Sequence[int]) -> Blank:
    named = f"number IN ({', '.join(map(str, numbers))})"
    size = pc.field("size")
    needed = pc.field("number").isin(pa.array(numbers, pa.int64())) & (size.is_null() | (size != BLANK))
    values = {**dict.fromkeys(("key", "body", "headers")), "size": BLANK}
    return Blank(needed, f"{named} AND (size IS NULL OR size <> {BLANK})", values, 2)


def _failures_of(numbers: Sequence[int]) -> Blank:
    """What marks tell of these messages beside their state, but for who erased them."""
    named = f"number IN ({', '.join(map(str, numbers))})"
    reason = pc.field("set_reason")
    told = pc.field("error_message").is_valid() | (reason.is_valid() & ~pc.starts_with(reason, ERASED))
    needed = pc.field("number").isin(pa.array(numbers, pa.int64())) & told
    where = f"{named} AND (error_message IS NOT NULL OR set_reason NOT LIKE '{ERASED}%')"
    return Blank(needed, where, dict.fromkeys(("error_message", "set_reason")), 2)
