"""What Spark says while it names, tests and merges rows for a Delta sink, without a session: what it means, and which text it gets."""

from __future__ import annotations

from typing import Any

import pytest
from pyspark.errors import AnalysisException, NumberFormatException, PySparkException

from checkpoint.errors import ConfigError, RowsMisfit, RowsRefused, StoreUnavailable
from dedup.core.steps import Merge
from dedup.spark import delta
from dedup.spark.delta import SparkSide, first_line

pytestmark = pytest.mark.delta

AWAY = "An error occurred while calling o7.collectToPython.\n: java.net.ConnectException: Connection refused\n\tat somewhere"


class NoSession:
    """A session that raises this for each statement."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def sql(self, statement: str) -> Any:
        """Always raises."""
        raise self._error


@pytest.mark.parametrize(
    ("raised", "meant"),
    [
        (NumberFormatException("[CAST_INVALID_INPUT] The value 'abc' cannot be cast"), RowsRefused),
        (PySparkException("Job aborted due to stage failure: [CAST_INVALID_INPUT] The value 'abc' cannot be cast"), RowsRefused),
        (PySparkException(AWAY), StoreUnavailable),
        (AnalysisException("[UNRESOLVED_COLUMN.WITH_SUGGESTION] A column with name `x`"), RowsMisfit),
        (AnalysisException("[UNRESOLVED_ROUTINE] Cannot resolve routine `mine`"), ConfigError),
        (PySparkException("No space left on device"), ConfigError),
    ],
)
def test_a_rule_that_raises_is_judged_by_its_error(monkeypatch: pytest.MonkeyPatch, raised: Exception, meant: type) -> None:
    """One row at which a rule fails is refused, an outage is waited for, and only what concerns all rows stops the stream."""

    def broken(*given: Any) -> Any:
        raise raised

    monkeypatch.setattr(delta, "_staged", broken)
    with pytest.raises(meant, match="positive") as told:
        SparkSide(NoSession(raised)).violations(["/x"], {"positive": "a > 0"}, {})  # type: ignore[arg-type]
    assert type(told.value) is meant


@pytest.mark.parametrize(
    ("raised", "meant"), [(PySparkException(AWAY), StoreUnavailable), (AnalysisException("[TABLE_OR_VIEW_NOT_FOUND] shop.x"), ConfigError)]
)
def test_a_catalog_that_does_not_answer_is_waited_for(raised: Exception, meant: type) -> None:
    """An outage of the metastore is no wrong name of a sink."""
    with pytest.raises(meant, match=r"shop\.x") as told:
        SparkSide(NoSession(raised)).location("shop.x")  # type: ignore[arg-type]
    assert type(told.value) is meant


def test_an_error_of_java_is_told_in_its_own_words() -> None:
    """The first line of such an error says only that there was one."""
    assert first_line(PySparkException(AWAY)) == "java.net.ConnectException: Connection refused"
    assert first_line(PySparkException("[X] what\nplan")) == "[X] what"
    assert first_line(PySparkException("An error occurred while calling o7.x")) == "An error occurred while calling o7.x"


def test_braces_in_names_of_a_merge_are_text() -> None:
    """Spark fills a template: columns and paths with braces come out as they are, and only the rows are filled in."""
    from pyspark.sql.sql_formatter import SQLStringFormatter

    template = delta._merge_sql("/lake/{x}/orders", ["id", "amount {EUR}", "{rows}"], Merge(("id",), "amount {EUR}", None))
    said = SQLStringFormatter(None).format(template, rows="the_rows")  # type: ignore[arg-type]
    assert said.startswith("MERGE INTO delta.`file:///lake/{x}/orders` t USING 'the_rows' s ON t.`id` = s.`id` ")
    assert "t.`amount {EUR}` = s.`amount {EUR}`, t.`{rows}` = s.`{rows}`" in said and "the_rows" not in said.partition(" ON ")[2]
