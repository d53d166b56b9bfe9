"""Files of keys beside very many reservations, simulated: the key index's own merging runs on numbers of keys, without a key.

What `KeyIndex` decides, it decides by how many keys its runs have. So the index here is the real one, with rows that take no memory and
files that only count. Pure. Called by the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dedup.core.bloom import memory
from dedup.delta.key_files import PAGE, PAGE_KEYS, Hits, KeyFolder, KeyList, KeyRows, NewFile, StoredRun
from dedup.delta.keys import KeyIndex, Run, SortedRun

IN_MEMORY = PAGE.itemsize // PAGE_KEYS
"""Bytes of a key that is in no file yet; in a page it has the same columns."""

_PAGE_MEMORY = 16 + 4
"""Bytes of a page's first key and checksum."""


class KeyFiles(NamedTuple):
    """What there is once so many keys were reserved.

    Args:
        sizes: keys of each file, the largest first.
        rest: keys that are in no file.
        written: keys that were written to files up to now, joins included.
    """

    sizes: tuple[int, ...]
    rest: int
    written: int

    @property
    def opened(self) -> int:
        """Bytes that a start reads, and the process keeps: filters, first keys and checksums."""
        return sum(_opened(rows) for rows in self.sizes)

    @property
    def memory(self) -> int:
        """Bytes in the process: what is opened, and keys that are in no file."""
        return self.opened + IN_MEMORY * self.rest

    @property
    def disk(self) -> int:
        """Bytes of the files."""
        return sum(-(-rows // PAGE_KEYS) * PAGE.itemsize + _opened(rows) for rows in self.sizes)


def _opened(rows: int) -> int:
    return memory(rows) + _PAGE_MEMORY * -(-rows // PAGE_KEYS)


def reserved(keys: int, step: int) -> KeyFiles:
    """The files after so many keys, reserved `step` at a time."""
    folder = CountingFolder()
    index = CountedIndex(folder)
    for done in range(0, keys, step):
        index.take(min(step, keys - done))
    sizes = sorted((len(run) for run in index._stored), reverse=True)
    return KeyFiles(tuple(sizes), sum(map(len, index._tail)), folder.written)


def _some(count: int) -> KeyRows:
    column: Any = range(count)
    return KeyRows(column, column, column, column)


class CountedIndex(KeyIndex):
    """Keys that are not there."""

    def take(self, count: int) -> None:
        """What a decision does with so many new keys."""
        self._push(SortedRun(_some(count)))
        self.keep("", 0, 0, "")

    def _merged(self, runs: Sequence[Run], pieces: int) -> Iterator[KeyRows]:
        rows = sum(map(len, runs))
        yield from (_some((i + 1) * rows // pieces - i * rows // pieces) for i in range(pieces))


class CountingFolder(KeyFolder):
    """A folder without files."""

    def __init__(self) -> None:
        super().__init__(Path())
        self.written = self._numbered = 0

    def new(self, capacity: int) -> NewFile:
        """A file that counts its rows."""
        self._numbered += 1
        return CountedFile(self, self._numbered)

    def save(self, listed: KeyList, gone: Iterable[str] = ()) -> None:
        """Nothing."""

    def require(self, files: Iterable[str]) -> None:
        """Nothing."""


class CountedFile(NewFile):
    """A file that has a number of rows."""

    def __init__(self, folder: CountingFolder, number: int) -> None:
        self.path, self._folder, self._rows = Path(f"{number}.keys"), folder, 0

    def add(self, rows: KeyRows) -> None:
        """Count them. Crash: nothing is kept."""
        self._rows += len(rows)
        self._folder.written += len(rows)

    def finish(self) -> StoredRun | None:
        """The file. Crash: nothing is kept."""
        nothing: Any = None
        return (
            CountedRun(self.path, self.path.name, self._rows, {}, nothing, nothing, nothing, np.zeros(0, np.int64)) if self._rows else None
        )

    def abandon(self) -> None:
        """Nothing. Crash: nothing is kept."""


class CountedRun(StoredRun):
    """Of which nobody asks for keys, and none is freed."""

    def find(self, high: Any, low: Any) -> Hits:
        """None of them."""
        none = np.zeros(0, np.int64)
        return Hits(np.zeros(len(high), bool), none, none, none.astype(np.uint16))

    def keys(self, rows: Any) -> tuple[Any, Any]:
        """None."""
        none = np.zeros(0, np.uint64)
        return none, none
