"""The outbox in PostgreSQL: messages are rows of the batch's transaction, and each is marked in a row of its own.

A dispatcher's turn is one transaction: it locks lanes (buckets of destination keys) with advisory locks that end with it, takes the first
waiting messages of each, and marks them. The lock is over no earlier than the marks are true.
"""

from __future__ import annotations

import datetime as dt
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ClassVar

import pyarrow as pa

from checkpoint.errors import ConfigError, StoreError
from checkpoint.postgres.dsn import Connection
from checkpoint.postgres.errors import translating
from checkpoint.postgres.sqlfiles import Statements, quoted
from dedup.outbox.exactly_once import Flight
from dedup.outbox.message import LANES, Entry, Lag, Message, Messages, State
from dedup.outbox.store import Asked, Chosen, Failed, Marks
from dedup.postgres import encode
from dedup.postgres.letters import property_arrays

LANES_PER_TURN = 16
"""A quarter of them: so many dispatchers can share the work evenly."""

_BY_INDEX = "set local enable_seqscan = off"
"""Messages are looked for by place, lane or number: what was sent long ago must not be read for that, whatever the statistics say."""

Open = Callable[[str], AbstractContextManager[Connection]]
"""What is being done -> a connection outside any transaction."""


def publish(connection: Connection, sql: Statements, consumer_id: int, messages: Messages) -> None:
    """Store messages, numbered in their order. Raises StoreError if the table does not take them all.

    Crash: undone with the transaction.
    """
    rows, count = messages.rows, messages.rows.num_rows
    columns = {
        "consumer_id": pa.repeat(pa.scalar(consumer_id, pa.int32()), count),
        "topic": pa.repeat(pa.scalar(messages.topic, pa.string()), count),
        **{name: rows[name] for name in ("key", "id", "body", "lane")},
    }
    headers = rows["headers"].combine_chunks()
    if headers.null_count < count:
        names = property_arrays(headers.chunk(0) if isinstance(headers, pa.ChunkedArray) else headers)
        columns |= {"header_names": names["property_names"], "header_values": names["property_values"]}
    kept = encode.copy_in(connection, f"{quoted(sql.schema)}.outbox", pa.table(columns))
    if kept != count:
        raise StoreError(f"outbox kept {kept} of {count} rows. Remove the trigger that somebody has added to it.")


class PgTurn:
    """Messages in hand, in an open transaction."""

    def __init__(self, connection: Connection, sql: Statements, taken: Sequence[tuple[Message, str]]) -> None:
        self.messages: Sequence[Message] = [message for message, _ in taken]
        self._places = {message.number: place for message, place in taken}
        self._connection, self._sql = connection, sql

    def mark(self, marks: Marks) -> None:
        """Note what became of them, and commit.

        Crash: all of it is noted, or nothing.
        """
        if marks.sent:
            # Where the rows lie is known, and under the locks of their lanes nobody moves them.
            places = "{" + ",".join(f'"{self._places[number]}"' for number in marks.sent) + "}"
            marked = self._connection.execute(self._sql["outbox_sent"], {"places": places}).rowcount
            if marked != len(marks.sent):
                raise StoreError(f"{len(marks.sent) - marked} of {len(marks.sent)} messages were moved or deleted while they were sent.")
        for state, failed in ((State.DEAD, marks.dead), (State.WAITING, marks.tried)):
            if failed:
                self._connection.execute(self._sql["outbox_failed"], {"state": int(state), **_columns(failed)})
        self._connection.execute("commit")


def _columns(failed: Sequence[Failed]) -> dict[str, list[Any]]:
    return {
        "numbers": [f.number for f in failed],
        "types": [_clean(f.error_type) for f in failed],
        "messages": [_clean(f.error_message) for f in failed],
    }


