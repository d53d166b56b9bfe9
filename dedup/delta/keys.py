"""The reserved keys of one consumer in memory: what a probe asks instead of the ledger table.

Sorted runs of (128-bit key, payload hash, held), merged so that there are few of them; a probe is one binary search per run.
25 bytes a key. Runs above `spill_rows` live in memory-mapped temporary files, so that the system can page them out.
Called by the consumer state, which fills it from the ledger and from nothing else.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dedup.core.keys import by_key, find_keys, key_words

U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]

SPILL_ROWS = 8_000_000
"""Rows of a run (200 MB) above which it is kept in a file."""


def _words(keys: pa.Array | pa.ChunkedArray) -> tuple[U64, U64]:
    if keys.null_count:
        raise ValueError(f"{keys.null_count} keys are null")
    return key_words(keys)


@dataclass(frozen=True)
class SortedRun:
    """Keys in ascending order without repeats, and what belongs to each."""

    high: U64
    low: U64
    payload: I64
    held: Bool
    dead: Bool | None = None  # which were freed; None: none

    def __len__(self) -> int:
        return len(self.high)

    def find(self, high: U64, low: U64) -> tuple[Bool, npt.NDArray[np.intp]]:
        """Which keys are here, and where."""
        at, found = find_keys(self.high, self.low, high, low)
        if self.dead is not None:
            found[found] = ~self.dead[at[found]]
        return found, at

    def living(self) -> SortedRun:
        """Without those that were freed."""
        kept = None if self.dead is None else ~self.dead
        return self if kept is None else SortedRun(self.high[kept], self.low[kept], self.payload[kept], self.held[kept])


class KeyIndex:
    """Set of keys with payload hash and held flag. Not picklable: it is rebuilt from the ledger."""

    def __init__(self, spill_rows: int = SPILL_ROWS) -> None:
        self._runs: list[SortedRun] = []
        self._spill_rows = spill_rows

    def __len__(self) -> int:
        return sum(len(run) - (0 if run.dead is None else int(run.dead.sum())) for run in self._runs)

    def add(self, keys: pa.Array | pa.ChunkedArray, payload: npt.ArrayLike, held: bool | npt.ArrayLike = False) -> int:
        """Take in keys; those already known keep what they have, of repeats the first counts. Returns how many were new."""
        high, low = _words(keys)
        order = by_key(high, low)
        high, low = high[order], low[order]
        first = np.r_[True, (high[1:] != high[:-1]) | (low[1:] != low[:-1])][: len(high)]
        values = np.asarray(payload, dtype=np.int64)[order][first]
        flags = np.broadcast_to(np.asarray(held, dtype=bool), len(order))[order][first]
        high, low = high[first], low[first]
        new = ~self._known(high, low)
        run = SortedRun(high[new], low[new], values[new], flags[new])
        if len(run):
            self._push(run)
        return len(run)

    def discard(self, keys: pa.Array | pa.ChunkedArray) -> int:
        """Forget keys; returns how many were known."""
        high, low = _words(keys)
        before = len(self)
        for i, run in enumerate(self._runs):
            found, at = run.find(high, low)
            if found.any():
                dead = np.zeros(len(run), dtype=bool) if run.dead is None else run.dead
                dead[at[found]] = True
                self._runs[i] = replace(run, dead=dead)
        return before - len(self)

    def probe(self, keys: pa.Array | pa.ChunkedArray) -> tuple[Bool, I64, Bool]:
        """For each key: whether it is known, the payload hash it was reserved with (0 if unknown), and whether a letter holds it."""
        high, low = _words(keys)
        # Sorted questions walk the run once; random ones miss the cache at every step.
        order = by_key(high, low)
        known, payload, held = np.zeros(len(high), bool), np.zeros(len(high), np.int64), np.zeros(len(high), bool)
        for run in self._runs:
            found, at = run.find(high[order], low[order])
            hits = order[found]
            known[hits], payload[hits], held[hits] = True, run.payload[at[found]], run.held[at[found]]
        return known, payload, held

    def _known(self, high: U64, low: U64) -> Bool:
        known = np.zeros(len(high), dtype=bool)
        for run in self._runs:
            known |= run.find(high, low)[0]
        return known

    def _push(self, run: SortedRun) -> None:
        self._runs.append(run)
        while len(self._runs) > 1 and len(self._runs[-2]) <= 2 * len(self._runs[-1]):
            small, big = sorted((self._runs.pop().living(), self._runs.pop().living()), key=len)
            self._runs.append(self._merge(big, small))

    def _merge(self, big: SortedRun, small: SortedRun) -> SortedRun:
        at = find_keys(big.high, big.low, small.high, small.low)[0] + np.arange(len(small))
        from_big = np.ones(len(big) + len(small), dtype=bool)
        from_big[at] = False
        folder = tempfile.TemporaryDirectory(prefix="dedup-keys-") if len(from_big) > self._spill_rows else None

        def merged(name: str) -> Any:
            left, right = getattr(big, name), getattr(small, name)
            out = _array(folder.name if folder else None, name, left.dtype, len(from_big))
            out[from_big], out[at] = left, right
            return out

        run = SortedRun(merged("high"), merged("low"), merged("payload"), merged("held"))
        if folder:
            folder.cleanup()  # The mappings keep the files alive; a killed process leaves nothing behind.
        return run


def _array(folder: str | None, name: str, dtype: np.dtype[Any], length: int) -> npt.NDArray[Any]:
    if folder is None:
        return np.empty(length, dtype=dtype)
    return np.memmap(os.path.join(folder, name), dtype=dtype, mode="w+", shape=(length,))
