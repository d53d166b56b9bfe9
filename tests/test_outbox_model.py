"""The dispatch protocols over thousands of seeded schedules: the shipped code, with a store and a broker made of lists.

Between any two steps of a dispatcher another one runs, a batch commits, a person decides, the process dies, or an answer is lost.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from checkpoint.errors import DestinationUnavailable, Fenced
from dedup.outbox import Dispatcher, ExactlyOnce, Failure, Message, Outcome
from dedup.outbox.exactly_once import Flight
from dedup.outbox.message import State
from dedup.outbox.store import Asked, Failed, Marks

KEYS, SCHEDULES = 4, 1_500


class Died(Exception):
    """The process is gone."""


class World:
    """What is durable, and the dice."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.rows: list[Message] = []
        self.state: dict[int, State] = {}
        self.attempts: Counter[int] = Counter()
        self.locked: set[bytes | None] = set()
        self.arrived: list[Message] = []
        self.poison: set[int] = set()
        self.flown: dict[int, int] = {}  # message -> the flight that it was in last
        self.flight, self.epoch, self.committed = 0, 0, 0
        self.depth, self.quiet = 0, False

    def publish(self) -> None:
        """A batch commits."""
        for _ in range(self.dice.randrange(1, 5)):
            number = len(self.rows)
            self.rows.append(Message(number, "t", b"%d" % self.dice.randrange(KEYS), f"id-{number}", b""))
            self.state[number] = State.WAITING
            if self.dice.random() < 0.05:
                self.poison.add(number)

    def decide(self) -> None:
        """A person repairs, retries or gives up a dead message."""
        dead = [n for n, s in self.state.items() if s == State.DEAD]
        if dead:
            number = self.dice.choice(dead)
            give_up = self.dice.random() < 0.5
            if not give_up:
                self.poison.discard(number)
            self.state[number] = State.DISCARDED if give_up else State.WAITING

    def waiting(self, limit: int, among: set[bytes | None]) -> list[Message]:
        dead = {m.key for m in self.rows if self.state[m.number] == State.DEAD}
        found = [m for m in self.rows if self.state[m.number] == State.WAITING and m.key in among and m.key not in dead]
        return [m._replace(attempts=self.attempts[m.number]) for m in found[:limit]]

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


class SimTurn:
    def __init__(self, world: World, messages: Sequence[Message]) -> None:
        self.messages, self._world = messages, world

    def mark(self, marks: Marks) -> None:
        world = self._world
        lost = not world.quiet and world.dice.random() < 0.1
        if lost and world.dice.random() < 0.5:
            raise Died  # before the server has it
        for number in marks.sent:
            world.state[number] = State.SENT
        for failed in marks.dead:
            world.state[failed.number] = State.DEAD
        world.attempts.update(f.number for f in (*marks.dead, *marks.tried))
        if lost:
            raise Died  # after it


class SimOutbox:
    """Locks keys; a turn that is left without marks has changed nothing."""

    parallel = False

    def __init__(self, world: World) -> None:
        self._world = world

    @contextmanager
    def turn(self, asked: Asked) -> Iterator[SimTurn]:
        world = self._world
        free = sorted({m.key or b"" for m in world.rows} - {k or b"" for k in world.locked})
        mine: set[bytes | None] = set(world.dice.sample(free, min(len(free), 2 if not world.quiet else KEYS)))
        world.locked |= mine
        try:
            yield SimTurn(world, world.waiting(asked.limit, mine))
        finally:
            world.locked -= mine

    def fly(self, asked: Asked) -> Flight | None:
        world = self._world
        flying = [m for m in world.rows if world.state[m.number] == State.FLYING]
        if flying:
            return Flight(world.flight, flying, fresh=False)
        taken = world.waiting(asked.limit, {m.key for m in world.rows})
        if not taken:
            return None
        world.flight += 1
        for message in taken:
            world.state[message.number], world.flown[message.number] = State.FLYING, world.flight
        return Flight(world.flight, taken, fresh=True)

    def land(self, flight: Flight) -> None:
        for number in self._of(flight):
            self._world.state[number] = State.SENT

    def ground(self, flight: Flight, dead: Failed | None) -> None:
        for number in self._of(flight):
            self._world.state[number] = State.DEAD if dead and dead.number == number else State.WAITING

    def _of(self, flight: Flight) -> list[int]:
        """Its messages, as long as nobody has settled it."""
        world = self._world
        return [n for n, s in world.state.items() if s == State.FLYING and world.flown[n] == flight.number]


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
            elif message.number in world.poison:
                outcome.failed[place] = Failure("Refused", "no", permanent=world.dice.random() < 0.5)
                stopped.add(message.key)
            else:
                world.arrived.append(message)
        return outcome

    def close(self) -> None: ...


