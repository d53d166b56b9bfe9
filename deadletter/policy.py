"""How often to try again. Pure values without state: what they judge is given to them. Called by the flow."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import tenacity
from tenacity.wait import wait_random_exponential

from checkpoint import given
from checkpoint.errors import ConfigError
from deadletter.budget import Budget
from deadletter.classify import Rule
from deadletter.known import ErrorClass

RETRY: given.Settings = {
    "attempts": given.whole("runs", "5", least=1),
    "first": given.seconds("0.1"),
    "longest": given.seconds("5.0"),
    "total": given.seconds("30.0"),
}
"""What `Retry` takes."""


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
    """Seconds from the first run of what is tried, a whole chunk or one event of it, each by itself: no wait begins that would end later,
    but the first one after the death of a Python worker of Spark's."""

    def __post_init__(self) -> None:
        given.settle(RETRY, self, "Retry")
        if self.first > self.longest:
            raise ConfigError(f"Retry waits {self.first} to {self.longest} seconds: give 0 <= first <= longest.")

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
class FailurePolicy:
    """How failures of the handler are met."""

    retry: Retry = field(default_factory=Retry)
    budget: Budget | None = field(default_factory=Budget)  # None: nothing is counted
    bisect: bool = True
    rules: Sequence[Rule] = ()
    owner: tuple[str, str] = ("", "")  # reentry.Identity of the consumer whose handler this is
    timeout: float | None = None  # seconds for one run of the handler; then the process ends
    sleep: Callable[[float], None] = time.sleep
    clock: Callable[[], float] = time.monotonic
