"""Connections that wait for the server until a point in time, and no longer.

PostgreSQL's own time-outs cannot promise that: a backend that is stopped keeps its connection open and answers nothing.
"""

from __future__ import annotations

import math
import time
from collections.abc import Generator
from typing import Any, TypeVar

import psycopg
from psycopg.rows import Row

T = TypeVar("T")


class NoAnswer(psycopg.OperationalError):
    """The server did not answer in time. Whether it did what was asked is not known."""


def _limited(steps: Generator[Any, Any, T], until: float) -> Generator[Any, Any, T]:
    """psycopg's steps of an exchange; psycopg takes one at least ten times a second, also while nothing comes. Raises NoAnswer."""
    try:
        wanted = next(steps)
        while True:
            if time.monotonic() >= until:
                raise NoAnswer("the server did not answer in time")
            wanted = steps.send((yield wanted))
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]


class Limited(psycopg.Connection[Row]):
    """For threads. A connection that raised NoAnswer is to be closed."""

    until: float = math.inf
    """Of time.monotonic(): when to give up."""

    def wait(self, gen: Any, *options: Any, **named: Any) -> Any:
        """What psycopg calls for every exchange with the server. Raises NoAnswer."""
        return super().wait(_limited(gen, self.until), *options, **named)


class AsyncLimited(psycopg.AsyncConnection[Row]):
    """For asyncio. A connection that raised NoAnswer is to be closed."""

    until: float = math.inf
    """Of time.monotonic(): when to give up."""

    async def wait(self, gen: Any, *options: Any, **named: Any) -> Any:
        """What psycopg calls for every exchange with the server. Raises NoAnswer."""
        return await super().wait(_limited(gen, self.until), *options, **named)
