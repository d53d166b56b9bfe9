"""What is everybody's fault parks nothing: the batch is tried again, with backoff, until it passes or the patience is over."""

from __future__ import annotations

import datetime as dt
import logging

import tenacity

from checkpoint.errors import BudgetExceeded, CommitConflict, CommitUnknown, DedupError, StoreUnavailable
from deadletter.classify import ErrorClass, classify
from deadletter.failure import describe
from dedup.care import Care

log = logging.getLogger("dedup")

FIRST_SECONDS, LONGEST_SECONDS = 0.5, 30.0


def retrying(what: str, patience: float, care: Care) -> tenacity.Retrying:
    """Calls what it is given until it passes, `patience` seconds are over, or it raises what no waiting can mend; raises that error.

    Args:
        what: names it in the log.
    """
    return tenacity.Retrying(
        retry=tenacity.retry_if_exception(lambda error: may_pass(error, care)),
        wait=tenacity.wait_random_exponential(multiplier=FIRST_SECONDS, max=LONGEST_SECONDS),
        stop=tenacity.stop_after_delay(patience),
        before_sleep=lambda state: _tell(what, state),
        sleep=care.sleep,
        reraise=True,
    )


def may_pass(error: BaseException, care: Care) -> bool:
    """Whether waiting may help: the store is away, too many events fail, or the error is transient or systemic."""
    if isinstance(error, DedupError):
        return isinstance(error, BudgetExceeded | StoreUnavailable | CommitUnknown | CommitConflict)
    return isinstance(error, Exception) and classify(error, care.rules) != ErrorClass.PERMANENT


def _tell(what: str, state: tenacity.RetryCallState) -> None:
    error = state.outcome.exception() if state.outcome else None
    said = describe(error, dt.datetime.now(dt.UTC)).message if error else ""
    log.warning("%s: nothing of it is committed, trying again in %.1f s: %s", what, state.upcoming_sleep, said)
