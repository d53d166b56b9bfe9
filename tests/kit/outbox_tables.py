"""PostgreSQL's tables of an outbox, made of dictionaries: the shipped PgOutbox runs on them, statement by statement.

Transactions undo what they wrote, and hold lanes until they end. Nothing here happens at the same time: others run between two steps of a
turn, where the test lets them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

from dedup.core.messages import State
from dedup.postgres.outbox import NUMBERS

PER_PAGE = 3

STOPPED = (State.DEAD, State.BEHIND)
PAGE_COLUMNS = ("page", "topic", "keys", "ids", "bodies", "header_ends", "header_names", "header_values")


class Held(Exception):
    """Somebody else has the lane: who waits for it gives up."""


@dataclass(frozen=True)
class Row:
    """A row of `outbox`."""

    number: int
    topic: str
    key: bytes | None
    id: str
    body: bytes
    lane: int
    state: State = State.WAITING
    attempts: int = 0
    flight: int | None = None

    @property
    def taken(self) -> tuple[Any, ...]:
        return (self.number, self.topic, self.key, self.id, self.body, None, None, self.attempts, f"p{self.number}")


@dataclass
class Tables:
    """What is stored. `lost` is asked at each commit: it may raise, before (False) or after it (True)."""

    lost: Callable[[bool], None] = lambda done: None
    rows: dict[int, Row] = field(default_factory=dict)
    pages: dict[int, dict[str, Any]] = field(default_factory=dict)
    flight: dict[str, int] = field(default_factory=lambda: {"last": 0})
    locks: dict[int, Session] = field(default_factory=dict)
    given: int = 0  # numbers of pages

    def store(self, messages: Sequence[tuple[bytes | None, str, int]]) -> None:
        """As a batch does that commits: key, id and lane of each, in order; those of a lane lie in pages."""
        for lane in sorted({lane for _, _, lane in messages}):
            mine = [(key, id) for key, id, at in messages if at == lane]
            for begin in range(0, len(mine), PER_PAGE):
                keys, ids = zip(*mine[begin : begin + PER_PAGE], strict=True)
                page = {"topic": "t", "lane": lane, "messages": len(ids), "size": 0, "keys": keys, "ids": ids, "bodies": [b""] * len(ids)}
                self.pages[self.given] = {**dict.fromkeys(PAGE_COLUMNS), **page, "page": self.given, "sent": False}
                self.given += 1

    @contextmanager
    def connect(self, doing: str) -> Iterator[Session]:
        """A session; what it has not committed is undone at its end."""
        session = Session(self)
        try:
            yield session
        finally:
            session.end(undo=True)

    def recount(self, fewer: int) -> None:
        """As if so many flights had never been counted."""
        self.flight["last"] = max(0, self.flight["last"] - fewer)

    def states(self) -> dict[str, tuple[int, State]]:
        """Id -> number and state of each message."""
        found = {row.id: (row.number, row.state) for row in self.rows.values()}
        for page in self.pages.values():
            for place, id in enumerate(page["ids"]):
                found[id] = (NUMBERS * page["page"] + place, State.SENT if page["sent"] else State.WAITING)
        return found


class Sql:
    """In place of the statements' texts: their names."""

    schema = "dedup"

    def __getitem__(self, name: str) -> str:
        return name


