"""A slice of a batch in a task of Spark's: whose error is what."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pyarrow as pa
import pytest

from checkpoint.head import Run
from dedup.spark.committing import _Slice


def broken() -> Iterator[pa.Table]:
    """Rows that end in the middle."""
    yield pa.table({"n": [1]})
    raise OSError("Expected to be able to read 100 bytes, got 10")


def test_rows_that_cannot_be_read_fail_the_task() -> None:
    """Spark runs the task again; as an error of the slice it would be judged as the handler's."""
    one = object.__new__(_Slice)
    one.head, one.error = None, None  # type: ignore[assignment]
    one.job = SimpleNamespace(run=Run("q", 0))  # type: ignore[assignment]
    one._parts = lambda tables: iter(list(tables))  # type: ignore[method-assign, assignment]
    with pytest.raises(OSError, match="got 10"):
        one.commit_all(broken())
    assert one.error is None
