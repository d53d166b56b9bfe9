"""The outbox in PostgreSQL: messages are rows that the batch's transaction writes; separate rows mark what became of each.

A dispatcher's turn is one transaction. It locks lanes (buckets of destination keys) with advisory locks, takes the first waiting messages
of each lane, and marks them. The transaction holds the locks until its marks are committed.

Many messages of one topic and lane are stored as one page: a row that holds each kind of value as an array. Storing or marking a page costs
as much as a single row. The n-th message of a page has the number 1000 * page + n - 1.
Called by the transaction, and through the store by the dispatcher and `dedup outbox`.
"""

from __future__ import annotations

import datetime as dt
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import pairwise, repeat
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from checkpoint.errors import ConfigError, StoreError, command
from checkpoint.position import Ints
from checkpoint.postgres.connection import Connection, translating
from checkpoint.postgres.sql import Statements, quoted
from deadletter.letter import ERASED
from dedup.core.messages import (
    BYTES_PER_TURN,
    LANES,
    Asked,
    Chosen,
    Entry,
    Failed,
    Marks,
    Message,
    Messages,
    OutboxLag,
    State,
    erased_reason,
)
from dedup.core.retention import Remains
from dedup.outbox.exactly_once import Flight
from dedup.postgres import wire
from dedup.postgres.charset import charset_of

LANES_PER_TURN = 16
"""A quarter of them: so many dispatchers can share the work evenly."""

_BY_INDEX = "set local enable_seqscan = off; set local idle_in_transaction_session_timeout = 0"
"""Messages are looked for by place, lane or number: what was sent long ago must not be read for that, whatever the statistics say. A
receiver that takes long is no forgotten session."""

Open = Callable[[str], AbstractContextManager[Connection]]
"""What is being done -> a connection outside any transaction."""

NUMBERS = 1_000
"""Numbers of a page; more than it ever has messages."""

PER_PAGE = 500
"""Messages of a page at most: what has to be unpacked where something happens to one of them."""

PER_BATCH = 16
"""Pages that are made while the server takes those before them."""

BYTES = 1 << 20
"""Bytes of a page's bodies, about: one more body may be in it."""

PAGES = pa.schema(
    [
        ("consumer_id", pa.int32()),
        ("topic", pa.string()),
        ("lane", pa.int16()),
        ("messages", pa.int32()),
        ("size", pa.int64()),
        ("keys", pa.list_(pa.binary())),
        ("ids", pa.list_(pa.string())),
        ("bodies", pa.list_(pa.binary())),
        ("header_ends", pa.list_(pa.int32())),
        ("header_names", pa.list_(pa.string())),
        ("header_values", pa.list_(pa.binary())),
    ]
)
"""Columns of `outbox_page` that are written; one row per page."""

Texts = Callable[[pa.Array], pa.Array]
"""Texts -> texts that the database can hold."""


class Page(NamedTuple):
    """A page as it is read."""

    page: int
    topic: str
    keys: list[bytes | None]
    ids: list[str]
    bodies: list[bytes | None]
    header_ends: list[int] | None
    header_names: list[str] | None
    header_values: list[bytes | None] | None

    @property
    def numbers(self) -> range:
        """The numbers of its messages."""
        return range(NUMBERS * self.page, NUMBERS * self.page + len(self.ids))

    def messages(self) -> list[Message]:
        """Its messages, in order."""
        columns = (self.numbers, repeat(self.topic), self.keys, self.ids, self.bodies)
        if self.header_ends is None:
            return list(map(Message, *columns))
        pairs = list(zip(self.header_names or (), self.header_values or (), strict=True))
        return list(map(Message, *columns, [tuple(pairs[first:end]) for first, end in pairwise([0, *self.header_ends])]))


Taken = tuple[list[tuple[Message, str]], list[Page]]
"""Rows with their places, and pages."""


