"""Simulated deaths of a job, and a clock that stands still.

A job dies right before a step of the store, right before a line of the user's function, or after it. A death is an exception that no code
should catch. Open transactions end as they do when a connection is lost. A death is no SIGKILL: `finally` blocks run. The library's own
tests use real kills.

The clock is for one function: `datetime` and `time` in its module return a time that the kit chose. Nothing outside that module sees it.
Time from elsewhere (SQL's now(), Spark's current_timestamp()) goes on. kit.py calls this module.
"""

from __future__ import annotations

import datetime as dt
import inspect
import linecache
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any
from unittest import mock


class Died(BaseException):
    """The process ended here."""


@dataclass(frozen=True)
class Death:
    """One place to die at: the first time that a batch reaches a step, or one visit of a line."""

    step: str | None = None  # a name of the store's steps
    line: tuple[str, int] | None = None  # file and number
    visit: int = 1  # of that line in the batch

    def __str__(self) -> str:
        if self.step is not None:
            return f"right before the step {self.step!r}"
        if self.line is not None:
            again = f" a {self.visit}. time" if self.visit > 1 else ""
            return f"right before line {self.line[1]}{again}, `{linecache.getline(*self.line).strip()}`"
        return "after the batch, before Spark knew of its end"


AFTERWARDS = Death()
"""The batch is done, and nobody has heard of it."""


def file_of(function: Any) -> str | None:
    """Return the file of the user's function; None if the function is not Python."""
    code = getattr(plain(function), "__code__", None)
    return code.co_filename if isinstance(code, CodeType) else None


@contextmanager
def watched(file: str | None, on_line: Callable[[int], None]) -> Iterator[None]:
    """Inside the block, call a function right before each line of this file runs in this thread."""

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code.co_filename != file:
            return None
        if event == "line":
            on_line(frame.f_lineno)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


class _Kind(type):
    """What is a date or a time is an instance of the standing class, too."""

    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, cls.__mro__[1])


class _Standing:
    """A module of which some names are others."""

    def __init__(self, module: Any, **names: Any) -> None:
        self._module = module
        self.__dict__.update(names)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _names(moment: dt.datetime) -> dict[int, Any]:
    """id of a thing of the clock -> what stands in for it."""

    class Date(dt.date, metaclass=_Kind):
        @classmethod
        def today(cls) -> Any:
            return moment.date()

    class DateTime(dt.datetime, metaclass=_Kind):
        @classmethod
        def now(cls, tz: dt.tzinfo | None = None) -> Any:
            return moment.astimezone(tz) if tz else moment.replace(tzinfo=None)

        @classmethod
        def utcnow(cls) -> Any:
            return moment.replace(tzinfo=None)

        today = now

    seconds = moment.timestamp()
    told = {"time": lambda: seconds, "time_ns": lambda: int(seconds * 1e9)}
    found = {id(dt.date): Date, id(dt.datetime): DateTime, id(dt): _Standing(dt, date=Date, datetime=DateTime)}
    return {**found, id(time): _Standing(time, **told), id(time.time): told["time"], id(time.time_ns): told["time_ns"]}


def plain(function: Any) -> Any:
    """Return the Python function behind a decorated function, a partial, a method or a callable object."""
    found = inspect.unwrap(function)
    found = getattr(found, "func", found)  # functools.partial
    return found if hasattr(found, "__globals__") else getattr(type(found).__call__, "__func__", type(found).__call__)


@contextmanager
def standing(function: Callable[..., Any], moment: dt.datetime) -> Iterator[None]:
    """Inside the block, the module of the function sees this moment (with a time zone) as the current time."""
    names, known = _names(moment), getattr(plain(function), "__globals__", {})
    with mock.patch.dict(known, {name: names[id(value)] for name, value in known.items() if id(value) in names}):
        yield
