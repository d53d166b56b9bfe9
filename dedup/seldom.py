"""Python's search for cycles while events come in, or messages go out, by the thousand: objects by the dozen, none of them in a cycle.

Each search looks at every young object, and now and then at all of them, so that with Python's own setting a fifth of the time of receiving
goes there. Here the clock says when, so that what waits in a cycle to be closed, sockets above all, does not wait long. Imports no driver.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

YOUNG = 50_000
"""Objects made and not freed, after which the youngest are searched; Python's own is 700. A few thousand events."""

SECONDS = 2.0
"""Between two searches of all objects."""

_lock = threading.Lock()
_open = 0
_before = gc.get_threshold()
_over = threading.Event()


@contextmanager
def searched() -> Iterator[None]:
    """While any such block is open in this process, cycles are searched for by the clock. A program that chose fewer searches keeps them.

    What is in no cycle is freed at once as ever.
    """
    _enter()
    try:
        yield
    finally:
        _leave()


def _enter() -> None:
    global _open, _before, _over
    with _lock:
        _open += 1
        if _open > 1:
            return
        _before = gc.get_threshold()
        if gc.isenabled() and 0 < _before[0] < YOUNG:
            gc.set_threshold(YOUNG, *_before[1:])
            _over = threading.Event()
            threading.Thread(target=_search, args=(_over,), daemon=True, name="dedup-cycles").start()


def _leave() -> None:
    global _open
    with _lock:
        _open -= 1
        if _open == 0:
            _over.set()
            if gc.get_threshold() == (YOUNG, *_before[1:]):  # nobody has chosen another one meanwhile
                gc.set_threshold(*_before)


def _search(over: threading.Event) -> None:
    while not over.wait(SECONDS):
        gc.collect()