class Session:
    """A connection: does what a statement of that name would do."""

    closed = False

    def __init__(self, tables: Tables) -> None:
        self._tables, self._undo, self._found = tables, list[Callable[[], None]](), list[Any]()
        self.info = SimpleNamespace(transaction_status=0)

    @contextmanager
    def cursor(self, **_: Any) -> Iterator[Session]:
        yield self

    def fetchall(self) -> list[Any]:
        return self._found

    @property
    def rowcount(self) -> int:
        return len(self._found)

    def execute(self, statement: str, parameters: dict[str, Any] | None = None) -> Session:
        """Its rows, or one for each that it changed."""
        word = statement.split()[0]
        if word in ("begin", "set"):
            self.info.transaction_status = 1
        elif word == "rollback":
            self.end(undo=True)
        elif word == "commit":
            self._tables.lost(False)
            self.end(undo=False)
            self._tables.lost(True)
        else:
            given = SimpleNamespace(**parameters or {})
            self._found = list(getattr(self, f"_{statement}")(given))
            if not self.info.transaction_status:
                self.execute("commit")
        return self

    def end(self, *, undo: bool) -> None:
        """Of the transaction, with its locks."""
        while self._undo:
            back = self._undo.pop()
            if undo:
                back()
        self._tables.locks = {lane: who for lane, who in self._tables.locks.items() if who is not self}
        self.info.transaction_status = 0

    # ------------------------------------------------------------------ reading and writing
    def _waiting(self, lanes: list[int]) -> list[dict[str, Any]]:
        return [p for _, p in sorted(self._tables.pages.items()) if not p["sent"] and p["lane"] in lanes]

    def _rows(self, lanes: list[int], *states: State) -> list[Row]:
        return [row for _, row in sorted(self._tables.rows.items()) if row.lane in lanes and row.state in states]

    def _put(self, where: dict[Any, Any], key: Any, value: Any) -> Any:
        old = where.get(key)
        self._undo.append(lambda: _set(where, key, old))
        _set(where, key, value)
        return value

    def _change(self, rows: list[Row], **what: Any) -> list[tuple[int]]:
        for row in rows:
            self._put(self._tables.rows, row.number, replace(row, **what))
        return [(row.number,) for row in rows]

    def _of(self, numbers: list[int], *states: State) -> list[Row]:
        found = [self._tables.rows[n] for n in numbers if n in self._tables.rows]
        return [row for row in found if not states or row.state in states]

    def _first_dead(self, lanes: list[int]) -> dict[bytes | None, int]:
        dead = sorted(self._rows(lanes, State.DEAD), key=lambda row: -row.number)
        return {row.key: row.number for row in dead}

    # ------------------------------------------------------------------ statements
    def _outbox_lanes(self, p: Any) -> Iterator[tuple[int]]:
        for lane in p.lanes:
            if self._waiting([lane]) or self._rows([lane], State.WAITING) or (p.aside and self._rows([lane], State.BEHIND)):
                yield (lane,)

    def _outbox_lock(self, p: Any) -> list[tuple[int]]:
        free = [lane for lane in p.lanes if lane not in self._tables.locks][: p.most]
        self._tables.locks |= dict.fromkeys(free, self)
        return [(lane,) for lane in free]

    def _outbox_odd_lanes(self, p: Any) -> Iterator[tuple[int]]:
        for lane in p.lanes:
            stopped = [r for r in self._rows([lane], *STOPPED) if r.state == State.BEHIND or r.key is not None]
            if stopped or self._rows([lane], State.WAITING) or any(page["messages"] > p.most for page in self._waiting([lane])):
                yield (lane,)

    def _outbox_pages(self, p: Any) -> Iterator[tuple[Any, ...]]:
        total = size = 0
        for page in self._waiting(p.lanes):
            total += page["messages"]
            if total > p.most or size >= p.bytes:
                return
            size += page["size"]
            yield tuple(page[name] for name in PAGE_COLUMNS)

    def _outbox_first_pages(self, p: Any) -> Iterator[tuple[int]]:
        before = 0
        for page in self._waiting(p.lanes):
            if before >= p.most:
                return
            before += page["messages"]
            yield (page["page"],)

    def _outbox_unpack(self, p: Any) -> Iterator[int]:
        for number in p.pages:
            page = self._tables.pages.get(number)
            if page is not None and not page["sent"]:
                columns = zip(page["keys"], page["ids"], page["bodies"], strict=True)
                for place, (key, id, body) in enumerate(columns, NUMBERS * number):
                    self._put(self._tables.rows, place, Row(place, page["topic"], key, id, body, page["lane"]))
                self._put(self._tables.pages, number, None)
                yield number

    def _outbox_hold(self, p: Any) -> list[tuple[int]]:
        dead = self._first_dead(p.lanes)
        held = [row for row in self._rows(p.lanes, State.WAITING) if row.key is not None and row.number > dead.get(row.key, row.number)]
        return self._change(held, state=State.BEHIND)

    def _outbox_overtake(self, p: Any) -> list[tuple[int]]:
        return self._change(self._rows(p.lanes, State.BEHIND), state=State.WAITING)

    def _outbox_take(self, p: Any) -> list[tuple[Any, ...]]:
        found = list[Row]()
        resting = set(zip(p.resting_topics, p.resting_keys, strict=True))
        for lane in p.lanes:
            first = min((NUMBERS * page["page"] for page in self._waiting([lane])), default=None)
            rows = [r for r in self._rows([lane], State.WAITING) if (r.topic, r.key) not in resting and r.number not in p.resting_numbers]
            found += [r for r in rows if first is None or r.number < first][: p.each]
        return [row.taken for row in sorted(found, key=lambda row: row.number)]

    def _outbox_sent(self, p: Any) -> list[tuple[int]]:
        return self._change(self._of(_places(p)), state=State.SENT)

    def _outbox_sent_numbers(self, p: Any) -> list[tuple[int]]:
        return self._change(self._of(p.numbers, State.WAITING), state=State.SENT)

    def _outbox_pages_sent(self, p: Any) -> list[Any]:
        found = [self._tables.pages[number] for number in p.pages if number in self._tables.pages]
        return [self._put(self._tables.pages, page["page"], {**page, "sent": True}) for page in found if not page["sent"]]

    def _outbox_failed(self, p: Any) -> list[Any]:
        return [self._change([row], state=State(p.state), attempts=row.attempts + 1) for row in self._of(p.numbers)]

    def _outbox_lock_of(self, p: Any) -> list[tuple[int, bool]]:
        lanes = {row.lane for row in self._of(p.numbers)} | {self._tables.pages[n]["lane"] for n in p.pages if n in self._tables.pages}
        if any(self._tables.locks.get(lane, self) is not self for lane in lanes):
            raise Held
        self._tables.locks |= dict.fromkeys(lanes, self)
        return [(lane, False) for lane in sorted(lanes)]

    def _outbox_own_pages(self, p: Any) -> list[tuple[int]]:
        return [(n,) for n in p.pages if n in self._tables.pages and not self._tables.pages[n]["sent"]]

    def _outbox_retry(self, p: Any) -> list[tuple[int]]:
        return self._change(self._of(p.numbers, State.DEAD), state=State.WAITING, attempts=0)

    def _outbox_discard(self, p: Any) -> list[tuple[int]]:
        return self._change(self._of(p.numbers, State.WAITING, *STOPPED), state=State.DISCARDED)

    def _outbox_release(self, p: Any) -> list[tuple[int]]:
        dead = self._first_dead(p.lanes)
        free = [row for row in self._rows(p.lanes, State.BEHIND) if row.number <= dead.get(row.key, row.number)]
        return self._change(free, state=State.WAITING)

    # ------------------------------------------------------------------ flights
    def _outbox_flight(self, _: Any) -> list[tuple[int]]:
        return [(self._tables.flight["last"],)]

    def _flying(self, flight: int | None = None) -> list[Row]:
        rows = [row for row in self._tables.rows.values() if row.state == State.FLYING and flight in (None, row.flight)]
        return sorted(rows, key=lambda row: row.number)

    def _outbox_flying(self, _: Any) -> list[tuple[Any, ...]]:
        return [row.taken for row in self._flying()]

    def _outbox_flying_number(self, _: Any) -> list[tuple[Any, ...]]:
        return [(row.flight,) for row in self._flying()][:1]

    def _outbox_fly(self, p: Any) -> list[tuple[int]]:
        self._put(self._tables.flight, "last", p.flight)
        return self._change(self._of(_places(p)), state=State.FLYING, flight=p.flight)

    def _outbox_land(self, p: Any) -> list[tuple[int]]:
        return self._change(self._flying(p.flight), state=State.SENT)

    def _outbox_ground(self, p: Any) -> list[tuple[int]]:
        return self._change(self._flying(p.flight), state=State.WAITING, flight=None)


def _set(where: dict[Any, Any], key: Any, value: Any) -> None:
    where.pop(key, None)
    if value is not None:
        where[key] = value


def _places(p: Any) -> list[int]:
    return [int(number) for number in re.findall(r"p(\d+)", p.places)]
