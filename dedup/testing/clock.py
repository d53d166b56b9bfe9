"""A clock that stands still, for one function: what its module knows as `datetime` and `time` tells a time that the kit chose.

Nothing outside that module sees it. Time that comes from elsewhere (SQL's now(), Spark's current_timestamp()) goes on.
"""

from __future__ import annotations

import datetime as dt
import inspect
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock


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
    """The Python function behind a decorated one, a partial, a method, or an object that can be called."""
    found = inspect.unwrap(function)
    found = getattr(found, "func", found)  # functools.partial
    return found if hasattr(found, "__globals__") else getattr(type(found).__call__, "__func__", type(found).__call__)


@contextmanager
def standing(function: Callable[..., Any], moment: dt.datetime) -> Iterator[None]:
    """Within, this moment (aware) is what the module of the function takes for now."""
    names, known = _names(moment), getattr(plain(function), "__globals__", {})
    with mock.patch.dict(known, {name: names[id(value)] for name, value in known.items() if id(value) in names}):
        yield
