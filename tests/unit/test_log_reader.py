"""Reading a log again is one piece of code for every broker; what differs is only how positions are fetched."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pyarrow as pa
import pytest

from dedup import eventhub, kafka
from dedup.core.log import AnyLogReader

ROWS = pa.table({"n": [1, 2]})


class Fixed(AnyLogReader):
    """Always the same rows."""

    def read(self, topic: str, partition: int, first: int, last: int) -> pa.Table:
        """Two rows."""
        return ROWS

    def first_kept(self, source: str, topic: str, partition: int) -> int:
        """Everything."""
        return 0


def test_a_session_makes_it_a_dataframe(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a Spark session is active the rows become its DataFrame; without one, or where Arrow is asked for, they stay Arrow."""
    for active, wanted in ((SimpleNamespace(createDataFrame=lambda rows: ("frame", rows)), ("frame", ROWS)), (None, ROWS)):
        known = SimpleNamespace(SparkSession=SimpleNamespace(getActiveSession=lambda active=active: active))
        monkeypatch.setitem(sys.modules, "pyspark.sql", known)
        assert Fixed()("s", "t", 0, 0, 1) == wanted
        reader = Fixed()
        reader.arrow = True
        assert reader("s", "t", 0, 0, 1) is ROWS
    monkeypatch.delitem(sys.modules, "pyspark.sql")
    assert Fixed()("s", "t", 0, 0, 1) is ROWS


def test_every_broker_is_read_by_it() -> None:
    """Kafka's reader and that of Event Hubs answer a call with the very same code."""
    for reader in (
        kafka.log_reader("127.0.0.1:1", arrow=True),
        eventhub.log_reader("Endpoint=sb://h/;SharedAccessKeyName=a;SharedAccessKey=YQ==", "h", arrow=True),
    ):
        assert reader.arrow
        assert type(reader).__call__ is AnyLogReader.__call__
