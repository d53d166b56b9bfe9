"""Values that are read one by one, as a column: null where one does not read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa

Read = Callable[[Any], Any]


class Unreadable(ValueError):
    """A value is not what the schema says."""


def column(values: Sequence[Any], read: Read, kind: pa.DataType, final: pa.DataType) -> pa.Array:
    """What each value reads as; null where it is None or does not read.

    Args:
        kind: the type of what `read` answers.
        final: the type of the column; a row with a value that does not fit it is null.
    """
    rows = [None if value is None else _attempt(read, value) for value in values]
    try:
        return pa.array(rows, kind).cast(final)
    except (pa.ArrowInvalid, TypeError, OverflowError):  # some value does not fit its column: find out which rows have one
        return pa.concat_arrays([_one(row, kind, final) for row in rows])


def _one(row: Any, kind: pa.DataType, final: pa.DataType) -> pa.Array:
    try:
        return pa.array([row], kind).cast(final)
    except (pa.ArrowInvalid, TypeError, OverflowError):
        return pa.nulls(1, final)


def _attempt(read: Read, value: Any) -> Any:
    try:
        return read(value)
    except (ValueError, ArithmeticError, RecursionError, EOFError, IndexError, LookupError):
        return None  # the verdict is the caller's: a body without a row does not decode
