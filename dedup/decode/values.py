"""Values that are read one by one, as a column: null where one does not read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pyarrow as pa

Read = Callable[[Any], Any]


WHOLE = "the body"
"""Path of what is wrong with no field of it."""

FAILURES = (ValueError, ArithmeticError, RecursionError, EOFError, IndexError, LookupError)
"""What reading a body may raise that is no body of the schema."""


class Unreadable(ValueError):
    """A value is not what the schema says.

    Args:
        path: of the field within the schema: `$.items[].price`, `$.counts.*`; or WHOLE.
        what: is wrong with it, without the value: "must be a number".
        value: what stands there, in short.
    """

    def __init__(self, path: str, what: str, value: str = "") -> None:
        self.path, self.what = path, what
        super().__init__(f"{path} is {value}; it {what}" if value else self.brief)

    @property
    def text(self) -> str:
        """The reason, with the value."""
        return str(self)

    @property
    def brief(self) -> str:
        """The reason without the value: equal for bodies that fail alike, and fit for a log."""
        return f"{self.path} {self.what}"


_MISFITS = (pa.ArrowInvalid, TypeError, OverflowError)
"""What Arrow raises for a value that a column cannot hold."""


def column(values: Sequence[Any], read: Read, kind: pa.DataType, final: pa.DataType) -> pa.Array:
    """What each value reads as; null where it is None or does not read.

    Args:
        kind: the type of what `read` answers.
        final: the type of the column; a row with a value that does not fit it is null.
    """
    rows = [None if value is None else _attempt(read, value) for value in values]
    try:
        return pa.array(rows, kind).cast(final)
    except _MISFITS:  # some value does not fit its column: find out which rows have one
        return pa.concat_arrays([_one(row, kind, final) for row in rows])


def _one(row: Any, kind: pa.DataType, final: pa.DataType) -> pa.Array:
    return pa.array([row], kind).cast(final) if _fits(row, kind, final) else pa.nulls(1, final)


def _fits(row: Any, kind: pa.DataType, final: pa.DataType) -> bool:
    try:
        pa.array([row], kind).cast(final)
    except _MISFITS:
        return False
    return True


def misfit(row: Any, kind: pa.DataType, final: pa.DataType, path: str = "$") -> Unreadable | None:
    """Which part of a row that was read does not fit the column, as `column` found it; None where it fits."""
    if _fits(row, kind, final):
        return None
    if pa.types.is_struct(final) and isinstance(row, Mapping):
        for field in final:
            inner, value = kind.field(field.name).type, row.get(field.name)
            if (found := misfit(value, inner, field.type, f"{path}.{field.name}")) is not None:
                return found
    return Unreadable(path if path != "$" else WHOLE, f"does not fit {final}", shown(str(row)))


def shown(text: str) -> str:
    """A value as it stands in a reason: its beginning where it is long."""
    return text if len(text) <= _LONGEST else text[: _LONGEST - 2] + "..."


_LONGEST = 60
"""Characters of a value in a reason."""


def _attempt(read: Read, value: Any) -> Any:
    try:
        return read(value)
    except FAILURES:
        return None  # the verdict is the caller's: a body without a row does not decode