class SimTransactions:
    """A broker with one producer name: who connects fences the one before."""

    def __init__(self, world: World, *, asks: bool = True) -> None:
        self._world, self._mine, self._asks = world, 0, asks

    def connect(self) -> None:
        if not self._mine:
            self._world.epoch += 1
            self._mine = self._world.epoch

    def has(self, flight: Flight) -> bool:
        return self._asks and self._world.committed >= flight.number

    def send(self, flight: Flight) -> Outcome:
        world = self._world
        refused = {p: Failure("Refused", "no", permanent=True) for p, m in enumerate(flight.messages) if m.number in world.poison}
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
        world.committed = flight.number
        if lost:
            self._mine = 0
            raise DestinationUnavailable
        return Outcome()


def plain(world: World) -> Dispatcher:
    return Dispatcher(SimOutbox(world), SimDestination(world), limit=world.dice.randrange(1, 8), on_step=lambda _: world.happens(plain))  # type: ignore[arg-type]


def exact(world: World, **broken: bool) -> ExactlyOnce:
    limit = world.dice.randrange(1, 8)

    def step(_name: str) -> None:
        world.happens(lambda w: exact(w, **broken))

    return ExactlyOnce(SimOutbox(world), SimTransactions(world, **broken), limit=limit, on_step=step)  # type: ignore[arg-type]


def run(seed: int, actor: Callable[[World], Any]) -> World:
    """A schedule, and then a quiet end in which everything that can be sent is."""
    world = World(seed)
    world.publish()
    for _ in range(12):
        world.dice.choice([world.publish, world.decide, lambda: live(world, actor), lambda: live(world, actor)])()
    world.quiet = True
    world.poison.clear()
    while State.DEAD in world.state.values():
        world.decide()
    for _ in range(50):
        actor(world).once()
    return world


def check(world: World, *, once: bool) -> None:
    """All that is not given up has arrived, with one id; first arrivals of a key are in order; nothing that was given up came late."""
    given_up = {n for n, s in world.state.items() if s == State.DISCARDED}
    first = list(dict.fromkeys(m.number for m in world.arrived))
    assert set(first) >= {m.number for m in world.rows} - given_up
    assert set(world.state.values()) <= {State.SENT, State.DISCARDED}
    by_number = {m.number: m for m in world.rows}
    for key in {m.key for m in world.rows}:
        mine = [n for n in first if by_number[n].key == key]
        assert mine == sorted(mine)
    if once:
        assert len(first) == len(world.arrived)


@pytest.mark.parametrize(("actor", "once"), [(plain, False), (exact, True)], ids=["plain", "exactly-once"])
def test_no_schedule_loses_reorders_or_renames(actor: Callable[[World], Any], once: bool) -> None:
    """Deaths, lost answers, other dispatchers, people and batches between any two steps: at least once and in order; or exactly once."""
    for seed in range(SCHEDULES):
        check(run(seed, actor), once=once)


def test_the_model_sees_a_dispatcher_that_does_not_ask_the_broker() -> None:
    """Without reading the flight's number back, some schedule doubles: the model can tell right from wrong."""
    broken = 0
    for seed in range(300):
        world = run(seed, lambda w: exact(w, asks=False))
        broken += len(world.arrived) > len({m.number for m in world.arrived})
    assert broken


def test_the_model_sees_marks_that_come_before_the_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """Marked first and sent afterwards, some schedule loses: the model can tell right from wrong."""

    def marked_first(self: SimDestination, messages: Sequence[Message]) -> Outcome:
        for message in messages:
            self._world.state[message.number] = State.SENT
        return send(self, messages)

    send = SimDestination.send
    monkeypatch.setattr(SimDestination, "send", marked_first)
    lost = 0
    for seed in range(300):
        world = run(seed, plain)
        given_up = {n for n, s in world.state.items() if s == State.DISCARDED}
        lost += bool({m.number for m in world.rows} - given_up - {m.number for m in world.arrived})
    assert lost
