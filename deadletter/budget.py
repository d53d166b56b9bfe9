"""How many failures to park before something else must be wrong: a budget for each kind of dead letter, and what is used of it.

Pure values without state: what they judge is given to them. Called by the flow, which keeps what is used in the head of the store.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from fractions import Fraction
from typing import Any

import numpy as np

from checkpoint import given
from deadletter.letter import Kind

LONGEST_WINDOW = 10_000
"""Events. What is used is written with every batch, and holds up to this many numbers for each kind."""

Shares = tuple[tuple[int, float], ...]
"""(N, share): at most that share of any N consecutive events may fail. Empty: all may."""

DEFAULT: Shares = ((100, 0.5), (1000, 0.1))
"""50 of any 100 events in a row may fail, and 100 of any 1,000."""


def _are_limits(value: object) -> bool:
    return isinstance(value, list | tuple) and all(
        isinstance(limit, tuple | list) and len(limit) == 2 and _is_limit(*limit) for limit in value
    )


def _is_limit(window: object, share: object) -> bool:
    window_fits = given.whole("", "", least=1, most=LONGEST_WINDOW).fits(window)
    return window_fits and given.number("", "").fits(share) and share <= 1  # type: ignore[operator]


SHARES = given.Setting(f"pairs of 1 to {LONGEST_WINDOW:,} events and a share from 0 to 1", "((100, 0.5), (1000, 0.1))", _are_limits)
"""What a limit is."""


@dataclass(frozen=True)
class Limits:
    """How many of the last events may fail in one way.

    Every event that comes to where it may fail gets the next value of a clock, from 1. Of any N of them in a row at most that share may
    fail. Only full windows are judged, over the history that is stored and not over one batch. So below N events everything is admitted,
    and a quiet topic goes on behind its single poison event: that is one of N, however few there are in its batch.

    Raises:
        ConfigError: a limit is out of range; correct it.
    """

    shares: Shares = DEFAULT

    def __post_init__(self) -> None:
        given.check({"shares": SHARES}, vars(self), "Limits")

    def excess(self, decided: int, failures: Sequence[int], chunk: range, lifted: int) -> tuple[int, int, int] | None:
        """The first window over its limit that ends within the chunk and holds a failure of it: (N, failed, allowed).

        A window without a failure of this chunk was judged before: what is past never stops a chunk in which nothing fails.

        Args:
            decided: the clock before this chunk.
            failures: clock values that failed, ascending: the history that was `kept`, and those of this chunk.
            chunk: clock values of this chunk.
            lifted: failures up to this clock value are admitted and do not count.
        """
        counted = np.asarray(failures, dtype=np.int64)
        counted = counted[counted > lifted]
        fresh = counted[counted > decided]
        found = []
        for window, share in self.shares:
            allowed = _allowed(window, share)
            ends = np.maximum(fresh, window)
            failed = np.searchsorted(counted, ends, "right") - np.searchsorted(counted, ends - window, "right")
            over = np.flatnonzero((failed > allowed) & (ends < chunk.stop))
            if len(over):
                found.append((int(ends[over[0]]), window, int(failed[over[0]]), allowed))
        return min(found)[1:] if found else None

    def surely_exceeded(self, failures: Sequence[int], chunk: range, lifted: int, newest: int | None = None) -> bool:
        """Whether `excess` will be true whatever becomes of the rest of the chunk. To be called after each failure: a few bisections.

        Args:
            failures: clock values that failed so far, ascending, history included.
            chunk: clock values of this chunk.
            lifted: failures up to this clock value are admitted and do not count.
            newest: the failure that came last, where that is not the greatest; only windows that hold it are judged.
        """
        if not failures:
            return False
        newest = failures[-1] if newest is None else newest
        return any(self._over(window, _allowed(window, share), failures, chunk, lifted, newest) for window, share in self.shares)

    @staticmethod
    def _over(window: int, allowed: int, failures: Sequence[int], chunk: range, lifted: int, newest: int) -> bool:
        behind = failures[bisect_left(failures, newest) : bisect_left(failures, newest + window)]
        ends = {max(failure, window) for failure in behind}
        return any(
            bisect_right(failures, end) - bisect_right(failures, max(end - window, lifted)) > allowed for end in ends if end < chunk.stop
        )

    def kept(self, failures: Sequence[int], decided: int, lifted: int = 0) -> tuple[int, ...]:
        """Those failures that count and that a window of a later chunk can still see, when the clock stands at `decided`; ascending."""
        longest = max((window for window, _ in self.shares), default=1)
        first = max(decided + 2 - longest, lifted + 1)
        return tuple(int(failure) for failure in failures[bisect_left(failures, first) :])


def _allowed(window: int, share: float) -> int:
    """Exact: 29 % of 100 are 29, where floats make it 28."""
    return int(window * Fraction(str(share)))


@dataclass(frozen=True)
class Spent:
    """What one kind has used of its budget."""

    decided: int = 0  # events that have come to where they may fail in this way: the clock
    failures: tuple[int, ...] = ()  # which of the last ones failed, as values of that clock, ascending
    lifted: int = 0  # failures up to this value of the clock are admitted: a person has said so


@dataclass(frozen=True)
class Used:
    """What one chunk uses of the budget of one kind."""

    events: int  # that have come to where they may fail in this way
    failed: Sequence[int] = ()  # which of these, from 1, ascending
    example: str = ""  # position of one that failed, and why


@dataclass(frozen=True)
class Excess:
    """A window that is over its limit."""

    kind: Kind
    window: int  # events
    failed: int
    allowed: int
    example: str


@dataclass(frozen=True)
class Budget:
    """How many of the last events may fail before that cannot be the fault of single events: then nothing is parked.

    Each kind of dead letter has its own limits, because each has its own cause. A limit (N, share) admits that share of any N events in a
    row. An empty tuple admits all of them. By default 50 of any 100 and 100 of any 1,000 may fail, and all may be rejected.

    Raises:
        ConfigError: a limit is out of range; correct it.
    """

    handler_error: Shares = DEFAULT
    """Of the events that the handler was given: it raised, or ran into a time-out. A bug, or an outage."""
    undecodable: Shares = DEFAULT
    """Of all new events: the body does not decode. A bad deploy of a producer or of a schema."""
    no_key: Shares = DEFAULT
    """Of those that decode: every part of the idempotence key is null. As above."""
    key_conflict: Shares = DEFAULT
    """Of those that have a key: it was decided before with another payload. As above."""
    rejected: Shares = ()
    """Of the events that the handler was given: it rejected them. No limit, unless you set one."""

    def __post_init__(self) -> None:
        given.check(BUDGET, vars(self), "Budget")

    def of(self, kind: Kind) -> Limits:
        """The limits of one kind of WATCHED."""
        return Limits(getattr(self, kind.lower()))

    def excess(self, before: Mapping[Kind, Spent], used: Mapping[Kind, Used]) -> Excess | None:
        """The first kind that the chunk brings over its limits; None where all stay within.

        Args:
            before: what was used before the chunk. used: what it uses.
        """
        for kind, its in used.items():
            spent = before.get(kind, Spent())
            clock = range(spent.decided + 1, spent.decided + 1 + its.events)
            if len(its.failed) and (found := self.of(kind).excess(spent.decided, _all(spent, its), clock, spent.lifted)):
                return Excess(kind, *found, its.example)
        return None

    def spend(self, before: Mapping[Kind, Spent], used: Mapping[Kind, Used]) -> dict[Kind, Spent]:
        """What is used after the chunk. What no window will see any more is forgotten."""
        return {**before, **{kind: self._after(kind, before.get(kind, Spent()), its) for kind, its in used.items()}}

    def _after(self, kind: Kind, spent: Spent, its: Used) -> Spent:
        limits = self.of(kind) if self.of(kind).shares else Budget().of(kind)  # for `dedup budget show`
        decided = spent.decided + its.events
        return Spent(decided, limits.kept(_all(spent, its), decided, spent.lifted), spent.lifted)


WATCHED: tuple[Kind, ...] = tuple(Kind(one.name.upper()) for one in fields(Budget))
"""Kinds that have a budget."""

BUDGET: given.Settings = {kind.lower(): SHARES for kind in WATCHED}
"""What `Budget` takes."""


def _all(spent: Spent, its: Used) -> list[int]:
    return [*spent.failures, *(np.asarray(its.failed, dtype=np.int64) + spent.decided).tolist()]


def to_json(spent: Mapping[Kind, Spent]) -> dict[str, Any]:
    """As the stores keep it."""
    return {kind.value: {**vars(one), "failures": list(one.failures)} for kind, one in spent.items()}


def from_json(kept: Mapping[str, Any]) -> dict[Kind, Spent]:
    """What `to_json` made."""
    return {Kind(kind): Spent(**{**one, "failures": tuple(one["failures"])}) for kind, one in kept.items()}
