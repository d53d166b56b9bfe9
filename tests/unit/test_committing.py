"""A slice of a batch in a task of Spark's: whose error is what."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from checkpoint.errors import ConfigError
from checkpoint.head import Run
from dedup.spark.committing import _Slice, task


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


class _Needs:
    """What fails where it is unpickled, as a handler whose module reads a variable that this executor lacks."""

    def __reduce__(self) -> Any:
        return _variable, ("NOT_SET_HERE",)


def _variable(name: str) -> str:
    return os.environ[name]


def test_a_task_that_cannot_load_the_handler_says_what_to_do() -> None:
    """An executor that came later may lack what the first ones had: its tasks begin nothing, and answer with our error."""
    rows = pa.RecordBatch.from_pylist([{"sequence_number": 1}])
    (answer,) = (row for batch in task([rows], pickle.dumps((b"", _Needs())), keep=False) for row in batch.to_pylist())
    told = pickle.loads(answer["error"])
    assert isinstance(told, ConfigError) and "KeyError: 'NOT_SET_HERE'" in str(told) and "on='driver'" in str(told)
    assert answer["decisions"] == sum(answer["states"]) == 0
