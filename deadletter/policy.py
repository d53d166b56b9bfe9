"""What a failure means: how often to try again, and how many failures to park before something else must be wrong.

`Retry` says how often, `Budget` how many of each kind of dead letter, `FailurePolicy` is both with what else a user says of failures.
Values without state: what is used of a budget stands in the head of the store. Pure. Called by the pipeline.
"""

from __future__ import annotations

import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from fractions import Fraction
from typing import Any

import numpy as np
import tenacity
from tenacity.wait import wait_random_exponential

from checkpoint import given
from checkpoint.errors import ConfigError
from checkpoint.head import Head, Spent
from deadletter.classify import Rule
from deadletter.hiding import Redact, is_redact
from deadletter.known import ErrorClass
from deadletter.letter import Kind
from deadletter.parked import OnParked

RETRY: given.Settings = {
    "attempts": given.whole("runs", "5", least=1),
    "first": given.duration("0.1"),
    "longest": given.duration("5.0"),
    "total": given.duration("30.0"),
    "later": given.durations("[60, 600, 3600]"),
}
"""What `Retry` takes."""

LONGEST_WINDOW = 10_000
"""Events. What is used is written with every batch, and holds up to this many numbers for each kind."""

Shares = tuple[tuple[int, float], ...]
"""(N, share): at most that share of any N consecutive events may fail. Empty: all may."""

DEFAULT: Shares = ((100, 0.5), (1000, 0.1))
"""50 of any 100 events in a row may fail, and 100 of any 1,000."""


@dataclass(frozen=True)
class Budget:
    """The largest share of recent events that may become dead letters. Above it no event does, and the batch is tried again.

    Each kind of letter has its own limits. A limit (N, share) admits that share of any N events in a row; an empty tuple admits all. By
    default 50 of any 100 and 100 of any 1,000 events may fail, and all may be rejected.

    Raises:
        ConfigError: a limit is out of range; correct it.
    """

    handler_error: Shares = DEFAULT
    """Share of the events that the handler was given for which it raised, or ran out of time."""
    undecodable: Shares = DEFAULT
    """Share of all new events whose body does not decode."""
    no_key: Shares = DEFAULT
    """Share of the events that decode whose idempotence key is null."""
    key_conflict: Shares = DEFAULT
    """Share of the events with a key whose key was decided with another payload."""
    rejected: Shares = ()
    """Share of the events that the handler was given that it rejected. No limit by default."""

    def __post_init__(self) -> None:
        given.check(BUDGET, vars(self), "Budget")

    def of(self, kind: Kind) -> BudgetLimits:
        """The limits of one kind of WATCHED."""
        return BudgetLimits(getattr(self, kind.lower()))

    def excess(self, before: Mapping[str, Spent], used: Mapping[Kind, Used]) -> Excess | None:
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

    def spend(self, before: Mapping[str, Spent], used: Mapping[Kind, Used]) -> dict[str, Spent]:
        """What is used after the chunk. What no window will see any more is forgotten."""
        return {**before, **{kind: self._after(kind, before.get(kind, Spent()), its) for kind, its in used.items()}}

    def _after(self, kind: Kind, spent: Spent, its: Used) -> Spent:
        limits = self.of(kind) if self.of(kind).shares else Budget().of(kind)  # for `dedup budget show`
        decided = spent.decided + its.events
        late = its.out_of_time + (0 if its.passed else spent.out_of_time)
        return Spent(decided, limits.kept(_all(spent, its), decided, spent.lifted), spent.lifted, late)


WATCHED: tuple[Kind, ...] = tuple(Kind(one.name.upper()) for one in fields(Budget))
"""Kinds that have a budget."""


def _are_limits(value: object) -> bool:
    return isinstance(value, list | tuple) and all(
        isinstance(limit, tuple | list) and len(limit) == 2 and _is_limit(*limit) for limit in value
    )


def _is_limit(window: object, share: object) -> bool:
    window_fits = given.whole("", "", least=1, most=LONGEST_WINDOW).fits(window)
    return window_fits and given.number("", "").fits(share) and share <= 1  # type: ignore[operator]


SHARES = given.Setting(f"pairs of 1 to {LONGEST_WINDOW:,} events and a share from 0 to 1", "((100, 0.5), (1000, 0.1))", _are_limits)
"""What a limit is."""

BUDGET: given.Settings = {kind.lower(): SHARES for kind in WATCHED}
"""What `Budget` takes."""

MOST_LIFTED = 1_000_000_000
"""Events that one decision may admit. `budget=None` admits all of them, for ever."""


def _never(error: BaseException) -> bool:
    return False


