"""The dispatch protocols over thousands of seeded schedules: the shipped code, on tables and a broker made of lists.

Between any two steps of a dispatcher another one runs, a batch commits, a person decides, the process dies, or an answer is lost. Some
schedules are played on PostgreSQL's own tables.
"""

from __future__ import annotations

import random
import uuid
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest
from psycopg.conninfo import make_conninfo

from checkpoint.errors import DestinationUnavailable, Fenced, StoreError
from checkpoint.holders import take_epoch
from deadletter.store import Commit
from dedup.core.messages import MESSAGES, Failed, Marks, Messages, lanes
from dedup.outbox import Dispatcher, ExactlyOnce, Message, Outcome, SendFailure, State
from dedup.outbox.exactly_once import Flight
from dedup.postgres import PostgresStore
from dedup.postgres.outbox import PgOutbox, PgTurn
from kit.outbox_tables import Held, Session, Sql, Tables

KEYS, LANES = 5, 3
"""Fewer lanes than keys: some keys share one."""


class Died(Exception):
    """The process is gone."""


class World:
    """What is durable, and the dice."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.tables: Any = Tables(self.lost)
        self.published: list[tuple[bytes | None, str]] = []  # key and id, in order
        self.arrived: list[Message] = []
        self.poison: set[str] = set()
        self.epoch, self.committed = 0, ""  # the token of the last flight
        self.depth, self.quiet = 0, False

    def outbox(self) -> PgOutbox:
        """The shipped one."""
        return PgOutbox("c", Sql(), self.tables.connect)  # type: ignore[arg-type]

    def publish(self) -> None:
        """A batch commits."""
        fresh = list[tuple[bytes | None, str, int]]()
        for number in range(self.dice.randrange(1, 9)):
            key = b"%d" % self.dice.randrange(KEYS) if self.dice.random() < 0.95 else None
            lane = number % LANES if key is None else zlib.crc32(key) % LANES
            fresh.append((key, f"id-{len(self.published)}", lane))
            self.published.append(fresh[-1][:2])
            if self.dice.random() < 0.05:
                self.poison.add(fresh[-1][1])
        self.tables.store(fresh)

    def decide(self) -> None:
        """A person repairs, retries or gives up a dead message, or gives up one that waits."""
        states = {id: (n, s) for id, (n, s) in self.tables.states().items() if s in (State.DEAD, State.WAITING)}
        dead = sorted(id for id, (_, s) in states.items() if s == State.DEAD)
        chosen = dead or sorted(states)
        if chosen and (dead or (not self.quiet and self.dice.random() < 0.2)):
            id = self.dice.choice(chosen)
            give_up = not dead or self.dice.random() < 0.5
            if not give_up:
                self.poison.discard(id)
            with suppress(Held, Died, StoreError):
                (self.outbox().discard if give_up else self.outbox().retry)([states[id][0]])

    def restore(self) -> None:
        """The database is an older copy that has counted fewer flights; none of them is in the air."""
        if State.FLYING not in {state for _, state in self.tables.states().values()}:
            self.tables.recount(self.dice.randrange(3))

    def lost(self, done: bool) -> None:
        """At a commit: dead before or after it."""
        if not self.quiet and self.dice.random() < 0.03:
            raise Died

    def happens(self, actor: Callable[[World], Any]) -> None:
        """Something between two steps."""
        if self.quiet:
            return
        chance = self.dice.random()
        if chance < 0.12:
            raise Died
        if chance < 0.3:
            self.publish()
        elif chance < 0.35:
            self.decide()
        elif chance < 0.6 and self.depth < 2:
            self.depth += 1
            try:
                live(self, actor)
            finally:
                self.depth -= 1


def live(world: World, actor: Callable[[World], Any]) -> None:
    """One process: it does its work, or dies of what happens."""
    with suppress(Died, DestinationUnavailable, Fenced):
        actor(world).once()


class SimDestination:
    """Takes messages one after another; of those before a death or a lost answer it has some."""

    def __init__(self, world: World) -> None:
        self._world = world

    def send(self, messages: Sequence[Message]) -> Outcome:
        world, outcome, stopped = self._world, Outcome(), set[bytes | None]()
        for place, message in enumerate(messages):
            if not world.quiet and world.dice.random() < 0.03:
                raise world.dice.choice([Died, DestinationUnavailable])()
            if message.key in stopped:
                outcome.unsent.add(place)
            elif message.id in world.poison:
                outcome.failed[place] = SendFailure("Refused", "no", permanent=world.dice.random() < 0.5)
                stopped |= {message.key} - {None}
            else:
                world.arrived.append(message)
        return outcome

    def close(self) -> None: ...


class SimTransactions:
    """A broker with one producer name: who connects fences the one before."""

    def __init__(self, world: World, *, asks: bool = True) -> None:
        self._world, self._mine, self._asks = world, 0, asks

    def connect(self, *, anew: bool = False) -> None:
        if anew or not self._mine:
            self._world.epoch += 1
            self._mine = self._world.epoch

    def has(self, flight: Flight) -> bool:
        return self._asks and self._world.committed == flight.token

    def send(self, flight: Flight) -> Outcome:
        world = self._world
        refused = {p: SendFailure("Refused", "no", permanent=True) for p, m in enumerate(flight.messages) if m.id in world.poison}
        if not world.quiet and world.dice.random() < 0.05:  # the topic is not there: a client tells this also where it is fenced
            self._mine = 0
            return Outcome({place: SendFailure("Missing", "no", permanent=False) for place in range(len(flight.messages))})
        if self._mine != world.epoch:
            raise Fenced
        if refused:
            self._mine = 0
            return Outcome(refused)
        lost = not world.quiet and world.dice.random() < 0.15
        if lost and world.dice.random() < 0.5:
            self._mine = 0
            raise DestinationUnavailable
        world.arrived += flight.messages
        world.committed = flight.token
        if lost:
            self._mine = 0
            raise DestinationUnavailable
        return Outcome()


def plain(world: World) -> Dispatcher:
    limit = world.dice.randrange(1, 12)
    return Dispatcher(world.outbox(), SimDestination(world), limit=limit, workers=1, on_step=lambda _: world.happens(plain))


def exact(world: World, **broken: bool) -> ExactlyOnce:
    limit = world.dice.randrange(1, 12)

    def step(_name: str) -> None:
        world.happens(lambda w: exact(w, **broken))

    return ExactlyOnce(world.outbox(), SimTransactions(world, **broken), limit=limit, on_step=step)


def run(world: World, actor: Callable[[World], Any]) -> World:
    """A schedule, and then a quiet end in which everything that can be sent is."""
    world.publish()
    for _ in range(12):
        world.dice.choice([world.publish, world.decide, world.restore, *[lambda: live(world, actor)] * 3])()
    world.quiet = True
    world.poison.clear()
    for _ in range(500):
        actor(world).once()
        left = {state for _, state in world.tables.states().values()} - {State.SENT, State.DISCARDED}
        if not left:
            return world
        if State.DEAD in left:
            world.decide()
    raise AssertionError(f"it comes to no end: {left}")


def lost_of(world: World) -> set[str]:
    """What nobody has given up and has not arrived."""
    return {id for id, (_, state) in world.tables.states().items() if state != State.DISCARDED} - {m.id for m in world.arrived}


def reordered(world: World) -> bool:
    """Whether of some key a message has arrived for the first time before an earlier one."""
    first = list(dict.fromkeys((m.key, m.id) for m in world.arrived))
    place = {id: number for number, (_, id) in enumerate(world.published)}
    for key in {key for key, _ in world.published} - {None}:
        mine = [place[id] for k, id in first if k == key]
        if mine != sorted(mine):
            return True
    return False


def check(world: World, *, once: bool) -> None:
    """All that is not given up has arrived, with its own number and key; first arrivals of a key are in order."""
    states = world.tables.states()
    assert set(states) == {id for _, id in world.published}
    assert not lost_of(world) and not reordered(world)
    assert {(m.id, m.number, m.key) for m in world.arrived} <= {(id, states[id][0], key) for key, id in world.published}
    if once:
        assert len({m.id for m in world.arrived}) == len(world.arrived)


@pytest.fixture(autouse=True)
def few_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer lanes than keys, of which a turn has at most two."""
    for name, value in (("outbox.LANES", LANES), ("outbox.LANES_PER_TURN", 2), ("outbox.PER_PAGE", 3)):
        monkeypatch.setattr(f"dedup.postgres.{name}", value)
    monkeypatch.setattr("dedup.core.messages.LANES", LANES)


