"""Python's search for cycles while events come in by the thousand: each event is a dozen objects, none of them in a cycle.

Each search looks at every young object, so that with Python's own setting a fifth of the time of receiving goes there. Imports no driver.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

YOUNG = 50_000
"""Objects made and not freed, after which the youngest are searched; Python's own is 700. A few thousand events."""

_lock = threading.Lock()
_open = 0
_before = gc.get_threshold()


@contextmanager
def searched() -> Iterator[None]:
    """While any such block is open in this process, cycles are searched for more seldom. A program that chose even fewer is left alone.

    What is in no cycle is freed at once as ever; what is in one waits longer, by a few tens of megabytes at most.
    """
    _enter()
    try:
        yield
    finally:
        _leave()


def _enter() -> None:
    global _open, _before
    with _lock:
        if _open == 0:
            _before = gc.get_threshold()
            if 0 < _before[0] < YOUNG:
                gc.set_threshold(YOUNG, *_before[1:])
        _open += 1


def _leave() -> None:
    global _open
    with _lock:
        _open -= 1
        if _open == 0 and gc.get_threshold() == (YOUNG, *_before[1:]):  # nobody has chosen another one meanwhile
            gc.set_threshold(*_before)
