"""An error that is no event's fault parks nothing: the batch is tried again, with backoff, until it passes or the patience is over.

`with_replanning` is the one loop for a decision that another one overtook. An error about a limit of memory is no event's fault either:
the message names the setting to change, of Spark's JVM or of a job's result. Spark has no class for these errors: they are known by their
words. It stands beside `policy` because what parks an event must agree with what parks none.
"""

from __future__ import annotations

import datetime as dt
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import tenacity

from checkpoint.errors import (
    BatchTooLarge,
    BudgetExceeded,
    CommitConflict,
    CommitUnknown,
    DedupError,
    SourceUnavailable,
    SparkGone,
    StoreUnavailable,
)
from deadletter import known
from deadletter.classify import classify, is_cancelled, is_of_spark
from deadletter.failure import chain, describe
from deadletter.known import ErrorClass
from deadletter.policy import OwnPolicy

log = logging.getLogger("dedup")

_OF_THE_PLAN = ("AnalysisException", "ParseException")
"""Spark could not even plan what the handler asked for: that does not pass by waiting."""

FIRST_SECONDS, LONGEST_SECONDS = 0.5, 30.0

TOLD_EVERY = 60.0
"""Seconds between two lines of the log about one error that stays."""

CONFLICTS, PAUSE_SECONDS = 50, 0.05
"""How often a transaction is planned again after another decision came first, and the time between."""

Done = TypeVar("Done")


MOST = "spark.driver.maxResultSize"
"""Word in an error of Spark: what a job returns is more than this setting allows."""

RESULTS = (MOST, "TaskResultLost")
"""The same, or more than its processes could keep."""

HEAP = ("java.lang.OutOfMemoryError", "Java heap space", "GC overhead limit exceeded")
"""The same: a JVM ran out of memory."""

GONE = "Py4JNetworkError"
"""Spark's JVM does not answer: where its tasks run inside it, running out of memory ends it."""

NO_ANSWER, STOPPED = "Spark's JVM does not answer any more", "Spark was stopped: SparkContext was shut down"
QUERY_STOPPED = (
    "The query was stopped while its batch was being handled. Nothing of the running transaction is committed. "
    "(py4j.protocol.Py4JJavaError: An error occurred while calling the handler: java.lang.InterruptedException)"
)
"""What SparkGone says. By the words in brackets Spark knows that its own stop caused the error, and the query ends without one
(PROXY_ERROR of Spark's StreamExecution.scala)."""

ENDING_SECONDS = 10.0
"""A JVM that ends stops Spark first, and stops answering within so many seconds of that."""

_SMALLER = (
    "let the source bring smaller batches (maxOffsetsPerTrigger of Kafka, maxEventsPerTrigger of Event Hubs, maxBytesPerTrigger of files), "
    "lower max_events_per_transaction"
)
_NOTHING = "nothing of the running transaction is committed"


def retrying(what: str, patience: float, failures: OwnPolicy) -> tenacity.Retrying:
    """Calls what it is given until it passes, `patience` seconds are over, or it raises what no waiting can mend; raises that error.

    Args:
        what: names it in the log.
    """
    return tenacity.Retrying(
        retry=tenacity.retry_if_exception(lambda error: may_pass(error, failures)),
        wait=tenacity.wait_random_exponential(multiplier=FIRST_SECONDS, max=LONGEST_SECONDS),
        stop=tenacity.stop_after_delay(patience),
        before_sleep=_Telling(what, patience),
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
            f"{what}: out of memory ({describe(error, dt.datetime.now(dt.UTC)).message}); nothing of the running transaction is "
            f"committed. Let the source bring smaller batches (maxOffsetsPerTrigger of Kafka, maxEventsPerTrigger of Event Hubs), "
            f"lower max_events_per_transaction, or give the driver more memory. On Spark, batches above spark.driver.maxResultSize go "
            f"through files in scratch=: lower that."
        ) from error
    except Exception as error:
        if (said := advice(error)) is None:
            raise
        log.error("%s: %s", what, said)  # where the JVM has ended, a query has no other way to tell
        raise BatchTooLarge(f"{what}: {said}.") from error


def may_pass(error: BaseException, failures: OwnPolicy) -> bool:
    """Whether waiting may help: the store or the broker is away, too many events fail, or the error is transient or systemic."""
    if isinstance(error, DedupError):
        return isinstance(error, BudgetExceeded | StoreUnavailable | SourceUnavailable | CommitUnknown | CommitConflict)
    if any(cls.__name__ in _OF_THE_PLAN for cls in type(error).__mro__) or is_final(error):
        return False
    return isinstance(error, Exception) and classify(error, failures.errors) != ErrorClass.PERMANENT


