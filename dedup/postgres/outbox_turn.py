"""A dispatcher's turn in PostgreSQL: the messages that it has in hand, and the marks of what became of them. Made by outbox.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from checkpoint.errors import StoreError
from checkpoint.postgres.dsn import Connection
from checkpoint.postgres.sqlfiles import Statements
from dedup.outbox.message import Message, State
from dedup.outbox.store import Failed, Marks
from dedup.postgres.outbox_pages import Page


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
        "types": [_clean(f.error_type) for f in failed],
        "messages": [_clean(f.error_message) for f in failed],
    }


def _clean(text: str) -> str:
    """PostgreSQL's text holds no NUL."""
    return text.replace("\0", "\u2400")
