"""How often to try again, and how many failures to park before something else must be wrong.

Pure values without state: what they judge is given to them. Called by the flow, which keeps the budget's state in the head of the store.
"""

from __future__ import annotations

import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import tenacity
from tenacity.wait import wait_random_exponential

from checkpoint.errors import ConfigError
from deadletter.known import ErrorClass

LONGEST_WINDOW = 10_000
"""Events. The budget's state is written with every batch and holds up to this many numbers."""


def _never(error: BaseException) -> bool:
    return False


@dataclass(frozen=True)
class Retry:
    """When to run the handler again after a transient error: exponential backoff with full jitter.

    The wait before the nth retry is random between 0 and `first` * 2^(n-1), at most `longest`.
    Source: "Full Jitter" of https://aws.amazon.com/blogs/architecture/exponential-backoff-and-jitter/

    Raises:
        ConfigError: a value is out of range; correct it.
    """

    attempts: int = 5
    """Runs at most, the first one included; 1 means no retry."""
    first: float = 0.1
    """Seconds: the longest wait before the first retry."""
    longest: float = 5.0
    """Seconds: the longest wait before any retry."""
    total: float = 30.0
    """Seconds, over one chunk: no wait begins that would end later, but the first one after the death of a Python worker of Spark's."""

    def __post_init__(self) -> None:
        if self.attempts < 1:
            raise ConfigError(f"Retry.attempts is {self.attempts}: at least 1, which is the run without a retry.")
        if not 0 <= self.first <= self.longest < float("inf"):
            raise ConfigError(f"Retry waits {self.first} to {self.longest} seconds: give 0 <= first <= longest.")
        if not 0 <= self.total < float("inf"):
            raise ConfigError(f"Retry.total is {self.total}: give the seconds that retries may take in one chunk.")

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
        end = clock() + self.total if deadline is None else deadline
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
            wait=wait_random_exponential(multiplier=self.first, max=self.longest),
            before_sleep=tell,
            sleep=sleep,
            reraise=True,
        )


@dataclass(frozen=True)
class Budget:
    """How many of the last events may fail before the cause must be a bug or an outage: then nothing is parked.

    What counts is HANDLER_ERROR and time-outs: events that the handler could not do. Rejections, undecodable bodies, missing keys and
    conflicts do not count: a topic whose every body is undecodable goes on.

    Every event that a handler decides gets the next value of a clock, from 1. Of any N events in a row at most that share may fail. Only
    full windows are judged, over the history that is stored and not over one batch. So below N events everything is admitted, and a quiet
    topic goes on behind its single poison event: that is one of N, however few there are in its batch. By default 50 of any 100 and 100 of
    any 1,000 may fail.

    Raises:
        ConfigError: a limit is out of range; correct it.
    """

    limits: tuple[tuple[int, float], ...] = ((100, 0.5), (1000, 0.1))
    """(N, share): at most that share of any N consecutive decided events may fail."""

    def __post_init__(self) -> None:
        for window, share in self.limits:
            if not 1 <= window <= LONGEST_WINDOW or not 0 <= share <= 1:
                raise ConfigError(f"Budget limit ({window}, {share}): give 1 to {LONGEST_WINDOW:,} events and a share from 0 to 1.")

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
        for window, share in self.limits:
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
        return any(self._over(window, _allowed(window, share), failures, chunk, lifted, newest) for window, share in self.limits)

    @staticmethod
    def _over(window: int, allowed: int, failures: Sequence[int], chunk: range, lifted: int, newest: int) -> bool:
        behind = failures[bisect_left(failures, newest) : bisect_left(failures, newest + window)]
        ends = {max(failure, window) for failure in behind}
        return any(
            bisect_right(failures, end) - bisect_right(failures, max(end - window, lifted)) > allowed for end in ends if end < chunk.stop
        )

    def kept(self, failures: Sequence[int], decided: int) -> tuple[int, ...]:
        """Those failures that a window of a later chunk can still see, when the clock stands at `decided`; ascending."""
        longest = max((window for window, _ in self.limits), default=1)
        return tuple(int(failure) for failure in failures[bisect_left(failures, decided + 2 - longest) :])


def _allowed(window: int, share: float) -> int:
    """Exact: 29 % of 100 are 29, where floats make it 28."""
    return int(window * Fraction(str(share)))
