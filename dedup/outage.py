"""What is everybody's fault parks nothing: the batch is tried again, with backoff, until it passes or the patience is over."""

from __future__ import annotations

import datetime as dt
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import tenacity

from checkpoint.errors import BatchTooLarge, BudgetExceeded, CommitConflict, CommitUnknown, DedupError, SourceUnavailable, StoreUnavailable
from deadletter.classify import ErrorClass, classify
from deadletter.failure import describe
from deadletter.policy import FailurePolicy
from dedup import too_large

log = logging.getLogger("dedup")

_OF_THE_PLAN = ("AnalysisException", "ParseException")
"""Spark could not even plan what the handler asked for: that does not pass by waiting."""

FIRST_SECONDS, LONGEST_SECONDS = 0.5, 30.0


def retrying(what: str, patience: float, failures: FailurePolicy) -> tenacity.Retrying:
    """Calls what it is given until it passes, `patience` seconds are over, or it raises what no waiting can mend; raises that error.

    Args:
        what: names it in the log.
    """
    return tenacity.Retrying(
        retry=tenacity.retry_if_exception(lambda error: may_pass(error, failures)),
        wait=tenacity.wait_random_exponential(multiplier=FIRST_SECONDS, max=LONGEST_SECONDS),
        stop=tenacity.stop_after_delay(patience),
        before_sleep=lambda state: _tell(what, patience, state),
        sleep=failures.sleep,
        reraise=True,
    )


@contextmanager
def naming_limits(what: str) -> Iterator[None]:
    """Tell whoever runs out of memory inside which setting to change. Raises BatchTooLarge in place of that error."""
    try:
        yield
    except BatchTooLarge:
        raise
    except MemoryError as error:
        raise BatchTooLarge(
            f"{what}: memory was not enough ({describe(error, dt.datetime.now(dt.UTC)).message}); nothing of the running transaction is "
            f"committed. Let the source bring smaller batches (maxOffsetsPerTrigger of Kafka, maxEventsPerTrigger of Event Hubs), "
            f"lower max_events_per_transaction, or give the driver more memory. On Spark, batches above spark.driver.maxResultSize go "
            f"through files in scratch=: lower that."
        ) from error
    except Exception as error:
        if (said := too_large.advice(error)) is None:
            raise
        log.error("%s: %s", what, said)  # where the JVM has ended, a query has no other way to tell
        raise BatchTooLarge(f"{what}: {said}.") from error


def may_pass(error: BaseException, failures: FailurePolicy) -> bool:
    """Whether waiting may help: the store or the broker is away, too many events fail, or the error is transient or systemic."""
    if isinstance(error, DedupError):
        return isinstance(error, BudgetExceeded | StoreUnavailable | SourceUnavailable | CommitUnknown | CommitConflict)
    if any(cls.__name__ in _OF_THE_PLAN for cls in type(error).__mro__) or too_large.is_final(error):
        return False
    return isinstance(error, Exception) and classify(error, failures.rules) != ErrorClass.PERMANENT


def _tell(what: str, patience: float, state: tenacity.RetryCallState) -> None:
    error = state.outcome.exception() if state.outcome else None
    if error is not None and log.isEnabledFor(logging.WARNING):
        found = describe(error, dt.datetime.now(dt.UTC))
        said = f"{found.error_type}: {found.message}"
        log.warning("%s: nothing of it is committed; again in %.1f s, for %.0f s at most: %s", what, state.upcoming_sleep, patience, said)


CONFLICTS, PAUSE_SECONDS = 50, 0.05
"""How often a transaction is planned again after another decision came first, and the time between."""

Done = TypeVar("Done")


def with_replanning(transact: Callable[[], Done], attempts: int = CONFLICTS, what: str | None = None) -> Done:
    """Call it until no other decision comes first. Raises CommitConflict after so many attempts.

    Args:
        what: names it in the log, where that is to be told; it is planned again at once then.
    """
    for _ in range(attempts - 1):
        try:
            return transact()
        except CommitConflict:
            if what is None:
                time.sleep(PAUSE_SECONDS)
            else:
                log.warning("%s: another commit came first; planning again", what)
    return transact()