BOTH = pytest.mark.parametrize(("actor", "once"), [(plain, False), (exact, True)], ids=["plain", "exactly-once"])


@BOTH
@pytest.mark.parametrize("schedules", [range(200), pytest.param(range(200, 2000), marks=pytest.mark.full)], ids=["first", "others"])
def test_no_schedule_loses_reorders_or_renames(actor: Callable[[World], Any], once: bool, schedules: range) -> None:
    """Deaths, lost answers, other dispatchers, people and batches between any two steps: at least once and in order; or exactly once."""
    for seed in schedules:
        check(run(World(seed), actor), once=once)


class RealTables:
    """PostgreSQL's own, seen as the model sees them."""

    def __init__(self, dsn: str) -> None:
        self.name = uuid.uuid4().hex
        self.postgres = PostgresStore(make_conninfo(dsn, options="-c lock_timeout=50ms"))  # a person in this process waits for nobody
        self.postgres.migrate()
        self._epoch = take_epoch(self.postgres, self.name, "run", 1.0, force=True).epoch
        self._back = (
            "update dedup.outbox_flight set flight = greatest(0, flight - %s)"
            " where consumer_id = (select id from dedup.consumer where name = %s)"
        )
        self._sql = "select id, number, state from dedup.outbox_message where consumer_id = (select id from dedup.consumer where name = %s)"

    def store(self, messages: Sequence[tuple[bytes | None, str, int]]) -> None:
        keys, ids = pa.array([key for key, _, _ in messages], pa.binary()), [id for _, id, _ in messages]
        nothing = pa.nulls(len(ids), MESSAGES.field("headers").type)
        rows = pa.table([pa.array(ids), keys, pa.array([b""] * len(ids)), nothing, lanes("t", keys)], schema=MESSAGES)
        with self.postgres.begin(self.name, self._epoch) as transaction:
            transaction.enqueue(Messages("t", rows, derived=False))
            transaction.execute(Commit())

    def recount(self, fewer: int) -> None:
        with self.postgres.outbox(self.name)._connect("restoring") as connection:
            connection.execute(self._back, [fewer, self.name])

    def states(self) -> dict[str, tuple[int, State]]:
        with self.postgres.outbox(self.name)._connect("looking") as connection:
            return {id: (number, State(state)) for id, number, state in connection.execute(self._sql, [self.name])}