@dataclass
class _Telling:
    """Tells the log of an error once; of its repetitions one line a minute, with the time that is left."""

    what: str
    patience: float
    kind: str = ""  # of the error that was told last
    told: float = 0.0  # seconds since the first try

    def __call__(self, state: tenacity.RetryCallState) -> None:
        error, since = state.outcome.exception() if state.outcome else None, state.seconds_since_start or 0.0
        if error is None or not log.isEnabledFor(logging.WARNING):
            return
        found, wait, left = describe(error, dt.datetime.now(dt.UTC)), state.upcoming_sleep, max(self.patience - since, 0.0)
        if found.error_type != self.kind:
            said = f"{found.error_type}: {found.message}"
            log.warning("%s: nothing was committed; trying again in %.1f s, for %.0f s more: %s", self.what, wait, left, said)
        elif since - self.told < TOLD_EVERY:
            return
        else:
            log.warning("%s: still %s at try %d; giving up in %.0f s", self.what, found.error_type, state.attempt_number, left)
        self.kind, self.told = found.error_type, since


LOOK_SECONDS = 1.0
"""Between two looks at whether anybody still waits."""


def while_wanted(sleep: Callable[[float], None], is_over: Callable[[], bool]) -> Callable[[float], None]:
    """A `sleep` that raises SparkGone once nobody waits for what is to be tried again: its query was stopped."""

    def waiting(seconds: float) -> None:
        left = seconds
        while not is_over():
            if left <= 0:
                return
            sleep(min(left, LOOK_SECONDS))
            left -= LOOK_SECONDS
        raise SparkGone(QUERY_STOPPED)

    return waiting


@contextmanager
def ending_with_its_query(is_over: Callable[[], bool], what: str) -> Iterator[None]:
    """Raise SparkGone in place of whatever breaks off in the block because the query was stopped.

    Without that error's text: in a long one Spark's search for the words of QUERY_STOPPED overflows the stack of the query's thread.
    """
    try:
        yield
    except DedupError:
        raise
    except Exception as error:
        if not is_over():
            raise
        log.debug("%s: its query was stopped, and then came %s", what, type(error).__name__, exc_info=error)
        raise SparkGone(QUERY_STOPPED) from None


class TriedOnceMore(CommitConflict):
    """Events ran out of time, and then one passed. Nothing of this attempt was committed; they are tried once more."""


def with_replanning(transact: Callable[[], Done], attempts: int = CONFLICTS, what: str | None = None) -> Done:
    """Call it until no other decision comes first, and no event is to be tried once more. Raises CommitConflict after so many attempts.

    Args:
        what: names it in the log, where that is to be told; it is planned again at once then.
    """
    for _ in range(attempts - 1):
        try:
            return transact()
        except TriedOnceMore as again:
            log.warning("%s", again)
        except CommitConflict:
            if what is None:
                time.sleep(PAUSE_SECONDS)
            else:
                log.warning("%s: another commit came first; planning again", what)
    return transact()


def words(error: BaseException) -> str:
    """What an error of Spark is and says; GONE where only its JVM could tell, which does not answer."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001 - py4j asks the JVM for the text
        return GONE


def may_pass_in_parts(error: BaseException, rows: int) -> bool:
    """Whether a job returned more than Spark keeps of results, for so many rows together."""
    if rows == 1 or not _says(error, *RESULTS):
        return False
    log.warning("the handler's rows for %d events exceed spark.driver.maxResultSize: running it on two halves", rows)
    return True


def is_final(error: BaseException) -> bool:
    """Whether no waiting helps in this process: a result stays as large as it is, a JVM that has ended does not come back, and who has
    cancelled a job, as by stopping its query, does not want it run again.
    """
    return _says(error, MOST) or is_gone(error) or is_cancelled(error)


def is_gone(error: BaseException) -> bool:
    """Whether Spark's JVM gave no answer: py4j names what it called and has nothing to add, where an error of Java's has a trace."""
    return _says(error, GONE, NO_ANSWER) or any(known.UNANSWERED.search(text) for text in _sayings(error))


def advice(error: BaseException) -> str | None:
    """What memory was not enough for and what to do about it, where that is what the error is about."""
    if _says(error, *RESULTS):
        return (
            f"a job of Spark returned more than Spark keeps of results; {_NOTHING}. Raise spark.driver.maxResultSize (and "
            f"spark.driver.memory, which has to hold that twice), {_SMALLER}, or let the handler write less"
        )
    if _says(error, *HEAP) or is_gone(error) or _ends_jvm(error):
        ended = "has ended or does not answer; its log says whether it " if is_gone(error) else ""
        return (
            f"Spark's JVM {ended}ran out of memory ({HEAP[0]}); {_NOTHING}. Raise spark.driver.memory (on a cluster also "
            f"spark.executor.memory), {_SMALLER}, or cut what the source reads into more tasks (minPartitions of Kafka)"
        )
    return None


def _ends_jvm(error: BaseException) -> bool:
    """Whether Spark was stopped, and soon after that its JVM does not answer. Waits for that up to ENDING_SECONDS."""
    if not any(known.STOPPED.search(text) for text in _sayings(error)):
        return False
    deadline = time.monotonic() + ENDING_SECONDS
    while not (gone := is_gone(error)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return gone


def _says(error: BaseException, *these: str) -> bool:
    return any(word in text for text in _sayings(error) for word in these)


def _sayings(error: BaseException) -> Iterator[str]:
    """What Spark says, or SparkGone for it. Any other error may quote an event, which says whatever its producer wrote."""
    return (words(link) for link in chain(error) if is_of_spark(link) or isinstance(link, SparkGone))
