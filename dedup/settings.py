"""A consumer's settings: what is refused, and how they are written down. Pure."""

from __future__ import annotations

import datetime as dt
import inspect
import json
from collections.abc import Callable, Sequence
from typing import Any, Literal

from checkpoint.errors import ConfigError, HandlerError
from dedup.envelope import Columns

_FRAMES = ("DataFrame", "Table", "RecordBatch")


def refuse_unusable(name: str, on_key_conflict: str, max_events: int | None) -> None:
    """Raise ConfigError for values that cannot work."""
    if not name or len(name) > 200 or "\x00" in name:
        raise ConfigError("A consumer needs a name of 1 to 200 characters without NUL.")
    if on_key_conflict not in ("dead_letter", "duplicate", "error"):
        raise ConfigError(f"on_key_conflict is 'dead_letter', 'duplicate' or 'error', not {on_key_conflict!r}.")
    if max_events is not None and max_events < 1:
        raise ConfigError("max_events_per_transaction must be at least 1.")


def refuse_store(store: object) -> None:
    """Raise ConfigError for what is no store, such as its URL."""
    if not hasattr(store, "begin_letters"):
        raise ConfigError(f"store= takes a PostgresStore(...) or a DeltaStore(...), not {type(store).__name__}.")


def refuse_handler(handler: Callable[..., Any], takes: str) -> None:
    """Raise ConfigError for a handler that cannot be called with two arguments: else every event would fail by itself."""
    if inspect.isgeneratorfunction(handler) or inspect.isasyncgenfunction(handler):
        raise ConfigError(f"The handler is a generator: calling it with {takes} would run nothing of it. Take out `yield`.")
    try:
        inspect.signature(handler).bind(None, None)
    except TypeError as error:
        raise ConfigError(f"The handler has to take two arguments, {takes}: {error}.") from error
    except ValueError:  # what is built in does not tell
        return


def refuse_coroutine(handler: Callable[..., Any]) -> None:
    """Raise ConfigError for an `async def` where nobody would await it."""
    call = getattr(handler, "__call__", None)  # noqa: B004 - of an object whose class defines it
    if inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(call):
        raise ConfigError("The handler is an `async def`, which only handlers of single events may be: @consumer.foreach.")


def refuse_answer(answer: object) -> None:
    """Raise HandlerError where a handler of batches has returned what it may have meant to be written, or awaited."""
    if inspect.iscoroutine(answer):
        answer.close()  # else Python warns that nobody has awaited it
    lazy = inspect.isawaitable(answer) or inspect.isgenerator(answer) or inspect.isasyncgen(answer)
    if lazy or type(answer).__name__ in _FRAMES:
        raise HandlerError(
            f"The handler of batches returned a {type(answer).__name__}, which nobody would write or wait for. Rows go through tx.write, "
            "tx.merge or tx.publish; the handler returns nothing."
        )


def mapping(positions: Columns | Literal["auto"] | None) -> str:
    """Where positions come from, in a form that can be compared."""
    if not isinstance(positions, Columns):
        return "none" if positions is None else "auto"
    names = ("source", "topic", "partition", "sequence_number")
    return json.dumps({n: getattr(positions, n) for n in names}, sort_keys=True)


def horizon(retention: dt.timedelta | None, within: dt.timedelta | None) -> dt.timedelta | None:
    """How old a dead letter may be when it is reprocessed. Raises ConfigError where reservations are kept for a shorter time."""
    if retention is not None and within is not None and within > retention:
        raise ConfigError(
            f"Dead letters may be reprocessed for {within}, and reservations are kept for {retention}: a copy of a message that came after "
            "its reservation was purged would have its effect twice. Keep reservations longer, or shorten reprocess_within."
        )
    return within or retention


def names_of(value: str | Sequence[str] | None) -> tuple[str, ...]:
    """One name, several, or none, as a tuple."""
    return () if value is None else (value,) if isinstance(value, str) else tuple(value)