def enqueue(connection: Connection, sql: Statements, consumer_id: int, messages: Messages) -> None:
    """Store messages, numbered in their order. Raises StoreError if the table does not take them all.

    Crash: undone with the transaction.
    """
    held = charset_of(connection)
    count, schema, pages = pages_of(consumer_id, messages, held.escaped if held else None)
    kept = wire.copy_batches(connection, f"{quoted(sql.schema)}.outbox_page", schema, pages)
    if kept != count:
        raise StoreError(f"outbox_page kept {kept} of {count} rows. Remove the trigger that somebody has added to it.")


class PgOutbox:
    """The messages of one consumer."""

    parallel: ClassVar[bool] = True

    def __init__(self, consumer: str, sql: Statements, connect: Open) -> None:
        self.consumer, self._sql, self._connect = consumer, sql, connect

    @contextmanager
    def turn(self, asked: Asked) -> Iterator[PgTurn]:
        """Messages of keys that nobody else has in hand; the first waiting ones of each key, ascending.

        Crash: the locks end with the session, and what was not marked is taken again.
        """
        with self._transaction("Taking messages to send") as connection:
            taken = self._first(connection, asked)
            if self._all(connection, "outbox_flying"):  # under the locks: a flight that is noted later has none of these keys
                raise ConfigError(
                    f"Messages of {self.consumer!r} were handed to a Kafka transaction whose outcome is unknown: run "
                    f"{command('outbox', 'dispatch', self.consumer, '--exactly-once', '--once')} first, and do not send both ways at once."
                )
            yield PgTurn(connection, self._sql, *taken)

    def fly(self, asked: Asked) -> Flight | None:
        """The flight that is not settled, or else a new one, noted; None where nothing waits. Either is counted.

        Crash: it is noted and counted, or not.
        """
        with self._transaction("Noting messages to send") as connection:
            counted = self._all(connection, "outbox_flight")
            if not counted:  # the consumer has not begun yet
                return None
            number = int(counted[0][0])
            flying = self._messages(self._all(connection, "outbox_flying"))
            if flying:
                left = int(self._all(connection, "outbox_flying_number")[0][0])
                self._all(connection, "outbox_fly", places="{}", flight=number + 1)  # who had it before us does not take it back any more
                connection.execute("commit")
                return Flight(left, [message for message, _ in flying], fresh=False, count=number + 1)
            taken = self._first(connection, asked, whole=True)[0][: asked.limit]
            if taken:
                places = "{" + ",".join(f'"{place}"' for _, place in taken) + "}"
                self._all(connection, "outbox_fly", places=places, flight=number + 1)
            connection.execute("commit")
        return Flight(number + 1, [message for message, _ in taken], fresh=True, count=number + 1) if taken else None

    def land(self, flight: Flight) -> None:
        """Its messages are sent.

        Crash: all of them are marked, or none; whoever comes next asks the broker.
        """
        with self._connect(f"Marking messages of {self.consumer!r}") as connection:
            self._all(connection, "outbox_land", flight=flight.number)

    def ground(self, flight: Flight, dead: Failed | None) -> None:
        """Its messages wait again, but for one that is dead. Nothing happens if somebody got the flight after us: they may have sent it.

        Crash: all of it, or nothing.
        """
        with self._transaction("Taking messages back") as connection:
            counted = self._all(connection, "outbox_flight")
            if not counted or int(counted[0][0]) != flight.count:
                return
            grounded = {row[0] for row in self._all(connection, "outbox_ground", flight=flight.number)}
            if dead is not None and dead.number in grounded:  # else another dispatcher has settled it, and somebody decided since
                connection.execute(self._sql["outbox_failed"], {"state": int(State.DEAD), **failures([dead])})
            connection.execute("commit")

    def _first(self, connection: Connection, asked: Asked, *, whole: bool = False) -> Taken:
        """Messages of the first lanes that have any and that nobody else has in hand; those lanes stay locked.

        Args:
            whole: of all lanes, and as rows.
        """
        where = {"lanes": list(range(LANES)), **_of_topics(asked), "aside": not asked.blocking}
        lanes = [row[0] for row in self._all(connection, "outbox_lanes", **where)]
        random.shuffle(lanes)  # dispatchers that begin at once do not all try the same ones
        while lanes:
            locked = [row[0] for row in self._all(connection, "outbox_lock", lanes=lanes, most=LANES if whole else LANES_PER_TURN)]
            if not locked:
                break
            odd = [row[0] for row in self._all(connection, "outbox_odd_lanes", lanes=locked, most=asked.limit)]
            taken = self._take(connection, asked, locked, locked if whole else odd)
            if any(taken) or whole:
                return taken
            connection.execute("commit and chain")  # what was put aside stays aside
            connection.execute(_BY_INDEX)
            lanes = [lane for lane in lanes if lane not in locked]
        return [], []

    @contextmanager
    def _transaction(self, doing: str) -> Iterator[Connection]:
        doing = f"{doing} of {self.consumer!r}"
        with self._connect(doing) as connection:
            # Each statement has to see what the holder of the lock before us has committed, whatever the role's default is.
            connection.execute("begin isolation level read committed, read write")
            connection.execute(_BY_INDEX)
            try:
                with translating(doing):
                    yield connection
            finally:
                if not connection.closed and connection.info.transaction_status:
                    connection.execute("rollback")

    def _take(self, connection: Connection, asked: Asked, locked: list[int], odd: list[int]) -> Taken:
        """Rows of the odd ones among the locked lanes, and pages of the others."""
        rows = self._take_rows(connection, asked, odd) if odd else []
        even = [lane for lane in locked if lane not in set(odd)]
        which = {"lanes": even, **_of_topics(asked), "most": asked.limit, "bytes": BYTES_PER_TURN}
        return rows, [Page(*row) for row in self._all(connection, "outbox_pages", **which)] if even else []

    def _take_rows(self, connection: Connection, asked: Asked, lanes: list[int]) -> list[tuple[Message, str]]:
        while True:
            first = self._all(connection, "outbox_first_pages", lanes=lanes, **_of_topics(asked), most=asked.limit)
            self._unpack(connection, [row[0] for row in first])
            name = "outbox_hold" if asked.blocking else "outbox_overtake"
            moved = connection.execute(self._sql[name], {"consumer": self.consumer, "lanes": lanes}).rowcount
            found = self._take_waiting(connection, asked, lanes)
            if found or not moved:  # however many are behind a dead one, those of other keys come after them
                return self._messages(found)

    def _take_waiting(self, connection: Connection, asked: Asked, lanes: list[int]) -> list[tuple[Any, ...]]:
        resting = zip(*asked.resting, strict=True) if asked.resting else ((), ())
        resting_topics, resting_keys = map(list, resting)
        return self._all(
            connection,
            "outbox_take",
            lanes=lanes,
            **_of_topics(asked),
            each=max(1, asked.limit // len(lanes)),
            resting_topics=resting_topics,
            resting_keys=resting_keys,
            resting_numbers=sorted(asked.resting_numbers),
            bytes=BYTES_PER_TURN,
        )

    def _unpack(self, connection: Connection, pages: list[int]) -> None:
        if pages:
            connection.execute(self._sql["outbox_unpack"], {"pages": pages})

    @staticmethod
    def _messages(found: list[tuple[Any, ...]]) -> list[tuple[Message, str]]:
        return [(Message(n, t, k, i, b, _headers(names, values), a), place) for n, t, k, i, b, names, values, a, place in found]

    def _all(self, connection: Connection, name: str, **parameters: Any) -> list[tuple[Any, ...]]:
        space = f"dedup outbox {self._sql.schema} {self.consumer}"
        with connection.cursor(binary=True) as cursor:
            return cursor.execute(self._sql[name], {"consumer": self.consumer, "space": space, **parameters}).fetchall()

    def entries(self, chosen: Chosen) -> list[Entry]:
        """Messages without their bodies, ascending."""
        with self._connect(f"Reading the outbox of {self.consumer!r}") as connection:
            asked = {"states": [int(s) for s in chosen.states], "topic": chosen.topic, **_of_numbers(chosen.numbers)}
            found = self._all(connection, "outbox_entries", **asked, most=chosen.limit)
        return [Entry(n, t, k, i, State(s), *rest) for n, t, k, i, s, *rest in found]

    def message(self, number: int) -> Message | None:
        """One message with its body."""
        with self._connect(f"Reading the outbox of {self.consumer!r}") as connection:
            found = self._all(connection, "outbox_message", number=number)
        return next((Message(n, t, k, i, b, _headers(names, values), a) for n, t, k, i, b, names, values, a in found), None)

    def lag(self, topics: Sequence[str] = ()) -> OutboxLag:
        """What is not sent yet."""
        with self._connect(f"Reading the outbox of {self.consumer!r}") as connection:
            return OutboxLag(*self._all(connection, "outbox_lag", topics=list(topics))[0])

    def topics(self) -> list[str]:
        """The topics of all messages that are stored."""
        with self._connect(f"Reading the outbox of {self.consumer!r}") as connection:
            return sorted(topic for (topic,) in self._all(connection, "outbox_topics"))

    def retry(self, numbers: Sequence[int], *, by: str | None = None, reason: str | None = None) -> int:
        """Let dead messages be sent again. Waits for turns that have their keys. Who decides that and why is kept with them.

        Crash: all of it, or nothing.
        """
        return self._change("outbox_retry", numbers, by, reason)

    def discard(self, numbers: Sequence[int], *, by: str | None = None, reason: str | None = None) -> int:
        """Give up messages that are not sent. Waits for turns that have their keys. Who decides that and why is kept with them.

        Crash: all of it, or nothing.
        """
        return self._change("outbox_discard", numbers, by, reason)

    def _change(self, name: str, numbers: Sequence[int], by: str | None, reason: str | None) -> int:
        with self._transaction("Changing messages") as connection:
            locked = self._all(connection, "outbox_lock_of", **_of_numbers(numbers))
            own = self._all(connection, "outbox_own_pages", **_of_numbers(numbers))
            self._unpack(connection, [row[0] for row in own])
            changed = self._all(connection, name, numbers=list(numbers), by=by, reason=reason)
            self._all(connection, "outbox_release", lanes=[row[0] for row in locked])
            connection.execute("commit")
        return len(changed)

    def about(self, ids: Sequence[str], keys: Sequence[bytes]) -> list[int]:
        """Numbers of the messages with one of these ids, and of those whose ids were made of one of these incoming keys; ascending.

        Reads the ids of all messages that are kept.
        """
        with self._connect(f"Reading the outbox of {self.consumer!r}") as connection:
            found = self._all(connection, "outbox_about", ids=list(ids), keys=[key.hex() for key in keys])
        return [number for (number,) in found]

    def erase(self, numbers: Sequence[int], *, by: str, reason: str) -> int:
        """Erase bodies, keys and headers of messages that were sent or discarded, with who did it and why; returns how many.

        Pages that they are in become rows. Messages that were not sent, or erased before, stay as they are.

        Crash: all of it, or nothing.
        """
        with self._transaction("Erasing messages") as connection:
            pages = [row[0] for row in self._all(connection, "outbox_lock_sent_pages", **_of_numbers(numbers))]
            if pages:
                connection.execute(self._sql["outbox_unpack_sent"], {"pages": pages})
            told = {"by": by, "reason": erased_reason(reason), "mark": ERASED}
            changed = self._all(connection, "outbox_erase", numbers=list(numbers), **told)
            connection.execute("commit")
        return len(changed)

    def purge(self, before: dt.datetime, *, dry_run: bool = False) -> int:
        """Delete what was sent or discarded before that time; returns how many.

        Crash: all of it, or nothing.
        """
        with self._connect(f"Purging the outbox of {self.consumer!r}") as connection:
            return int(self._all(connection, "outbox_old" if dry_run else "outbox_purge", before=before)[0][0])


def remains(schema: str) -> list[Remains]:
    """Where PostgreSQL keeps what was erased, until it is overwritten."""
    tables = ", ".join(f"{schema}.{name}" for name in ("dead_letter", "letter_history", "outbox", "outbox_page"))
    return [
        Remains("dead row versions in the files of the tables", None, f"VACUUM {tables}; the bytes go when the space is used again"),
        Remains("write-ahead log, replicas and backups of the database", None, "their own retention"),
    ]


def _of_topics(asked: Asked) -> dict[str, list[str]]:
    return {"topics": list(asked.topics), "resting": sorted(asked.resting_topics)}


def _of_numbers(numbers: Sequence[int]) -> dict[str, list[int]]:
    """Numbers of messages, and of the pages that they are in where they are in any."""
    return {"numbers": list(numbers), "pages": sorted({number // NUMBERS for number in numbers})}


def _headers(names: list[str] | None, values: list[bytes | None] | None) -> tuple[tuple[str, bytes | None], ...]:
    return tuple(zip(names, values or (), strict=True)) if names else ()


class PgTurn:
    """Messages in hand, in an open transaction: rows with their places, and whole pages."""

    def __init__(self, connection: Connection, sql: Statements, rows: Sequence[tuple[Message, str]], pages: Sequence[Page] = ()) -> None:
        taken = [message for message, _ in rows]
        self._places = {message.number: place for message, place in rows}
        self._pages = {page.page: page.numbers for page in pages}
        self._connection, self._sql = connection, sql
        for page in pages:
            taken += page.messages()
        if rows and pages:
            taken.sort(key=lambda message: message.number)
        self.messages: Sequence[Message] = taken

    def mark(self, marks: Marks) -> None:
        """Note what became of them, and commit.

        Crash: all of it is noted, or nothing.
        """
        if len(marks.sent) == len(self.messages):
            self._mark_places(list(self._places.values()))
            self._mark_pages(list(self._pages))
        else:
            self._mark_some(marks)
        for state, failed in ((State.DEAD, marks.dead), (State.WAITING, marks.tried)):
            if failed:
                self._connection.execute(self._sql["outbox_failed"], {"state": int(state), **failures(failed)})
        self._connection.execute("commit")

    def _mark_some(self, marks: Marks) -> None:
        """Pages of which not all were sent, and not none of them touched, become rows."""
        sent = set(marks.sent)
        touched = sent | {f.number for f in (*marks.dead, *marks.tried)}
        whole = [page for page, numbers in self._pages.items() if sent.issuperset(numbers)]
        odd = {page: numbers for page, numbers in self._pages.items() if page not in set(whole) and not touched.isdisjoint(numbers)}
        self._mark_places([self._places[number] for number in marks.sent if number in self._places])
        self._mark_pages(whole)
        if odd:
            self._connection.execute(self._sql["outbox_unpack"], {"pages": list(odd)})
            numbers = [number for numbers in odd.values() for number in numbers if number in sent]
            self._marked("outbox_sent_numbers", len(numbers), numbers=numbers)

    def _mark_places(self, places: list[str]) -> None:
        # Where the rows lie is known, and under the locks of their lanes nobody moves them.
        if places:
            self._marked("outbox_sent", len(places), places="{" + ",".join(f'"{place}"' for place in places) + "}")

    def _mark_pages(self, pages: list[int]) -> None:
        if pages:
            self._marked("outbox_pages_sent", len(pages), pages=pages)

    def _marked(self, name: str, count: int, **what: Any) -> None:
        marked = self._connection.execute(self._sql[name], what).rowcount
        if marked != count:
            raise StoreError(f"{count - marked} of {count} messages or pages of them were moved or deleted while they were sent.")


def failures(failed: Sequence[Failed]) -> dict[str, list[Any]]:
    """Parameters of the statement `outbox_failed`."""
    return {
        "numbers": [f.number for f in failed],
        "types": [f.error_type for f in failed],
        "messages": [f.error_message for f in failed],
    }


def pages_of(consumer_id: int, messages: Messages, texts: Texts | None = None) -> tuple[int, pa.Schema, Iterator[pa.RecordBatch]]:
    """Messages as rows of `outbox_page`, a few at a time: those of a lane together, in their order. How many rows, and their schema."""
    lanes, sizes = messages.rows["lane"].to_numpy(), _sizes(messages.rows["body"])
    order = np.argsort(lanes, kind="stable")
    ends = np.append(_cuts(lanes[order], sizes[order]), len(order))
    headers = messages.rows["headers"].null_count < len(order)
    schema = PAGES if headers else pa.schema([f for f in PAGES if not f.name.startswith("header_")])

    def batches() -> Iterator[pa.RecordBatch]:
        for begin in range(0, len(ends) - 1, PER_BATCH):
            some = ends[begin : begin + PER_BATCH + 1]
            at = order[some[0] : some[-1]]
            rows = messages.rows.take(pa.array(at))
            columns = _columns(consumer_id, messages.topic, rows, sizes[at], (some - some[0]).astype(np.int32))
            if texts is not None:
                columns = {name: _texts(column, texts) for name, column in columns.items()}
            yield pa.RecordBatch.from_pydict({name: columns[name] for name in schema.names}, schema)

    return len(ends) - 1, schema, batches()


def _texts(column: pa.Array, texts: Texts) -> pa.Array:
    """A column with what `texts` makes of its texts, also in lists."""
    if pa.types.is_list(column.type) and pa.types.is_string(column.type.value_type):
        return pa.ListArray.from_arrays(column.offsets, texts(column.values))
    return texts(column) if pa.types.is_string(column.type) else column


def _columns(consumer_id: int, topic: str, rows: pa.Table, sizes: Ints, ends: Any) -> dict[str, pa.Array]:
    first, at, count = ends[:-1], pa.array(ends), len(ends) - 1
    lists = {name: pa.ListArray.from_arrays(at, _flat(rows[of])) for name, of in (("keys", "key"), ("ids", "id"), ("bodies", "body"))}
    return {
        "consumer_id": pa.repeat(pa.scalar(consumer_id, pa.int32()), count),
        "topic": pa.repeat(pa.scalar(topic, pa.string()), count),
        "lane": pa.array(rows["lane"].to_numpy()[first]),
        "messages": pa.array(np.diff(ends)),
        "size": pa.array(np.add.reduceat(sizes, first)),
        **lists,
        **_page_headers(rows["headers"], ends),
    }


def _sizes(bodies: pa.ChunkedArray) -> Ints:
    return np.asarray(pc.binary_length(bodies).fill_null(0).cast(pa.int64()).to_numpy())


def _cuts(lanes: Any, sizes: Ints) -> Ints:
    """Where pages begin."""
    new = np.append(True, lanes[1:] != lanes[:-1])
    begun = np.flatnonzero(new)
    within = np.arange(len(lanes)) - np.repeat(begun, np.diff(np.append(begun, len(lanes))))
    before = (np.cumsum(sizes) - sizes) // BYTES
    return np.flatnonzero(new | (within % PER_PAGE == 0) | np.append(False, before[1:] != before[:-1]))


def _page_headers(headers: pa.ChunkedArray, ends: Any) -> dict[str, pa.Array]:
    """Flat over the messages of each page, and where those of each message end in it."""
    column = _flat(headers)
    counts = pc.list_value_length(column).fill_null(0).to_numpy()
    total = np.append(0, np.cumsum(counts))
    at = pa.array(total[ends].astype(np.int32))
    within = total[1:] - np.repeat(total[ends[:-1]], np.diff(ends))
    pairs = column.flatten()
    names = pc.replace_substring(pairs.field("key"), "\0", "\u2400") if len(pairs) else pa.array([], pa.string())  # text holds no NUL
    return {
        "header_ends": pa.ListArray.from_arrays(pa.array(ends), pa.array(within.astype(np.int32))),
        "header_names": pa.ListArray.from_arrays(at, names),
        "header_values": pa.ListArray.from_arrays(at, pairs.field("value")),
    }


def _flat(column: pa.ChunkedArray) -> pa.Array:
    whole = column.combine_chunks()
    return whole.chunk(0) if isinstance(whole, pa.ChunkedArray) else whole