@dataclass(frozen=True)
class Retry:
    """When to run the handler again after a transient error: exponential backoff with full jitter.

    Each duration is a timedelta or seconds. The wait before the nth retry is random between 0 and `first` * 2^(n-1), at most `longest`.
    Source: "Full Jitter" of https://aws.amazon.com/blogs/architecture/exponential-backoff-and-jitter/

    Raises:
        ConfigError: a value is out of range; correct it.
    """

    attempts: int = 5
    """Runs at most, the first one included; 1 means no retry."""
    first: given.Duration = 0.1
    """The longest wait before the first retry."""
    longest: given.Duration = 5.0
    """The longest wait before any retry."""
    total: given.Duration = 30.0
    """The time from the first run of what is tried, a whole chunk or one event of it, each by itself: no wait begins that would end later,
    but the first one after the death of a Python worker of Spark's."""
    later: Sequence[given.Duration] = ()
    """When a dead letter of the kind HANDLER_ERROR is due to be run again, each counted from the one before; the first one from the first
    failure of the event. That one is longer than `total`, unless `attempts` is 1: a time that passes while the event is still tried is left
    out. `reprocess(due=True)` and `dedup dead-letter reprocess --due` run what is due. Nothing does so by itself."""

    def __post_init__(self) -> None:
        given.check_fields(RETRY, self, "Retry")
        if given.to_seconds(self.first) > given.to_seconds(self.longest):
            raise ConfigError(f"Retry waits {self.first} to {self.longest} seconds: give 0 <= first <= longest.")
        if self.later and self.attempts > 1 and given.to_seconds(self.later[0]) <= given.to_seconds(self.total):
            raise ConfigError(
                f"Retry(later=[{self.later[0]}, ...], total={self.total}): that time after its first failure an event may still be tried, "
                "and is no letter that could be due. Give a first time in later= that is longer than total=, or attempts=1."
            )

    def retrying(
        self,
        error_class: Callable[[BaseException], ErrorClass],
        on_retry: Callable[[int, BaseException, float], None],
        deadline: float | None = None,
        once_more: Callable[[BaseException], bool] = _never,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> tenacity.Retrying:
        """Call the result with a function and its arguments: it returns what that returns, or raises its last error.

        Args:
            error_class: what an error is; only a TRANSIENT one that is an Exception is tried again.
            on_retry: told the number of the attempt that failed (from 1), its error and the seconds until the next one.
            deadline: value of `clock` that no wait may pass; default: `total` seconds from now.
            once_more: errors after which one more run is due, once, whatever the time.
            sleep: waits for that many seconds.
            clock: seconds, never going back.
        """
        end = clock() + given.to_seconds(self.total) if deadline is None else deadline
        asked: list[BaseException] = []  # what has had its run

        def may_pass(error: BaseException) -> bool:
            return issubclass(type(error), Exception) and error_class(error) is ErrorClass.TRANSIENT

        def is_last(state: tenacity.RetryCallState) -> bool:
            if state.attempt_number >= self.attempts:
                return True
            error = state.outcome.exception() if state.outcome else None
            late = clock() + state.upcoming_sleep > end
            if late and not asked and error is not None and once_more(error):
                asked.append(error)
                return False
            return late

        def tell(state: tenacity.RetryCallState) -> None:
            error = state.outcome.exception() if state.outcome else None
            if error is not None:
                on_retry(state.attempt_number, error, state.upcoming_sleep)

        return tenacity.Retrying(
            retry=tenacity.retry_if_exception(may_pass),
            stop=is_last,
            wait=wait_random_exponential(multiplier=given.to_seconds(self.first), max=given.to_seconds(self.longest)),
            before_sleep=tell,
            sleep=sleep,
            reraise=True,
        )


@dataclass(frozen=True)
class FailurePolicy:
    """What a consumer does when its handler, an event or the store fails. A duration is a timedelta or seconds.

    dedup tries a failed chunk again (`retry`), then halves it (`bisect`) until it has found the events at fault. These become dead letters
    within the `budget`. Above the budget, and while the store is away, dedup tries the batch again for `max_outage`.

    Raises:
        ConfigError: a setting has another type, range or unit than it takes; correct it.
    """

    retry: Retry = field(default_factory=Retry)
    """How often, and for how long, dedup tries again after a transient error before an event becomes a dead letter."""
    budget: Budget | None = field(default_factory=Budget)
    """For each kind of dead letter, the largest share of recent events that may become one. None: no limit."""
    bisect: bool = True
    """False for a handler that aggregates. It gets the whole batch (in Spark's tasks on PostgreSQL the whole slice of a partition), or the
    error is BatchTooLarge. An error of the handler then fails the batch, unless a handler of single events raised it for one of them."""
    errors: Sequence[Rule] = ()
    """Rules (exception type or function of an error, ErrorClass). The first match counts, before the built-in rules."""
    handler_timeout: given.Duration | None = None
    """Limit for one run of the handler and of what it writes. After it the process ends with its stacks on stderr. None: no limit."""
    max_outage: given.Duration = 300.0
    """How long dedup tries a batch again, with backoff, while all events fail or the store is away. Then the query stops. `math.inf`: it
    never stops."""
    on_parked: OnParked | None = None
    """A function that dedup calls with each `ParkedGroup`, the new dead letters of one cause, after the commit that parked them, in the
    process of the driver or runner. An error in it is logged and fails nothing. If the process dies between the commit and the call, nobody
    is told: where each letter must be told of, use `letters_to`."""
    letters_to: str | None = None
    """A topic. Each new dead letter also becomes a message of the outbox to it, in the transaction that parks the letter. It is sent as
    the messages of `tx.publish` are. Its id is that of the letter."""
    redact: Redact | None = None
    """What hides the contents of dead letters before they are stored. `Mask(...)`, or a function of `Contents`: for good. `Encrypt(...)`,
    or another object with `seal` and `open`, so that `reprocess` can open them. None: nothing is hidden."""

    def __post_init__(self) -> None:
        given.check_fields(FAILURE_POLICY, self, "FailurePolicy")
        object.__setattr__(self, "errors", tuple(self.errors))


def _are_rules(value: object) -> bool:
    return isinstance(value, list | tuple) and all(
        isinstance(rule, tuple | list) and len(rule) == 2 and given.takes(rule[0], None) and isinstance(rule[1], ErrorClass)
        for rule in value
    )


FAILURE_POLICY: given.Settings = {
    "retry": given.instance(Retry, "a Retry", "Retry(attempts=3)"),
    "budget": given.instance(Budget, "a Budget", "Budget()").or_none,
    "bisect": given.flag("False"),
    "errors": given.Setting(
        "pairs of an exception type, or a function of an error, and an ErrorClass", "[(KeyError, ErrorClass.PERMANENT)]", _are_rules
    ),
    "handler_timeout": given.duration("60.0", above=0).or_none,
    "max_outage": given.duration("300.0", endless=True),
    "on_parked": given.function("of a ParkedGroup", "print", 1).or_none,
    "letters_to": given.text("a topic", '"orders-dead"').or_none,
    "redact": given.Setting(
        "a Mask, an Encrypt, another object with seal and open, or a function of Contents", 'Mask("customer.email")', is_redact
    ).or_none.hidden,
}
"""What `FailurePolicy` takes."""


@dataclass(frozen=True)
class OwnPolicy(FailurePolicy):
    """The policy of one consumer, as the pipeline applies it."""

    owner: tuple[str, str] = ("", "")  # reentry.Identity of the consumer whose handler this is
    sleep: Callable[[float], None] = time.sleep
    clock: Callable[[], float] = time.monotonic

    @classmethod
    def of(cls, policy: FailurePolicy, owner: tuple[str, str]) -> OwnPolicy:
        """This policy, of the consumer with this identity."""
        return cls(**{one.name: getattr(policy, one.name) for one in fields(policy)}, owner=owner)

    @property
    def seconds_of_handler(self) -> float | None:
        """The limit of one run of the handler."""
        return None if self.handler_timeout is None else given.to_seconds(self.handler_timeout)


@dataclass(frozen=True)
class BudgetLimits:
    """How many of the last events may fail in one way.

    Every event that comes to where it may fail gets the next value of a clock, from 1. Of any N of them in a row at most that share may
    fail. Only full windows are judged, over the history that is stored and not over one batch. So below N events everything is admitted,
    and a quiet topic goes on behind its single poison event: that is one of N, however few there are in its batch.

    Raises:
        ConfigError: a limit is out of range; correct it.
    """

    shares: Shares = DEFAULT

    def __post_init__(self) -> None:
        given.check({"shares": SHARES}, vars(self), "BudgetLimits")

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
class Used:
    """What one chunk uses of the budget of one kind."""

    events: int  # that have come to where they may fail in this way
    failed: Sequence[int] = ()  # which of these, from 1, ascending
    example: str = ""  # position of one that failed, and why
    out_of_time: int = 0  # of these, the events that ran out of time since one passed
    passed: bool = False  # whether one passed


@dataclass(frozen=True)
class Excess:
    """A window that is over its limit."""

    kind: Kind
    window: int  # events
    failed: int
    allowed: int
    example: str


def _all(spent: Spent, its: Used) -> list[int]:
    return [*spent.failures, *(np.asarray(its.failed, dtype=np.int64) + spent.decided).tolist()]


def to_json(spent: Mapping[str, Spent]) -> dict[str, Any]:
    """As the stores keep it. Without time-outs there is no `out_of_time`."""
    return {str(kind): {name: value for name, value in vars(one).items() if name != "out_of_time" or value} for kind, one in spent.items()}


def from_json(kept: Mapping[str, Any]) -> dict[str, Spent]:
    """What `to_json` made."""
    return {Kind(kind): Spent(**{**one, "failures": tuple(one["failures"])}) for kind, one in kept.items()}


def lift_budget(head: Head, events: int, kind: Kind) -> Head:
    """So many more events may fail in this way without being held back.

    Raises:
        ConfigError: more than MOST_LIFTED events, or a kind that has no budget.
    """
    if kind not in WATCHED:
        raise ConfigError(f"{kind} has no budget to lift; {', '.join(WATCHED)} have one.")
    if not 1 <= events <= MOST_LIFTED:
        raise ConfigError(f"A budget is lifted for 1 to {MOST_LIFTED:,} events; {events:,} is no flood that anybody knows.")
    spent = head.spent.get(kind, Spent())
    return replace(head, spent={**head.spent, kind: replace(spent, lifted=spent.decided + events, out_of_time=0)})
