"""What reads a range of a log again by position, for `consumer.register_log_reader`: the part that is the same for every broker."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from typing import Any

import pyarrow as pa

from dedup.core.rows import frame_of


class AnyLogReader(ABC):
    """Call it with source, topic, partition, first and last position."""

    arrow = False
    """Whether a call gives Arrow tables also where a Spark session is active: for handlers that take them."""

    def __call__(self, source: str, topic: str, partition: int, first: int, last: int) -> Any:
        """The events of these positions that the log still has, in order: a DataFrame where a Spark session is active, else an Arrow table.

        Raises:
            IncarnationChanged: the partition ends before `last`: this is not the one that those positions were read from.
            SourceUnavailable: the broker does not answer.
        """
        found = self.read(topic, partition, first, last)
        session = None if self.arrow else _session()
        return found if session is None else frame_of(session, found)

    @abstractmethod
    def read(self, topic: str, partition: int, first: int, last: int) -> pa.Table:
        """Read as a call does, but always return an Arrow table."""

    @abstractmethod
    def first_kept(self, source: str, topic: str, partition: int) -> int:
        """The first position that the log still has."""


def _session() -> Any:
    """The Spark session of this process, if it has one; asks without importing Spark."""
    loaded = sys.modules.get("pyspark.sql")
    return None if loaded is None else loaded.SparkSession.getActiveSession()