def _clean(text: str) -> str:
    """PostgreSQL's text holds no NUL."""
    return text.replace("\0", "\u2400")


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
            if self._all(connection, "outbox_flying"):
                raise ConfigError(
                    f"Messages of {self.consumer!r} were handed to a Kafka transaction whose outcome is not noted: run "
                    f"`dedup outbox dispatch {self.consumer} --exactly-once --once` first, and do not send both ways at once."
                )
            yield PgTurn(connection, self._sql, self._first(connection, asked))

    def fly(self, asked: Asked) -> Flight | None:
        """The flight that is not settled, or else a new one, noted; None where nothing waits.

        Crash: it is noted or not.
        """
        with self._transaction("Noting messages to send") as connection:
            number = int(self._all(connection, "outbox_flight")[0][0])
            flying = self._messages(self._all(connection, "outbox_flying"))
            if flying:
                connection.execute("commit")
                return Flight(number, [message for message, _ in flying], fresh=False)
            taken = self._first(connection, asked, whole=True)[: asked.limit]
            if taken:
                places = "{" + ",".join(f'"{place}"' for _, place in taken) + "}"
                self._all(connection, "outbox_fly", places=places, flight=number + 1)
            connection.execute("commit")
        return Flight(number + 1, [message for message, _ in taken], fresh=True) if taken else None

    def land(self, flight: Flight) -> None:
        """Its messages are sent.

        Crash: all of them are marked, or none; whoever comes next asks the broker.
        """
        with self._connect(f"Marking messages of {self.consumer!r}") as connection:
            self._all(connection, "outbox_land", flight=flight.number)

    def ground(self, flight: Flight, dead: Failed | None) -> None:
        """Its messages wait again, but for one that is dead.

        Crash: all of it, or nothing.
        """
        with self._transaction("Taking messages back") as connection:
            grounded = {row[0] for row in self._all(connection, "outbox_ground", flight=flight.number)}
            if dead is not None and dead.number in grounded:  # else another dispatcher has settled it, and somebody decided since
                connection.execute(self._sql["outbox_failed"], {"state": int(State.DEAD), **_columns([dead])})
            connection.execute("commit")

    def _first(self, connection: Connection, asked: Asked, *, whole: bool = False) -> list[tuple[Message, str]]:
        """Messages of the first lanes that have any and that nobody else has in hand; those lanes stay locked."""
        where = {"lanes": list(range(LANES)), "topics": list(asked.topics), "aside": not asked.blocking}
        lanes = [row[0] for row in self._all(connection, "outbox_lanes", **where)]
        random.shuffle(lanes)  # dispatchers that begin at once do not all try the same ones
        while lanes:
            locked = [row[0] for row in self._all(connection, "outbox_lock", lanes=lanes, most=LANES if whole else LANES_PER_TURN)]
            if not locked:
                break
            if (found := self._take(connection, asked, locked)) or whole:
                return found
            connection.execute("commit and chain")  # what was put aside stays aside
            connection.execute(_BY_INDEX)
            lanes = [lane for lane in lanes if lane not in locked]
        return []

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

    def _take(self, connection: Connection, asked: Asked, lanes: list[int]) -> list[tuple[Message, str]]:
        connection.execute(self._sql["outbox_hold" if asked.blocking else "outbox_overtake"], {"consumer": self.consumer, "lanes": lanes})
        topics, keys = zip(*asked.resting, strict=True) if asked.resting else ((), ())
        found = self._all(
            connection,
            "outbox_take",
            lanes=lanes,
            topics=list(asked.topics),
            each=max(1, asked.limit // len(lanes)),
            resting_topics=list(topics),
            resting_keys=list(keys),
            resting_numbers=sorted(asked.resting_numbers),
        )
        return self._messages(found)

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
            asked = {"states": [int(s) for s in chosen.states], "topic": chosen.topic, "numbers": list(chosen.numbers)}
            found = self._all(connection, "outbox_entries", **asked, most=chosen.limit)
        return [Entry(n, t, k, i, State(s), *rest) for n, t, k, i, s, *rest in found]

    def message(self, number: int) -> Message | None:
        """One message with its body."""
        with self._connect(f"Reading the outbox of {self.consumer!r}") as connection:
            found = self._all(connection, "outbox_message", number=number)
        return next((Message(n, t, k, i, b, _headers(names, values), a) for n, t, k, i, b, names, values, a in found), None)

    def lag(self, topics: Sequence[str] = ()) -> Lag:
        """What is not sent yet."""
        with self._connect(f"Reading the outbox of {self.consumer!r}") as connection:
            return Lag(*self._all(connection, "outbox_lag", topics=list(topics))[0])

    def retry(self, numbers: Sequence[int]) -> int:
        """Let dead messages be sent again. Waits for turns that have their keys.

        Crash: all of it, or nothing.
        """
        return self._change("outbox_retry", numbers)

    def discard(self, numbers: Sequence[int]) -> int:
        """Give up messages that are not sent. Waits for turns that have their keys.

        Crash: all of it, or nothing.
        """
        return self._change("outbox_discard", numbers)

    def _change(self, name: str, numbers: Sequence[int]) -> int:
        with self._transaction("Changing messages") as connection:
            locked = self._all(connection, "outbox_lock_of", numbers=list(numbers))
            changed = self._all(connection, name, numbers=list(numbers))
            self._all(connection, "outbox_release", lanes=[row[0] for row in locked])
            connection.execute("commit")
        return len(changed)

    def purge(self, before: dt.datetime, *, dry_run: bool = False) -> int:
        """Delete what was sent or discarded before that time; returns how many.

        Crash: all of it, or nothing.
        """
        with self._connect(f"Purging the outbox of {self.consumer!r}") as connection:
            if dry_run:
                return int(self._all(connection, "outbox_old", before=before)[0][0])
            return connection.execute(self._sql["outbox_purge"], {"consumer": self.consumer, "before": before}).rowcount


def _headers(names: list[str] | None, values: list[bytes | None] | None) -> tuple[tuple[str, bytes | None], ...]:
    return tuple(zip(names, values or (), strict=True)) if names else ()
