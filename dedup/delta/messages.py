"""What the two tables of an outbox on Delta hold: messages, and the marks that say what became of them.

Promises that a snapshot which follows the tables commit by commit is the one that reading them anew would give, and that what a turn of a
dispatcher costs depends on the messages that are not done. Called by outbox.py.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator, Sequence
from copy import copy
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
from deltalake import DeltaTable

from deadletter.letter import PROPERTIES
from dedup.core.messages import BYTES_PER_TURN, Asked, Chosen, Entry, Line, Message, State
from dedup.delta import tables
from dedup.delta.engine import BLANKED, Engine

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
        pa.field("set_by", pa.string()),
        pa.field("set_reason", pa.string()),
        pa.field("at", pa.timestamp("us", tz="UTC"), nullable=False),
        pa.field("attempt", pa.string(), nullable=False),  # the dispatcher, and its commit
    ]
)
"""What became of messages: of several rows for one number that of the last turn counts."""

TOLD = ("error_type", "error_message", "set_by", "set_reason", "at")
"""What a mark says beside the state and the attempts."""

SAID = ("turn", "number", "state", "attempts", *TOLD)
"""Columns of marks that are read."""

SEEN = ["seq", "number", "topic", "key", "id", "size", "created_at"]
"""What is kept in memory of a message."""

DONE = (State.SENT, State.DISCARDED)

BLANK = -1
"""The size of a message that was erased."""

_CHANGING = ("DELETE", "MERGE", "RESTORE", "UPDATE")
"""Commits after which rows that are known may be gone, or others."""


class OutboxSnapshot:
    """What both tables hold, as of one version of each.

    In memory are only the messages that are not done: a turn of a dispatcher costs the same however many are kept. All of them are read
    where somebody asks for the others.
    """

    def __init__(self, table: DeltaTable, marks: DeltaTable) -> None:
        self.table, self.marks = table, marks
        self._versions = table.version(), marks.version()
        rows = _marks(marks)
        latest, self.turn = _latest(rows), pc.max(rows["turn"]).as_py() or 0
        self.dispatcher = _dispatcher(read_columns(marks, ["turn", "attempt"], pc.field("number") < 0))
        self._last, self._open = _not_done(table, latest)
        self._ahead = self._beyond(latest)
        self._more: Sequence[ds.Dataset] = ()

    def beside(self, more: Sequence[ds.Dataset]) -> OutboxSnapshot:
        """The same with rows of MESSAGES_TABLE that the table does not show yet: to be looked at, not to be followed."""
        if not more:
            return self
        found = copy(self)
        found.__dict__.pop("_all", None)
        found._more = more
        found._open = pa.concat_tables([self._open, *(_are_open(_joined(each.to_table(columns=SEEN), self._ahead)) for each in more)])
        return found

    def _read(self, columns: list[str], where: pc.Expression | None = None) -> pa.Table:
        rows = read_columns(self.table, columns, where)
        with tables.reading(self.table.table_uri):
            more = [tables.rows_where(each, columns, where).cast(rows.schema) for each in self._more]
        return pa.concat_tables([rows, *more])

    def _beyond(self, marks: pa.Table) -> pa.Table:
        """Those of messages that came after this version of their table: somebody else may have marked them."""
        return marks.filter(pc.greater_equal(marks["number"], (self._last + 1) << ROWS_BITS))

    @cached_property
    def _all(self) -> pa.Table:
        return _joined(self._read(SEEN), _latest(_marks(self.marks)))

    def follow(self, table: DeltaTable, marks: DeltaTable) -> bool:
        """Take in what is new; False where that cannot be told, and all has to be read again."""
        if not all(_only_grew(now, known) for now, known in zip((table, marks), self._versions, strict=True)):
            return False
        if marks.version() > self._versions[1]:
            rows = read_columns(marks, [*SAID, "attempt"], pc.field("turn") > self.turn)
            if rows.num_rows:  # a compaction brings none
                self._take(rows, _latest(rows))
        if table.version() > self._versions[0]:
            more = read_columns(table, SEEN, pc.field("seq") > self._last)
            self._open = pa.concat_tables([self._open, _are_open(_joined(more, self._ahead))])
            self._last = max(self._last, pc.max(more["seq"]).as_py() or 0)
            self._ahead = self._beyond(self._ahead)
            self.__dict__.pop("_all", None)
        self.table, self.marks, self._versions = table, marks, (table.version(), marks.version())
        return True

    def took(self, rows: pa.Table, marks: DeltaTable) -> None:
        """What was committed by ourselves, on top of what was found."""
        self.marks, self._versions = marks, (self._versions[0], self._versions[1] + 1)
        self._take(rows, rows)

    def _take(self, rows: pa.Table, latest: pa.Table) -> None:
        """Rows of later turns than the known ones, and what the last of them says of each message."""
        self.turn = pc.max(rows["turn"]).as_py()
        self.dispatcher = _dispatcher(rows.filter(pc.less(rows["number"], 0))) or self.dispatcher
        self._open = _are_open(_marked(self._open, latest))
        beyond = self._beyond(latest)
        fresh = beyond.filter(pc.invert(pc.is_in(beyond["number"], value_set=self._ahead["number"].combine_chunks())))
        known = self._ahead.schema
        self._ahead = pa.concat_tables([_marked(self._ahead, beyond), fresh.select(known.names).cast(known)])
        self.__dict__.pop("_all", None)

    def open(self, numbers: Sequence[int]) -> set[int]:
        """Those of these messages that are still to be sent."""
        return {e.number for e in self.entries(Chosen((State.WAITING, State.BEHIND), numbers=tuple(numbers), limit=None))}

    def landed(self, attempt: str) -> bool:
        """Whether this commit is in the table."""
        return bool(read_columns(self.marks, ["turn"], pc.field("attempt") == attempt).num_rows)

    def waiting(self, asked: Asked) -> pa.Table:
        """The messages that can be sent now, ascending, at most `asked.limit` and about BYTES_PER_TURN."""
        rows = self._open.filter(pc.equal(self._open["state"], int(State.WAITING)))
        if asked.topics:
            rows = rows.filter(pc.is_in(rows["topic"], pa.array(asked.topics)))
        if asked.resting_topics:
            rows = rows.filter(pc.invert(pc.is_in(rows["topic"], pa.array(sorted(asked.resting_topics)))))
        resting, dead = set(asked.resting), self._dead() if asked.blocking else {}
        if resting or dead or asked.resting_numbers:
            lines = [(x["topic"], x["key"]) for x in rows.select(["topic", "key"]).to_pylist()]
            numbered = zip(lines, rows["number"].to_pylist(), strict=True)
            kept = [x not in resting and n <= dead.get(x, n) and n not in asked.resting_numbers for x, n in numbered]
            rows = rows.filter(pa.array(kept, pa.bool_()))
        rows = rows.take(pc.sort_indices(rows, [("number", "ascending")])[: asked.limit])
        before = np.cumsum(sizes := pc.fill_null(rows["size"], 0).to_numpy()) - sizes
        return rows.slice(0, int(np.count_nonzero(before < BYTES_PER_TURN)))

    def _dead(self) -> dict[Line, int]:
        """The first dead message of each key that has one."""
        dead = self._open.filter(pc.equal(self._open["state"], int(State.DEAD))).sort_by([("number", "descending")])
        return {(x["topic"], x["key"]): x["number"] for x in dead.select(["topic", "key", "number"]).to_pylist() if x["key"] is not None}

    def messages(self, chosen: pa.Table) -> list[Message]:
        """These messages with their bodies."""
        if not chosen.num_rows:
            return []
        first, last = pc.min(chosen["seq"]).as_py(), pc.max(chosen["seq"]).as_py()
        span = (pc.field("seq") >= first) & (pc.field("seq") <= last)
        span &= pc.field("number").isin(chosen["number"].combine_chunks())  # an old one waits, and all of them in between are done
        rows = self._read(["number", "body", "headers"], span)
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
        rows = self._open if chosen.states and not set(chosen.states) & set(DONE) else self._all
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

    def about(self, ids: Sequence[str], keys: Sequence[bytes]) -> list[int]:
        """Numbers of the messages with one of these ids, and of those whose ids begin with one of these keys in hex; ascending."""
        own = pc.is_in(self._all["id"], pa.array(ids, pa.string()))
        made = pc.is_in(pc.utf8_slice_codeunits(self._all["id"], 0, 32), pa.array([key.hex() for key in keys], pa.string()))
        return sorted(self._all["number"].filter(pc.or_(own, made)).to_pylist())

    def is_blank(self, number: int) -> bool:
        """Whether this message was erased."""
        return bool(pc.any(pc.equal(self.numbered(number)["size"], BLANK)).as_py())

    @property
    def count(self) -> int:
        """How many messages there are."""
        return int(self._all.num_rows)

    def topics(self) -> list[str]:
        """The topics of all messages, ascending."""
        return sorted(pc.unique(self._all["topic"]).to_pylist())

    def finished_before(self, before: dt.datetime) -> int | None:
        """The last decision up to which all messages were done before that time."""
        done = pc.and_(_is_done(self._all), pc.less(self._all["at"], before))
        left = self._all.filter(pc.invert(pc.fill_null(done, False)))
        gone = self._all.filter(pc.fill_null(done, False))
        if left.num_rows:
            gone = gone.filter(pc.less(gone["seq"], pc.min(left["seq"])))
        found: int | None = pc.max(gone["seq"]).as_py()
        return found

    def count_up_to(self, last: int) -> int:
        """How many messages the decisions up to this one have."""
        return int(pc.sum(pc.less_equal(self._all["seq"], last)).as_py() or 0)


def last_decision(engine: Engine, messages_uri: str, marks_uri: str) -> int:
    """The highest number of a decision that a message, or what is kept of one, has; 0 for none. Raises StoreUnavailable."""
    messages, marks = (engine.handle(uri).look() for uri in (messages_uri, marks_uri))
    seqs = pc.max(read_columns(messages, ["seq"])["seq"]).as_py() if messages is not None else None
    numbers = pc.max(read_columns(marks, ["number"])["number"]).as_py() if marks is not None else None
    return max(seqs or 0, (numbers or 0) >> ROWS_BITS)


def repeated_numbers(messages: DeltaTable) -> list[int]:
    """Numbers that more than one message has, ascending. Raises StoreUnavailable."""
    numbers = np.sort(read_columns(messages, ["number"])["number"].to_numpy())
    found: list[int] = np.unique(numbers[1:][numbers[1:] == numbers[:-1]]).tolist()
    return found


def read_columns(table: DeltaTable, columns: list[str], where: pc.Expression | None = None) -> pa.Table:
    """Of all rows, or of those that the filter takes. Raises StoreUnavailable."""
    with tables.reading(table.table_uri):
        return tables.rows_where(tables.dataset(table), columns, where)


def _only_grew(table: DeltaTable, known: int) -> bool:
    """Whether every commit since that version has added rows, or none; a compaction adds none. Raises StoreUnavailable."""
    count = table.version() - known
    commits = tables.history_of(table, count) if count > 0 else []
    return count == len(commits) and not any(c.get("operation") in _CHANGING or BLANKED in c for c in commits)


def _marks(marks: DeltaTable) -> pa.Table:
    return read_columns(marks, list(SAID))


def _dispatcher(claims: pa.Table) -> str | None:
    """Who has claimed the outbox last; None where nobody has."""
    last = claims.sort_by("turn")["attempt"][-1].as_py() if claims.num_rows else None
    return last and str(last).partition("/")[0]


def _latest(rows: pa.Table) -> pa.Table:
    """Of each message that has marks what the last one says."""
    last = {name: (name, "last") for name in ("state", "attempts", *TOLD)}
    rows = rows.filter(pc.greater_equal(rows["number"], 0)).sort_by("turn")
    grouped = rows.group_by("number", use_threads=False).aggregate(list(last.values()))
    return grouped.rename_columns(["number", *last] if grouped.column_names[0] == "number" else [*last, "number"])


def _not_done(table: DeltaTable, latest: pa.Table) -> tuple[int, pa.Table]:
    """The last decision with messages, and those that are not done; the others pass by in portions."""
    done = np.sort(latest["number"].filter(_is_done(latest)).to_numpy())
    last, found = 0, [_joined(_EMPTY, latest)]
    with tables.reading(table.table_uri):
        for batch in _portions(tables.dataset(table)):
            if not batch.num_rows:
                continue
            rows = pa.Table.from_batches([batch])
            numbers, last = rows["number"].to_numpy(), max(last, pc.max(rows["seq"]).as_py())
            at = np.searchsorted(done, numbers)
            passed = at < len(done)
            passed[passed] = done[at[passed]] == numbers[passed]
            found.append(_joined(rows.filter(pa.array(~passed)), latest))
    return last, pa.concat_tables(found)


def _portions(rows: Any) -> Iterator[pa.RecordBatch]:
    """What SEEN names, piece by piece; Spark gives all of it at once."""
    if isinstance(rows, ds.Dataset):
        yield from rows.to_batches(columns=SEEN)
    else:
        yield from rows.to_table(columns=SEEN).to_batches()


_EMPTY = pa.schema([MESSAGES_TABLE.field(name) for name in SEEN]).empty_table()


def _is_done(rows: pa.Table) -> pa.ChunkedArray:
    return pc.is_in(rows["state"], pa.array([int(state) for state in DONE], pa.int32()))


def _are_open(rows: pa.Table) -> pa.Table:
    return rows.filter(pc.invert(_is_done(rows)))


def _marked(messages: pa.Table, marks: pa.Table) -> pa.Table:
    """Messages, with what these marks say of some of them; what they do not tell is as it was before."""
    at = pc.index_in(messages["number"], value_set=marks["number"].combine_chunks())
    for name in ("state", "attempts", *TOLD):
        place, kind = messages.schema.get_field_index(name), messages.schema.field(name)
        messages = messages.set_column(place, kind, pc.coalesce(marks[name].take(at), messages[name]))
    return messages


def _joined(messages: pa.Table, latest: pa.Table) -> pa.Table:
    """Messages with what became of them; those without a mark wait."""
    at = pc.index_in(messages["number"], value_set=latest["number"].combine_chunks())
    marks = latest.take(at)
    for name in TOLD:
        messages = messages.append_column(name, marks[name])
    for name in ("state", "attempts"):
        messages = messages.append_column(name, pc.fill_null(marks[name], 0))
    return messages


def _entry(row: dict[str, Any], dead: dict[Line, int]) -> Entry:
    state = State(row["state"])
    if state == State.WAITING and row["number"] > dead.get((row["topic"], row["key"]), row["number"]):
        state = State.BEHIND
    names = ("number", "topic", "key", "id", "attempts", "size", "created_at", "error_type", "error_message")
    told: dict[str, Any] = {name: row[name] for name in names}
    told["size"] = None if row["size"] == BLANK else row["size"]
    return Entry(**told, set_by=row["set_by"] or None, set_reason=row["set_reason"] or None, state=state, changed_at=row["at"])


def _pairs(headers: list[dict[str, Any]] | None) -> tuple[tuple[str, bytes | None], ...]:
    return tuple((h["key"], h["value"]) for h in headers or ())
