"""Readers that stay open between the tasks of one Python worker. Each process has its own; nothing is shared after a fork.

Only exclusive ones (with an owner level) stay: an idle one that reads beside others would count against the five that the service allows
per partition and consumer group.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from dedup.eventhub.reader import PartitionReader, Receive
from dedup.eventhub.settings import Connection

IDLE_SECONDS = 30.0

Key = tuple[Connection, int, Receive]

_idle: dict[Key, tuple[PartitionReader, float]] = {}
_lock = threading.Lock()
_owner = os.getpid()
_sweeper: threading.Thread | None = None


@contextmanager
def borrowed(connection: Connection, partition: int, options: Receive) -> Iterator[PartitionReader]:
    """A reader of this partition: the one that was left here, if there is one, else a new one. It is kept if all went well."""
    key = (connection, partition, options)
    reader = _take(key) or PartitionReader(connection, partition, options)
    try:
        yield reader
    except BaseException:
        reader.close()
        raise
    if options.level is None:
        reader.close()
    else:
        _keep(key, reader)


def close_all() -> None:
    """Close what is idle in this process."""
    with _lock:
        readers = [reader for reader, _ in _idle.values()]
        _idle.clear()
    for reader in readers:
        reader.close()


def _take(key: Key) -> PartitionReader | None:
    _after_fork()
    with _lock:
        return _idle.pop(key, (None, 0.0))[0]


def _keep(key: Key, reader: PartitionReader) -> None:
    global _sweeper
    with _lock:
        before = _idle.pop(key, None)
        _idle[key] = (reader, time.monotonic() + IDLE_SECONDS)
        if _sweeper is None:
            _sweeper = threading.Thread(target=_sweep, daemon=True, name="eventhub-idle")
            _sweeper.start()
    if before is not None:
        before[0].close()


def _after_fork() -> None:
    """A child has its parent's readers without their threads: it forgets them."""
    global _owner, _sweeper, _lock
    if _owner != os.getpid():
        _owner, _sweeper, _lock = os.getpid(), None, threading.Lock()
        _idle.clear()


def _sweep() -> None:
    while True:
        time.sleep(IDLE_SECONDS / 6)
        now = time.monotonic()
        with _lock:
            old = [key for key, (_, until) in _idle.items() if until < now]
            readers = [_idle.pop(key)[0] for key in old]
        for reader in readers:
            reader.close()
