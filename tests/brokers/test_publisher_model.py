"""The publish protocol as a model: any order of calls, deaths at any step, lost answers, restored state and takeovers, judged from outside.

The code that runs is the real one, on a real PostgreSQL; only the broker is in this process. What must be true is computed from what
the caller was told, never from the publisher's own tables.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from checkpoint.errors import DedupError, KeyConflict
from dedup import PostgresStore
from dedup.publishing import OutgoingEvent, Publisher
from kit.publish_kit import Broker, BrokerSender, copied, restored, waiting

pytestmark = pytest.mark.postgres

KEYS, GROUPS, IDS = 3, ("east", "west"), 12


class Died(BaseException):
    """The process is gone."""


class World:
    """Publishers that come and go, one hub, and what callers know."""

    def __init__(self, dsn: str, seed: int) -> None:
        self.may_restore = seed % 2 == 1
        self.dsn, self.dice, self.broker = dsn, random.Random(seed), Broker(most=2)
        self.hub = self.broker.new(2)
        self.open: dict[str, Publisher] = {}
        self.told: dict[str, str] = {}  # body -> key, of events without an id that a call returned for
        self.maybe: set[str] = set()  # bodies without an id of calls that ended otherwise
        self.ids: dict[str, set[str]] = {}  # id -> bodies that were tried
        self.returned: dict[str, str] = {}  # id -> body of a call that returned
        self.copy: Any = None
        self.was_restored, self.made, self.left = False, 0, -1

    def on_step(self, name: str) -> None:
        """Die where it was decided."""
        self.left -= 1
        if self.left == 0:
            raise Died

    def publisher(self, group: str) -> Publisher:
        """The living one of the group, or a new one - which also happens while an older one lives."""
        if group not in self.open or self.dice.random() < 0.1:
            to, store = BrokerSender(self.broker, self.hub), PostgresStore(self.dsn)
            self.open[group] = Publisher(group, store, to, max_events=4, max_outage=0.0, on_step=self.on_step)
        return self.open[group]

    def step(self) -> None:
        """Something happens."""
        kind, group = self.dice.random(), self.dice.choice(GROUPS)
        if kind < 0.06 and self.copy is not None and self.may_restore:
            restored(self.dsn, self.copy)
            self.was_restored = True
        elif kind < 0.12 and self.open:
            self.copy = copied(self.dsn)
        elif kind < 0.3:
            self.broker.order(
                self.dice.choice(["lose_answers", "drop_sends"]), count=self.dice.randint(1, 3), after=self.dice.randint(0, 3)
            )
        else:
            self.left = self.dice.randint(1, 25) if self.dice.random() < 0.3 else -1
            self.call(group)

    def call(self, group: str) -> None:
        """Publish some events, with ids or without."""
        events = [self.event() for _ in range(self.dice.randint(1, 9))]
        chosen = [(event.id, event.body.decode()) for event in events if event.id]
        for id, body in chosen:
            self.ids.setdefault(id, set()).add(body)
        free = {event.body.decode(): event.key or "" for event in events if not event.id}
        try:
            self.publisher(group).publish(events)
        except Died:
            self.open.pop(group)
            self.maybe |= free.keys()
        except (DedupError, KeyConflict):
            if self.dice.random() < 0.5:
                self.open.pop(group)
            self.maybe |= free.keys()
        else:
            self.told |= free
            for id, body in chosen:
                assert self.was_restored or self.returned.setdefault(id, body) == body, "a second body was accepted"

    def event(self) -> OutgoingEvent:
        """A tenth of the ids come with another body."""
        self.made += 1
        key = f"k{self.dice.randrange(KEYS)}"
        if self.dice.random() < 0.5:
            return OutgoingEvent(f"free-{self.made}".encode(), key=key)
        id = f"id-{self.dice.randrange(IDS)}"
        return OutgoingEvent(f"{id}{'-other' if self.dice.random() < 0.1 else ''}".encode(), key=id, id=id)

    def settle(self) -> None:
        """No more faults: whoever comes next sends what is left."""
        self.left = -1
        self.broker.order("calm")
        for group in GROUPS:
            with Publisher(group, PostgresStore(self.dsn), BrokerSender(self.broker, self.hub), max_outage=5.0):
                pass

    def close(self) -> None:
        """Let go of connections."""
        for publisher in self.open.values():
            publisher.close()

    def check(self) -> None:
        """At a consumer with the default key: the first event of each message id, and a conflict for another body."""
        assert waiting(self.dsn) == 0
        firsts = [dict(reversed([(e.message_id, e) for e in reversed(log)])) for log in self.broker.logs[self.hub]]
        bodies: dict[str, list[str]] = {}
        for first in firsts:
            for event in first.values():
                bodies.setdefault(event.body.decode(), []).append(event.message_id)
        free = {body: ids for body, ids in bodies.items() if body.startswith("free")}
        assert all(len(ids) == 1 for ids in free.values()), "an event is there twice"
        assert self.told.keys() <= free.keys(), "an event is lost"
        assert free.keys() <= self.told.keys() | self.maybe
        for id, body in self.returned.items():
            assert body in bodies or self.was_restored, f"{id} is lost"
        self._check_ids(firsts)
        self._check_numbers()
        self._check_order(firsts)

    def _check_ids(self, firsts: list[Any]) -> None:
        every = [(e.message_id, e.body.decode()) for log in self.broker.logs[self.hub] for e in log if e.message_id.startswith("id-")]
        for id, tried in self.ids.items():
            found = {body for message_id, body in every if message_id == id}
            assert found <= tried and (len(found) <= 1 or self.was_restored), f"{id} has two bodies"
        assert not firsts[0].keys() & firsts[1].keys(), "an event is in two partitions"

    def _check_numbers(self) -> None:
        """Whatever was stored is there: no number of a group is missing in a partition."""
        for log in self.broker.logs[self.hub] if not self.may_restore else ():
            for group in GROUPS:
                numbers = {e.sequence for e in log if e.named["dedup_group"] == group}
                assert numbers == set(range(1, len(numbers) + 1)), "what was stored is lost"

    def _check_order(self, firsts: list[Any]) -> None:
        for first in firsts:
            for key in range(KEYS):
                mine = [e for e in first.values() if e.key == f"k{key}" and e.body.startswith(b"free")]
                for group in GROUPS:
                    numbers = [int(e.body[5:]) for e in mine if e.named["dedup_group"] == group]
                    assert numbers == sorted(numbers), "the order of a key is not kept"


@pytest.mark.parametrize("seeds", [range(0, 4), pytest.param(range(4, 24), marks=pytest.mark.full)], ids=str)
def test_whatever_happens_each_event_is_once_at_the_consumer(postgres: str, seeds: range) -> None:
    """What a call returned for is there, nothing is there twice, ids have one body, the order of a key is kept - from any mix of faults."""
    PostgresStore(postgres).migrate()
    empty = copied(postgres)
    for seed in seeds:
        restored(postgres, empty)
        world = World(postgres, seed)
        world.publisher("east").publish([OutgoingEvent(b"free-0", key="k0")])
        world.told["free-0"] = "k0"
        for _ in range(40):
            world.step()
        world.settle()
        try:
            world.check()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        finally:
            world.close()
