"""One partition, received by one client of azure-eventhub in a thread of its own, which goes on while Spark plans, up to a bound."""

from __future__ import annotations

import contextlib
import datetime as dt
import threading
import time
from collections import deque
from typing import Any

import pyarrow as pa
from azure.eventhub import EventHubConsumerClient

from dedup.eventhub import rows
from dedup.eventhub.settings import Connection

AHEAD = 32 * 1024 * 1024
"""Bytes of events that wait for the reader, one batch more at most; then the client waits."""

Position = int | str | dt.datetime


class Broken(Exception):
    """The client gave up; `error` is what it said."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class Receiver:
    """Begins at once. Whoever made it must close it.

    Args:
        connection: which hub.
        partition: its id.
        first: where to begin, that event included.
        prefetch: events that the service may send ahead, and the most in one batch.
        level: owner level; None reads beside others.
    """

    def __init__(self, connection: Connection, partition: int, first: Position, prefetch: int, level: int | None) -> None:
        self._waiting = _Waiting()
        self._place = (connection.source, connection.hub, partition)
        self._closed = threading.Event()
        self.broken = False
        self._client = connection.client(retry_total=0)  # a retry of its own would begin at an offset, ours at a sequence number
        options = {
            "on_event_batch": self._take,
            "on_error": self._fail,
            "partition_id": str(partition),
            "starting_position": first,
            "starting_position_inclusive": True,
            "prefetch": prefetch,
            "max_batch_size": prefetch,
            "owner_level": level,
        }
        self._thread = threading.Thread(target=_run, args=(self._client, options, self), daemon=True, name=f"eventhub-{partition}")
        self._thread.start()

    def get(self, seconds: float) -> pa.RecordBatch | None:
        """The next batch, rows of rows.SCHEMA; None if none comes within so many seconds. Raises Broken."""
        found = self._waiting.get(seconds)
        if isinstance(found, Exception):
            raise Broken(found)
        return found

    def close(self) -> None:
        """End the link; does not wait until it has ended, which takes the client a second."""
        self._closed.set()
        threading.Thread(target=_end, args=(self._client, self._thread), daemon=True).start()

    def wait_closed(self, seconds: float) -> None:
        """Wait until the link has ended."""
        self._thread.join(seconds)

    def _take(self, context: Any, events: list[Any]) -> None:
        self._put(rows.batch(events, *self._place))  # at once: rows take a tenth of the memory

    def _fail(self, context: Any, error: Exception) -> None:
        self.broken = True
        self._put(error)
        self.close()  # the client would try again, and spin until then

    def _put(self, item: pa.RecordBatch | Exception) -> None:
        while not self._closed.is_set():
            if self._waiting.put(item, 0.2):
                return


class _Waiting:
    """Batches, first in, first out, bounded by their bytes."""

    def __init__(self) -> None:
        self._items: deque[tuple[pa.RecordBatch | Exception, int]] = deque()
        self._bytes = 0
        self._changed = threading.Condition()

    def put(self, item: pa.RecordBatch | Exception, seconds: float) -> bool:
        """False if there was no room for so many seconds."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._bytes < AHEAD, seconds):
                return False
            size = 0 if isinstance(item, Exception) else item.nbytes
            self._items.append((item, size))
            self._bytes += size
            self._changed.notify_all()
            return True

    def get(self, seconds: float) -> pa.RecordBatch | Exception | None:
        """None if there was nothing for so many seconds."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._items, seconds):
                return None
            item, size = self._items.popleft()
            self._bytes -= size
            self._changed.notify_all()
            return item


def _run(client: EventHubConsumerClient, options: dict[str, Any], receiver: Receiver) -> None:
    try:
        client.receive_batch(**options)
    except Exception as error:  # noqa: BLE001 - it is the reader's thread that raises it
        receiver._fail(None, error)


def _end(client: EventHubConsumerClient, thread: threading.Thread) -> None:
    while thread.is_alive():  # one that has not begun yet would not notice the first time
        with contextlib.suppress(Exception):
            client.close()
        thread.join(1.0)


def backoff(attempt: int) -> None:
    """Wait before the next attempt: 0.1 s, doubled each time, up to 5 s."""
    time.sleep(min(5.0, 0.1 * 2**attempt))
