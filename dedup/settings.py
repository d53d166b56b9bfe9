"""A consumer's settings: what is refused, and how they are written down. Pure."""

from __future__ import annotations

import datetime as dt
import inspect
import json
from collections.abc import Callable, Sequence
from typing import Any, Literal

from checkpoint.errors import ConfigError
from dedup.envelope import Columns


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
    try:
        inspect.signature(handler).bind(None, None)
    except TypeError as error:
        raise ConfigError(f"The handler has to take two arguments, {takes}: {error}.") from error
    except ValueError:  # what is built in does not tell
        return


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
