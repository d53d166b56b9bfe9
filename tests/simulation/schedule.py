"""A schedule: the log, what is done to whom and when, and how the consumer is set up. A value, made from one number."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from simulation.log import KEYS, Event, make_log

TICKS = 50
"""Turns within which something is done to somebody; then there is peace until the log is done."""

DEEDS = {
    "switch": "another instance goes on",
    "start": "one more instance starts",
    "crash": "the instance dies",
    "fail": "the call to the store fails, or only its answer is lost",
    "sleep": "the instance is stopped for a while: a zombie, if another one takes over",
    "person": "a person reprocesses letters, or gives some up",
    "reset": "the Spark checkpoint is thrown away; a new query begins at the earliest position, or at our checkpoint",
    "restore": "the tables are taken back to an older state",
    "copy": "the state is copied back to an older time, and the sink is not; where both are in one database, all of it is restored",
    "sink": "the sink is copied back, and the state is not; nothing, where both are in one database",
    "clock": "the clock jumps, by a day or by ten, backwards or forwards; forwards, whoever tries again loses its patience",
}
"""What can be done, in words."""

_WEIGHTS = {"switch": 6, "start": 3, "crash": 4, "fail": 3, "sleep": 3, "person": 2}
_WEIGHTS |= dict.fromkeys(("reset", "restore", "copy", "sink", "clock"), 1)

BACK = ("restore", "copy", "sink")
"""Deeds that need what was there before."""


class Move(NamedTuple):
    """One deed."""

    tick: int
    deed: str  # of DEEDS
    number: int  # which instance, for how long, how far: whatever the deed needs to know

    def __str__(self) -> str:
        return f"turn {self.tick}: {DEEDS[self.deed]} ({self.deed} {self.number})"


@dataclass(frozen=True)
class Schedule:
    """Everything that a run depends on."""

    seed: int  # also decides what handlers answer, and how large batches are
    ledger: bool
    runners: bool  # processes that share an epoch, beside queries
    events: tuple[Event, ...]
    moves: tuple[Move, ...]
    bad: frozenset[int]  # the handler of the stream raises for these keys
    chunk: int = 1000  # max_events_per_transaction
    bisect: bool = True
    patient: bool = True  # the consumer tries again while the store is away; else its process ends
    shuffled: bool = False  # batches come in any order, some rows twice

    @classmethod
    def of(cls, seed: int) -> Schedule:
        """The schedule of a number."""
        dice = random.Random(seed)
        events = make_log(dice)
        bad = frozenset(key for key in range(KEYS) if dice.random() < 0.1)
        settings = {"chunk": dice.choice((2, 3, 1000)), "bisect": dice.random() < 0.7, "patient": dice.random() < 0.5}
        settings["chunk"] = settings["chunk"] if settings["bisect"] else 1000  # a handler that needs whole batches gets them
        shuffled, runners = dice.random() < 0.3, seed // 2 % 5 == 4
        if runners:  # they go on at the checkpoint, so that nothing below it can come late
            events = tuple(e._replace(held=False) for e in events)
        return cls(seed, bool(seed % 2), runners, events, _moves(dice), bad, **settings, shuffled=shuffled)

    @property
    def size(self) -> tuple[int, int]:
        """To compare schedules by."""
        return len(self.events), len(self.moves)

    def smaller(self) -> Iterator[Schedule]:
        """The same with less in it: halves and quarters left out first, then single things, then plainer settings."""
        for name in ("moves", "events"):
            every = getattr(self, name)
            for size in sorted({max(1, len(every) // part) for part in (2, 4, 8, len(every) or 1)}, reverse=True):
                for at in range(0, len(every), size):
                    if name == "moves" or len(every) > size:
                        yield replace(self, **{name: every[:at] + every[at + size :]})
        plain = {"bad": frozenset[int](), "chunk": 1000, "bisect": True, "patient": True, "shuffled": False, "runners": False}
        for name, value in plain.items():
            if getattr(self, name) != value:
                yield replace(self, **{name: value})

    def __str__(self) -> str:
        kind = "processes that share an epoch" if self.runners else "queries"
        said = [f"{kind}, {'ledger' if self.ledger else 'transactional'} store, {len(self.events)} events, {len(self.moves)} moves"]
        said += [f"  at most {self.chunk} events a transaction" * (self.chunk < 1000), "  bisect=False" * (not self.bisect)]
        said += ["  max_outage=0" * (not self.patient), "  batches come shuffled" * self.shuffled]
        said += [f"  the handler fails for the keys {sorted(self.bad)}" * bool(self.bad)]
        return "\n".join([line for line in said if line] + [f"  event {e}" for e in self.events] + [f"  {m}" for m in self.moves])


def _moves(dice: random.Random) -> tuple[Move, ...]:
    count = dice.choice((1, 2, 3, 4, 6, 9))
    deeds = dice.choices(list(_WEIGHTS), list(_WEIGHTS.values()), k=count)
    ticks = sorted(dice.randrange(TICKS) for _ in deeds)
    return tuple(Move(tick, deed, dice.randrange(60)) for tick, deed in zip(ticks, deeds, strict=True))
