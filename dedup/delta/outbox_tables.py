"""The two tables of an outbox on Delta, and what they say together: which messages are there, and what became of each."""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable

from checkpoint.errors import ConfigError
from deadletter.letter import PROPERTIES
from dedup.delta import tables
from dedup.delta.engine import Engine
from dedup.outbox.message import Entry, Message, Messages, State
from dedup.outbox.store import BYTES_PER_TURN, Asked, Chosen, Line

OUTBOX_SINK = "dedup.outbox"
"""Name under which headers list the table of messages."""

ROWS_BITS = 24
"""A message's number is the sequence number of its decision, and so many bits for its place in it."""

MESSAGES_TABLE = pa.schema(
    [
        pa.field("seq", pa.int64(), nullable=False),
        pa.field("number", pa.int64(), nullable=False),
        pa.field("topic", pa.string(), nullable=False),
        pa.field("key", pa.binary()),
        pa.field("id", pa.string(), nullable=False),
        pa.field("body", pa.binary()),
        pa.field("size", pa.int64()),
        pa.field("headers", PROPERTIES),
        pa.field("created_at", pa.timestamp("us", tz="UTC"), nullable=False),
    ]
)

MARKS = pa.schema(
    [
        pa.field("turn", pa.int64(), nullable=False),
        pa.field("number", pa.int64(), nullable=False),  # -1: who dispatches
        pa.field("state", pa.int32(), nullable=False),
        pa.field("attempts", pa.int32(), nullable=False),
        pa.field("error_type", pa.string()),
        pa.field("error_message", pa.string()),
        pa.field("at", pa.timestamp("us", tz="UTC"), nullable=False),
        pa.field("attempt", pa.string(), nullable=False),  # the dispatcher, and its commit
    ]
)
"""What became of messages: of several rows for one number that of the last turn counts."""

SEEN = ["seq", "number", "topic", "key", "id", "size", "created_at"]
"""What is kept in memory of a message."""

DONE = (State.SENT, State.DISCARDED)


def create(engine: Engine, uri: str, schema: pa.Schema, consumer: str) -> None:
    """The table, where it is not there yet. Crash: it is there or not."""
    properties = {"delta.enableDeletionVectors": "false", "delta.dataSkippingNumIndexedCols": "2"}
    engine.create(uri, schema, f"dedup outbox of {consumer}", properties)


def numbered(messages: Messages, seq: int, first: int, now: dt.datetime) -> pa.Table:
    """Messages as rows of MESSAGES_TABLE. Raises ConfigError for more messages in one decision than there are numbers."""
    count = messages.rows.num_rows
    if first + count >= 1 << ROWS_BITS:
        raise ConfigError(f"More than {1 << ROWS_BITS} messages in one decision. Make it smaller: max_events_per_transaction=.")
    columns = {
        "seq": pa.repeat(pa.scalar(seq, pa.int64()), count),
        "number": pa.array((seq << ROWS_BITS) + first + np.arange(count)),
        "topic": pa.repeat(pa.scalar(messages.topic, pa.string()), count),
        **{name: messages.rows[name] for name in ("key", "id", "body", "headers")},
        "size": pc.binary_length(messages.rows["body"]).cast(pa.int64()),
        "created_at": pa.repeat(pa.scalar(now, pa.timestamp("us", tz="UTC")), count),
    }
    return pa.table([columns[f.name] for f in MESSAGES_TABLE], schema=MESSAGES_TABLE)


def last_decision(engine: Engine, messages_uri: str, marks_uri: str) -> int:
    """The highest number of a decision that a message, or what is kept of one, has; 0 for none. Raises StoreUnavailable."""
    messages, marks = (engine.handle(uri).look() for uri in (messages_uri, marks_uri))
    seqs = pc.max(_read(messages, ["seq"])["seq"]).as_py() if messages is not None else None
    numbers = pc.max(_read(marks, ["number"])["number"]).as_py() if marks is not None else None
    return max(seqs or 0, (numbers or 0) >> ROWS_BITS)


