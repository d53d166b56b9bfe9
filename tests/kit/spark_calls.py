"""Counts what is asked of Spark and makes one of these actions fail, in one of three ways.

An action is a call to classic Spark that runs a query or a command, or looks at files: those of ENTRIES, called by whatever code. That
there are no others is checked: `stray` are jobs that Spark ran for the code under test outside of any of them.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Literal

from py4j.protocol import Py4JJavaError, Py4JNetworkError
from pyspark.sql import DataFrameReader, DataFrameWriter
from pyspark.sql import SparkSession as Session
from pyspark.sql.classic.dataframe import DataFrame

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Way = Literal["lost", "aborted", "executor lost"]
"""It runs, but the answer is lost; or it does not run, and Spark tells of a failed task, or of an executor that was lost."""

ENTRIES: dict[type, str] = {
    DataFrame: "collect count toArrow toPandas take tail head first isEmpty foreach foreachPartition checkpoint localCheckpoint",
    DataFrameReader: "load parquet json table",
    DataFrameWriter: "save saveAsTable insertInto parquet json",
    Session: "sql",
}
"""Methods by which Python code has classic Spark work."""

SAYS = {"aborted": "java.lang.IllegalStateException: made up by a test", "executor lost": "ExecutorLostFailure (executor 1 exited)"}
"""Way -> what the last failure was."""


class Actions:
    """The action number `at` of all threads together, from 1, fails in this `way`; the others pass."""

    def __init__(self, session: SparkSession) -> None:
        self._session, self._lock, self._here = session, threading.Lock(), threading.local()
        self.seen, self.at, self.way, self.failed = 0, 0, "lost", ""
        self.jobs, self.stray = 0, 0

    def arm(self, at: int, way: Way) -> None:
        """Count anew."""
        self.seen, self.at, self.way, self.failed = 0, at, way, ""

    def run(self, name: str, action: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """The action, unless it is the one that fails; what it does by other entries is part of it."""
        if getattr(self._here, "inside", False):
            return action(*args, **options)
        due, before = self._is_due(name), self._started()
        if due and self.way != "lost":
            raise self._refused()
        self._here.inside = True
        try:
            answer = action(*args, **options)
        finally:
            self._here.inside = False
            self.jobs += self._started() - before
        if due:
            raise Py4JNetworkError("Answer from Java side is empty")
        return answer

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Add the jobs of this block that no action has started to `stray`."""
        before, known = self._started(), self.jobs
        try:
            yield
        finally:
            self.stray += self._started() - before - (self.jobs - known)

    def _is_due(self, name: str) -> bool:
        with self._lock:
            self.seen += 1
            due = self.seen == self.at
            if due:
                self.failed = name
            return due

    def _started(self) -> int:
        return int(self._session._jsc.sc().dagScheduler().numTotalJobs())

    def _refused(self) -> Py4JJavaError:
        """As classic Spark raises it: an object of the JVM's."""
        assert self._session._jvm is not None
        text = f"Job aborted due to stage failure: Task 0 in stage 7.0 failed 4 times, most recent failure: Lost task 0.3: {SAYS[self.way]}"
        return Py4JJavaError(
            "An error occurred while calling o1.collectToPython.\n", self._session._jvm.org.apache.spark.SparkException(text)
        )


@contextlib.contextmanager
def counted(session: SparkSession) -> Iterator[Actions]:
    """Every action of this process, for the length of the block."""
    actions = Actions(session)
    with contextlib.ExitStack() as undo:
        for owner, names in ENTRIES.items():
            for name in names.split():
                _wrap(actions, owner, name, undo)
        yield actions


def _wrap(actions: Actions, owner: type, name: str, undo: contextlib.ExitStack) -> None:
    real = getattr(owner, name)

    @functools.wraps(real)
    def counting(*args: Any, **options: Any) -> Any:
        return actions.run(f"{owner.__name__}.{name}", real, *args, **options)

    undo.callback(setattr, owner, name, real)
    setattr(owner, name, counting)
