"""A clock that a test sets, for code that reads the time by `dt.datetime.now`."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from typing import Any


def showing(time: Callable[[Any], dt.datetime]) -> Any:
    """What to put in place of a module's `dt`: the same, but that `now` is this function of the time zone."""

    class Shown(dt.datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return time(tz)

    names = {name: getattr(dt, name) for name in dir(dt) if not name.startswith("_")} | {"datetime": Shown}
    return type("module", (), names)
