"""Log records as JSON, one object a line, for what collects logs. `dedup --log-json` and programs of users write the same lines.

`about` says of which consumer, batch and epoch the records of a block are: the code that logs need not know. Each record goes through
`redact`, so that passwords in the text of an error stay out of the logs.
"""

from __future__ import annotations

import datetime as dt
import json
import logging
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any, TextIO

from deadletter.redact import redact

FIELDS = ("consumer", "batch", "epoch", "counts", "seconds")
"""What a line has of its record where the record has it. Others do not get into a line: a secret may be among them."""

_ABOUT: ContextVar[Mapping[str, Any]] = ContextVar("dedup_about", default=MappingProxyType({}))


def json_lines(stream: TextIO | None = None) -> logging.Handler:
    """Make a handler for Python's logging that writes each record as one JSON object on a line.

    Give it to the root logger: `logging.basicConfig(level="INFO", handlers=[dedup.logs.json_lines()])`. Then the records of all libraries
    are such lines, and those that your handler of events logs name the consumer and the batch, too.

    A line has `time` (RFC 3339, UTC), `level`, `logger` and `message`; `consumer`, `batch` (the batch's number) and `epoch` where they are
    known; `counts` (rows by outcome) and `seconds` where a batch is committed; `error_type`, `error_message` and `traceback` where there
    is an error.

    Args:
        stream: where to write. Default: standard error.
    """
    handler = logging.StreamHandler(stream)
    handler.addFilter(_tell_about)
    handler.setFormatter(JsonLines())
    return handler


@contextmanager
def about(**fields: Any) -> Iterator[None]:
    """Say what the records are about that this thread, or this task of asyncio, logs in the block: names of FIELDS."""
    token = _ABOUT.set({**_ABOUT.get(), **fields})
    try:
        yield
    finally:
        _ABOUT.reset(token)


def _tell_about(record: logging.LogRecord) -> bool:
    """Note on the record what it is about; in the thread that logs, since a formatter may run in another one."""
    for name, value in _ABOUT.get().items():
        if not hasattr(record, name):
            setattr(record, name, value)
    return True


class JsonLines(logging.Formatter):
    """A record as one line of JSON in ASCII, without secrets."""

    def format(self, record: logging.LogRecord) -> str:
        """The line, without its end."""
        known = {name: value for name in FIELDS if (value := getattr(record, name, None)) is not None}
        line = {
            "time": _rfc3339(record.created),
            "level": record.levelname,
            "logger": record.name,
            "message": redact(record.getMessage()),
            **known,
            **_error(record),
        }
        return json.dumps(line, default=str)


def _rfc3339(seconds: float) -> str:
    return dt.datetime.fromtimestamp(seconds, dt.UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _error(record: logging.LogRecord) -> dict[str, str]:
    """The error that is logged with its stack; else the one that is in the message, which says nothing of its stack."""
    arguments = record.args if isinstance(record.args, tuple) else ()
    error = record.exc_info[1] if record.exc_info else next((one for one in arguments if isinstance(one, BaseException)), None)
    if error is None:
        return {}
    told = {"error_type": _name_of(type(error)), "error_message": redact(str(error))}
    return {**told, "traceback": redact("".join(traceback.format_exception(error)))} if record.exc_info else told


def _name_of(kind: type[BaseException]) -> str:
    """As Python writes it in a traceback."""
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