class RealWorld(World):
    """The same dice over PostgreSQL's own tables."""

    def __init__(self, seed: int, dsn: str) -> None:
        super().__init__(seed)
        self.tables = RealTables(dsn)

    def outbox(self) -> PgOutbox:
        outbox: PgOutbox = self.tables.postgres.outbox(self.tables.name)
        return outbox


@pytest.mark.full
@BOTH
@pytest.mark.parametrize("schedules", [range(4), pytest.param(range(4, 40), marks=pytest.mark.full)], ids=["first", "others"])
def test_no_schedule_does_on_real_tables(postgres: str, actor: Callable[[World], Any], once: bool, schedules: range) -> None:
    """The SQL means what the model takes it to mean."""
    for seed in schedules:
        world = RealWorld(seed, postgres)
        check(run(world, actor), once=once)
        world.tables.postgres.close()


def seen(count: int, actor: Callable[[World], Any], wrong: Callable[[World], object]) -> bool:
    """Whether in one of so many schedules it goes wrong; one that stops with an error, or comes to no end, counts as well."""
    for seed in range(count):
        try:
            if wrong(run(World(seed), actor)):
                return True
        except (StoreError, AssertionError):
            return True
    return False


def test_the_model_sees_a_dispatcher_that_does_not_ask_the_broker() -> None:
    """Without reading the flight's number back, some schedule doubles: the model can tell right from wrong."""
    assert seen(300, lambda w: exact(w, asks=False), lambda w: len(w.arrived) > len({m.id for m in w.arrived}))


def test_the_model_sees_a_flight_that_is_taken_for_an_older_one_of_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """A database that was restored counts flights anew: were they told by their numbers alone, some schedule would lose."""
    monkeypatch.setattr(Flight, "token", property(lambda self: str(self.number)))
    assert seen(1_000, exact, lost_of)


def test_the_model_sees_a_flight_that_is_taken_back_while_another_sends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """One misses a topic, another one commits the same flight: were it taken back nevertheless, some schedule would double."""
    ground = PgOutbox.ground

    def careless(self: PgOutbox, flight: Flight, dead: Failed | None) -> None:
        with self._transaction("looking") as connection:
            count = self._all(connection, "outbox_flight")[0][0]
            connection.execute("commit")
        ground(self, replace(flight, count=count), dead)

    monkeypatch.setattr(PgOutbox, "ground", careless)
    assert seen(300, exact, lambda w: len(w.arrived) > len({m.id for m in w.arrived}))


def test_the_model_sees_marks_that_come_before_the_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """Marked first and sent afterwards, some schedule loses."""

    class MarkedFirst(PgTurn):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            self.mark(Marks(sent=[m.number for m in self.messages]))
            self.mark = lambda marks: None  # type: ignore[method-assign]

    monkeypatch.setattr("dedup.postgres.outbox.PgTurn", MarkedFirst)
    assert seen(300, plain, lost_of)


def test_the_model_sees_a_page_that_is_marked_although_one_of_its_messages_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole pages are marked only where all of their messages were sent; otherwise some schedule loses."""

    def careless(self: PgTurn, marks: Marks) -> None:
        self._mark_places([self._places[number] for number in marks.sent if number in self._places])
        self._mark_pages([page for page, numbers in self._pages.items() if not set(marks.sent).isdisjoint(numbers)])

    monkeypatch.setattr(PgTurn, "_mark_some", careless)
    assert seen(300, plain, lost_of)


@pytest.mark.full
def test_the_model_sees_rows_that_overtake_a_page_of_their_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was unpacked waits for earlier pages of its lane; otherwise some schedule reorders."""
    take = Session._outbox_take

    def hasty(self: Session, p: Any) -> list[Any]:
        pages, self._tables.pages = self._tables.pages, {}
        try:
            return take(self, p)
        finally:
            self._tables.pages = pages

    monkeypatch.setattr(Session, "_outbox_take", hasty)
    assert seen(1_000, plain, reordered)


def test_the_model_sees_pages_that_are_sent_beside_rows_of_their_lane(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lane in which messages wait as rows gives no whole pages; otherwise some schedule reorders."""
    monkeypatch.setattr(Session, "_outbox_odd_lanes", lambda self, p: [])
    assert seen(300, plain, reordered)
