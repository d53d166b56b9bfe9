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

from checkpoint.advice import command
from checkpoint.errors import ConfigError, StoreError
from checkpoint.postgres.dsn import Connection
from checkpoint.postgres.errors import translating
from checkpoint.postgres.sqlfiles import Statements, quoted
from dedup.outbox.exactly_once import Flight
from dedup.outbox.message import LANES, Entry, Lag, Message, Messages, State
from dedup.outbox.store import BYTES_PER_TURN, Asked, Chosen, Failed
from dedup.postgres import encode, outbox_pages
from dedup.postgres.charset import charset_of
from dedup.postgres.outbox_pages import NUMBERS, Page
from dedup.postgres.outbox_turn import PgTurn, failures

LANES_PER_TURN = 16
"""A quarter of them: so many dispatchers can share the work evenly."""

_BY_INDEX = "set local enable_seqscan = off; set local idle_in_transaction_session_timeout = 0"
"""Messages are looked for by place, lane or number: what was sent long ago must not be read for that, whatever the statistics say. A
receiver that takes long is no forgotten session."""

Open = Callable[[str], AbstractContextManager[Connection]]
"""What is being done -> a connection outside any transaction."""

Taken = tuple[list[tuple[Message, str]], list[Page]]
"""Rows with their places, and pages."""


def publish(connection: Connection, sql: Statements, consumer_id: int, messages: Messages) -> None:
    """Store messages, numbered in their order. Raises StoreError if the table does not take them all.

    Crash: undone with the transaction.
    """
    held = charset_of(connection)
    count, schema, pages = outbox_pages.pages_of(consumer_id, messages, held.escaped if held else None)
    kept = encode.copy_batches(connection, f"{quoted(sql.schema)}.outbox_page", schema, pages)
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
                    f"Messages of {self.consumer!r} were handed to a Kafka transaction whose outcome is not noted: run "
                    f"{command('outbox', 'dispatch', self.consumer, '--exactly-once', '--once')} first, and do not send both ways at once."
                )
            yield PgTurn(connection, self._sql, *taken)

    def fly(self, asked: Asked) -> Flight | None:
        """The flight that is not settled, or else a new one, noted; None where nothing waits.

        Crash: it is noted or not.
        """
        with self._transaction("Noting messages to send") as connection:
            counted = self._all(connection, "outbox_flight")
            if not counted:  # the consumer has not begun yet
                return None
            number = int(counted[0][0])
            flying = self._messages(self._all(connection, "outbox_flying"))
            if flying:
                connection.execute("commit")
                return Flight(number, [message for message, _ in flying], fresh=False)
            taken = self._first(connection, asked, whole=True)[0][: asked.limit]
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
            locked = self._all(connection, "outbox_lock_of", **_of_numbers(numbers))
            own = self._all(connection, "outbox_own_pages", **_of_numbers(numbers))
            self._unpack(connection, [row[0] for row in own])
            changed = self._all(connection, name, numbers=list(numbers))
            self._all(connection, "outbox_release", lanes=[row[0] for row in locked])
            connection.execute("commit")
        return len(changed)

    def purge(self, before: dt.datetime, *, dry_run: bool = False) -> int:
        """Delete what was sent or discarded before that time; returns how many.

        Crash: all of it, or nothing.
        """
        with self._connect(f"Purging the outbox of {self.consumer!r}") as connection:
            return int(self._all(connection, "outbox_old" if dry_run else "outbox_purge", before=before)[0][0])


def _of_topics(asked: Asked) -> dict[str, list[str]]:
    return {"topics": list(asked.topics), "resting": sorted(asked.resting_topics)}


def _of_numbers(numbers: Sequence[int]) -> dict[str, list[int]]:
    """Numbers of messages, and of the pages that they are in where they are in any."""
    return {"numbers": list(numbers), "pages": sorted({number // NUMBERS for number in numbers})}


def _headers(names: list[str] | None, values: list[bytes | None] | None) -> tuple[tuple[str, bytes | None], ...]:
    return tuple(zip(names, values or (), strict=True)) if names else ()
