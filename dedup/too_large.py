"""Whether a limit of memory is what an error is about, and which setting to change: of Spark's JVM, or of a job's result.

Spark has no class for these: they are known by their words. Called for what has ended a batch, and by the search for guilty events,
because no event is to blame.
"""

from __future__ import annotations

import logging
from typing import NoReturn

from checkpoint.errors import BatchTooLarge
from deadletter.chain import chain

log = logging.getLogger("dedup")

MOST = "spark.driver.maxResultSize"
"""Word in an error of Spark: what a job returns is more than this setting allows."""

RESULTS = (MOST, "TaskResultLost")
"""The same, or more than its processes could keep."""

HEAP = ("java.lang.OutOfMemoryError", "Java heap space", "GC overhead limit exceeded")
"""The same: a JVM ran out of memory."""

GONE = "Py4JNetworkError"
"""Spark's JVM does not answer: where its tasks run inside it, running out of memory ends it."""

_SMALLER = (
    "let the source bring smaller batches (maxOffsetsPerTrigger of Kafka, maxEventsPerTrigger of Event Hubs, maxBytesPerTrigger of files), "
    "lower max_events_per_transaction"
)
_NOTHING = "nothing of the running transaction is committed"


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
    log.warning("what the handler made of %d events is more than spark.driver.maxResultSize allows: it is run on two halves", rows)
    return True


def refuse_parts(consumer: str, events: int, most: int, what: str = "batch") -> NoReturn:
    """Raise BatchTooLarge for a batch that would be cut, where the handler has to have it whole.

    Args:
        events: of the batch. most: that one transaction takes. what: that is cut, where it is not the whole batch.
    """
    raise BatchTooLarge(
        f"Consumer {consumer!r}: with bisect=False the handler gets a whole {what} in one transaction. This one has {events:,} events, and "
        f"max_events_per_transaction is {most:,}. Nothing of it was written. Raise max_events_per_transaction to {events:,} or more (Spark "
        f"brings a batch that it has planned again as it is), and let the source bring smaller ones (maxOffsetsPerTrigger of Kafka, "
        f"maxEventsPerTrigger of Event Hubs). A handler that means the same on a part of a batch takes bisect=True."
    )


def is_final(error: BaseException) -> bool:
    """Whether no waiting helps in this process: a result stays as large as it is, and a JVM that has ended does not come back."""
    return _says(error, MOST, GONE)


def advice(error: BaseException) -> str | None:
    """What memory was not enough for and what to do about it, where that is what the error is about."""
    if _says(error, *RESULTS):
        return (
            f"a job of Spark returned more than Spark keeps of results; {_NOTHING}. Raise spark.driver.maxResultSize (and "
            f"spark.driver.memory, which has to hold that twice), {_SMALLER}, or let the handler write less"
        )
    if _says(error, *HEAP, GONE):
        ended = "has ended or does not answer; its log says whether it " if _says(error, GONE) else ""
        return (
            f"Spark's JVM {ended}ran out of memory ({HEAP[0]}); {_NOTHING}. Raise spark.driver.memory (on a cluster also "
            f"spark.executor.memory), {_SMALLER}, or cut what the source reads into more tasks (minPartitions of Kafka)"
        )
    return None


def _says(error: BaseException, *these: str) -> bool:
    return any(word in words(link) for link in chain(error) for word in these)
