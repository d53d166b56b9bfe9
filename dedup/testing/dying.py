"""Where a job can die, and dying there: right before a step of the store, right before a line of the user's function, or after it.

A death is an exception that nobody should catch: open transactions end as they do when a connection is lost. It is no SIGKILL: blocks of
`finally` run. What a real kill does to the library itself is shown by its own tests.
"""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

from dedup.testing.clock import plain


class Died(BaseException):
    """The process ended here."""


@dataclass(frozen=True)
class Death:
    """One place to die at: a step the first time that a batch comes there, a line at some visit."""

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
    """The file whose lines are the user's; None where there is no Python to look at."""
    code = getattr(plain(function), "__code__", None)
    return code.co_filename if isinstance(code, CodeType) else None


@contextmanager
def watched(file: str | None, on_line: Callable[[int], None]) -> Iterator[None]:
    """Within, tell of each line of this file right before it runs, in this thread."""

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
