"""Waiting through an outage: for as long as somebody waits for what is to be tried again."""

from __future__ import annotations

import pytest
from py4j.protocol import Py4JError
from pyspark.errors import PythonException

from checkpoint.errors import BatchTooLarge, BudgetExceeded
from deadletter.outage import LOOK_SECONDS, is_final, may_pass_in_parts, naming_limits, while_wanted
from dedup import SparkGone


def test_a_pause_ends_soon_once_nobody_waits() -> None:
    """A pause of minutes looks again and again whether the query still runs, and is the whole pause where it does."""
    slept: list[float] = []
    while_wanted(slept.append, lambda: False)(2.5)
    assert slept == [LOOK_SECONDS, LOOK_SECONDS, 0.5]
    slept.clear()
    with pytest.raises(SparkGone, match="was stopped"):
        while_wanted(slept.append, lambda: len(slept) == 2)(600.0)
    assert slept == [LOOK_SECONDS, LOOK_SECONDS]


QUOTED = (
    "java.lang.OutOfMemoryError: Java heap space",
    "bigger than spark.driver.maxResultSize",
    "Job 0 cancelled because SparkContext was shut down",
    "Py4JNetworkError: An error occurred while calling o1.count",
)


@pytest.mark.parametrize("text", QUOTED)
@pytest.mark.parametrize("error", [BudgetExceeded, ValueError, PythonException])
def test_what_an_event_says_is_no_limit_of_memory(error: type[Exception], text: str) -> None:
    """An error that quotes a line of somebody's log stays what it is; where Spark says the words, they name the setting."""
    quoting = error(f"cannot parse {text!r}")
    with pytest.raises(error) as raised, naming_limits("shop batch 7"):
        raise quoting
    assert raised.value is quoting and not is_final(quoting) and not may_pass_in_parts(quoting, 2)


@pytest.mark.parametrize("text", QUOTED[:2])
def test_what_spark_says_names_the_setting(text: str) -> None:
    """Also where a handler has wrapped Spark's error into one of its own."""
    with pytest.raises(BatchTooLarge, match=r"spark\.driver"), naming_limits("shop batch 7"):
        raise RuntimeError("the report failed") from Py4JError(text)
