"""Whether Spark, and the query, are still there: what a handler meets while one of them ends says nothing about an event.

A call that was under way fails in a way of its own: as an error of py4j without words, as the end of a file, as rows that break off, as an
interrupted read. So the JVM itself is asked after an error, whatever it was.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from pyspark.sql import SparkSession

from checkpoint.errors import SparkGone
from deadletter.outage import NO_ANSWER, QUERY_STOPPED, STOPPED, is_gone
from dedup.spark.session import JavaError


@contextlib.contextmanager
def answering(session: SparkSession, is_over: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """Raise SparkGone in place of any error of the block where Spark has ended, or the query, of which `is_over` tells."""
    try:
        yield
    except SparkGone:
        raise
    except Exception as error:
        if (why := _ended(session)) is not None:
            raise SparkGone(why) from error
        if is_over():
            raise SparkGone(QUERY_STOPPED) from None
        raise


def _ended(session: SparkSession) -> str | None:
    """How Spark has ended; None where it answers. Errors of Spark Connect say by themselves that nobody answers."""
    if not hasattr(session, "_jsparkSession"):
        return None
    try:
        session.conf.get("spark.app.name", "")
    except (OSError, JavaError) as error:
        return NO_ANSWER if isinstance(error, OSError) or is_gone(error) else None
    with contextlib.suppress(Exception):  # a managed platform may hide the context, and one that was stopped here is None
        return STOPPED if session.sparkContext._jsc.sc().isStopped() else None
    return None
