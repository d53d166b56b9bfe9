"""Signs of life while a batch runs, on a connection and a thread of their own.

Promises never to fail the batch: a beat that cannot be written is logged, and tried again at the next one.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import psycopg

from checkpoint.postgres.dsn import Connection
from checkpoint.postgres.sqlfiles import Statements
from dedup.postgres.connect import connect

log = logging.getLogger("dedup")


@contextmanager
def beating(dsn: str, sql: Statements, consumer: str, epoch: int, every: float, run_id: str = "") -> Iterator[None]:
    """Beat every `every` seconds until the block ends. A batch that is done before the first beat shows life by its commit.

    Args:
        run_id: of the process, where the epoch is shared.
    """
    stop = threading.Event()
    said = {"consumer": consumer, "epoch": epoch, **({"run_id": run_id} if run_id else {})}
    statement = sql["beat_member" if run_id else "beat"]
    thread = threading.Thread(target=_beat, args=(stop, dsn, statement, said, every), name=f"dedup heartbeat {consumer}", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(timeout=5)


def _beat(stop: threading.Event, dsn: str, statement: bytes, said: Mapping[str, Any], every: float) -> None:
    connection: Connection | None = None
    while not stop.wait(every):
        try:
            connection = connection or connect(dsn)
            connection.execute(statement, said)
        except psycopg.Error as error:
            log.warning("%s: no heartbeat: %s", said["consumer"], type(error).__name__)
            if connection:
                connection.close()
            connection = None
    if connection:
        connection.close()
