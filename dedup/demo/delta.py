"""The demo on Delta: ledger and sink in one folder on local disk."""

from __future__ import annotations

import shlex
from pathlib import Path

import pyarrow as pa
from deltalake import DeltaTable

from dedup import DeltaStore
from dedup.demo.flights import FLIGHT
from dedup.demo.target import CONSUMER
from dedup.store import Store


class DeltaTarget:
    """State in `lake/dedup`, sink in `lake/departures`."""

    sink = CONSUMER

    def __init__(self, lake: Path) -> None:
        self._path = lake / CONSUMER
        self._state = str(lake / "dedup")

    def prepare(self) -> None:
        """Create the sink. The folder is new: main.py has emptied it. Crash: nothing that matters; the next demo starts anew."""
        self._path.mkdir(parents=True)
        DeltaTable.create(str(self._path), FLIGHT)

    def store(self) -> Store:
        """The store of `lake/dedup`."""
        return DeltaStore(self._state, tables={self.sink: str(self._path)})

    def rows(self) -> pa.Table:
        """All rows of the sink, read by deltalake."""
        return DeltaTable(str(self._path)).to_pyarrow_table()

    def where(self) -> dict[str, str]:
        """The two folders."""
        return {"sink": str(self._path), "state": self._state}

    def command(self, words: str) -> str:
        """With the folder of the state."""
        return f"dedup {words} --store {shlex.quote(self._state)}"