UNKNOWN = -1
"""No version of any table."""


class Found:
    """What both tables hold, as of one version of each."""

    def __init__(self, table: DeltaTable, marks: DeltaTable) -> None:
        self.table, self.marks = table, marks
        self._versions = table.version(), marks.version()
        self._seen = _read(table, SEEN)
        rows = _read(marks, MARKS.names)
        self._marks = rows.take(pc.sort_indices(rows, [("turn", "ascending")]))
        self._summarise()

    def _summarise(self) -> None:
        claims = self._marks.filter(pc.less(self._marks["number"], 0))
        self.turn = pc.max(self._marks["turn"]).as_py() or 0
        self.dispatcher = claims["attempt"][-1].as_py().partition("/")[0] if claims.num_rows else None
        latest = {name: (name, "last") for name in ("state", "attempts", "error_type", "error_message", "at")}
        grouped = self._marks.group_by("number", use_threads=False).aggregate(list(latest.values()))
        self._latest = grouped.rename_columns(["number", *latest] if grouped.column_names[0] == "number" else [*latest, "number"])
        self._all = _joined(self._seen, self._latest)

    def follow(self, table: DeltaTable, marks: DeltaTable) -> bool:
        """Take in what is new; False where that cannot be told, and all has to be read again."""
        if marks.version() != self._versions[1] or table.version() < self._versions[0]:
            return False
        if table.version() == self._versions[0]:
            return True
        if any(entry.get("operation") in ("DELETE", "RESTORE") for entry in tables.history_of(table, table.version() - self._versions[0])):
            return False
        last = pc.max(self._seen["seq"]).as_py()
        more = _read(table, SEEN, None if last is None else pc.field("seq") > last)
        self._seen = pa.concat_tables([self._seen, more])
        self._all = pa.concat_tables([self._all, _joined(more, self._latest)])
        self.table, self._versions = table, (table.version(), self._versions[1])
        return True

    def took(self, rows: pa.Table) -> None:
        """What was committed by ourselves, on top of what was found."""
        self.marks.update_incremental()
        # Where somebody else has committed since, all has to be read again.
        alone = self.marks.version() == self._versions[1] + 1
        self._versions = self._versions[0], self.marks.version() if alone else UNKNOWN
        self._marks = pa.concat_tables([self._marks, rows])
        self._summarise()

    def open(self, numbers: Sequence[int]) -> set[int]:
        """Those of these messages that are still to be sent."""
        return {e.number for e in self.entries(Chosen((State.WAITING, State.BEHIND), numbers=tuple(numbers), limit=None))}

    def landed(self, attempt: str) -> bool:
        """Whether this commit is in the table."""
        return bool(pc.any(pc.equal(self._marks["attempt"], attempt)).as_py())

    def waiting(self, asked: Asked) -> pa.Table:
        """The messages that can be sent now, ascending, at most `asked.limit` and about BYTES_PER_TURN."""
        rows = self._all.filter(pc.equal(self._all["state"], int(State.WAITING)))
        if asked.topics:
            rows = rows.filter(pc.is_in(rows["topic"], pa.array(asked.topics)))
        if asked.resting_topics:
            rows = rows.filter(pc.invert(pc.is_in(rows["topic"], pa.array(sorted(asked.resting_topics)))))
        stopped = set(asked.resting) | (self._dead() if asked.blocking else set())
        if stopped or asked.resting_numbers:
            lines, numbers = rows.select(["topic", "key"]).to_pylist(), rows["number"].to_pylist()
            kept = [(x["topic"], x["key"]) not in stopped and n not in asked.resting_numbers for x, n in zip(lines, numbers, strict=True)]
            rows = rows.filter(pa.array(kept, pa.bool_()))
        rows = rows.take(pc.sort_indices(rows, [("number", "ascending")])[: asked.limit])
        before = np.cumsum(sizes := pc.fill_null(rows["size"], 0).to_numpy()) - sizes
        return rows.slice(0, int(np.count_nonzero(before < BYTES_PER_TURN)))

    def _dead(self) -> set[Line]:
        dead = self._all.filter(pc.equal(self._all["state"], int(State.DEAD)))
        return {(x["topic"], x["key"]) for x in dead.select(["topic", "key"]).to_pylist() if x["key"] is not None}

    def messages(self, chosen: pa.Table) -> list[Message]:
        """These messages with their bodies."""
        if not chosen.num_rows:
            return []
        first, last = pc.min(chosen["seq"]).as_py(), pc.max(chosen["seq"]).as_py()
        span = (pc.field("seq") >= first) & (pc.field("seq") <= last)
        rows = _read(self.table, ["number", "body", "headers"], span)
        at = pc.index_in(chosen["number"], value_set=rows["number"].combine_chunks())
        whole = chosen.select(["number", "topic", "key", "id"])
        bodies = rows.take(at)
        columns = [*whole.columns, bodies["body"], bodies["headers"], chosen["attempts"]]
        return [Message(n, t, k, i, b, _pairs(h), a) for n, t, k, i, b, h, a in zip(*(c.to_pylist() for c in columns), strict=True)]

    def numbered(self, number: int) -> pa.Table:
        """The message of this number, if it is there."""
        return self._all.filter(pc.equal(self._all["number"], number))

    def entries(self, chosen: Chosen) -> list[Entry]:
        """Messages without their bodies, ascending."""
        rows = self._all
        if chosen.topic is not None:
            rows = rows.filter(pc.equal(rows["topic"], chosen.topic))
        if chosen.numbers:
            rows = rows.filter(pc.is_in(rows["number"], pa.array(chosen.numbers, pa.int64())))
        rows, dead, found = rows.take(pc.sort_indices(rows, [("number", "ascending")])), self._dead(), list[Entry]()
        for row in rows.to_pylist():
            entry = _entry(row, dead)
            if not chosen.states or entry.state in chosen.states:
                found.append(entry)
            if chosen.limit is not None and len(found) >= chosen.limit:
                break
        return found

    def finished_before(self, before: dt.datetime) -> int | None:
        """The last decision up to which all messages were done before that time."""
        done = pc.and_(pc.is_in(self._all["state"], pa.array([int(s) for s in DONE], pa.int32())), pc.less(self._all["at"], before))
        left = self._all.filter(pc.invert(pc.fill_null(done, False)))
        gone = self._all.filter(pc.fill_null(done, False))
        if left.num_rows:
            gone = gone.filter(pc.less(gone["seq"], pc.min(left["seq"])))
        found: int | None = pc.max(gone["seq"]).as_py()
        return found

    def count_up_to(self, last: int) -> int:
        """How many messages the decisions up to this one have."""
        return int(pc.sum(pc.less_equal(self._all["seq"], last)).as_py() or 0)


def _read(table: DeltaTable, columns: list[str], where: pc.Expression | None = None) -> pa.Table:
    with tables.reading(table.table_uri):
        return table.to_pyarrow_dataset().to_table(columns=columns, filter=where)


def _joined(messages: pa.Table, latest: pa.Table) -> pa.Table:
    """Messages with what became of them; those without a mark wait."""
    at = pc.index_in(messages["number"], value_set=latest["number"].combine_chunks())
    marks = latest.take(at)
    for name in ("error_type", "error_message", "at"):
        messages = messages.append_column(name, marks[name])
    for name in ("state", "attempts"):
        messages = messages.append_column(name, pc.fill_null(marks[name], 0))
    return messages


def _entry(row: dict[str, Any], dead: set[Line]) -> Entry:
    state = State(row["state"])
    if state == State.WAITING and (row["topic"], row["key"]) in dead:
        state = State.BEHIND
    names = ("number", "topic", "key", "id", "attempts", "size", "created_at", "error_type", "error_message")
    return Entry(**{name: row[name] for name in names}, state=state, changed_at=row["at"])


def _pairs(headers: list[dict[str, Any]] | None) -> tuple[tuple[str, bytes | None], ...]:
    return tuple((h["key"], h["value"]) for h in headers or ())
