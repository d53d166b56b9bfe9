"""The reserved keys of one consumer: what a probe asks instead of the ledger table.

Sorted runs of (128-bit key, payload hash, day). New keys are in memory, 26 bytes each, in runs that are merged so that there are few. Once
there are FLUSH_ROWS of them they go to a file, and such files are joined into one of RUN_ROWS; these stay as they are until a purge has
dropped all of their days. Of a file two bytes a key are in memory; its pages are read when a key may be there (key_files.py).

Called by the consumer state, which fills it from the ledger and from nothing else.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dedup.core.keys import Bools, Places, Words, by_key, find_keys, key_words
from dedup.delta.key_files import HELD, I64, DamagedKeys, Hits, KeptKeys, KeyFolder, KeyList, KeyRows, StoredRun

log = logging.getLogger("dedup")

FLUSH_ROWS = 1_000_000
"""Keys in memory, 26 MB, from which on they go to a file: what a start reads of the ledger at most."""

RUN_ROWS = 1 << 24
"""Keys of a large file, 436 MB: a probe asks one filter for each."""

MOST_SMALL = 16
"""Small files; more are merged."""

SLICE_ROWS = 1_000_000
"""Keys that are in memory while runs are merged into a file."""


@dataclass(eq=False)
class SortedRun:
    """Keys in memory."""

    rows: KeyRows
    dead: Bools | None = None  # which were freed; None: none

    def __len__(self) -> int:
        return len(self.rows)

    def find(self, high: Words, low: Words) -> Hits:
        """Which keys are here and not freed."""
        at, found = find_keys(self.rows.high, self.rows.low, high, low)
        if self.dead is not None:
            found[found] = ~self.dead[at[found]]
        rows = at[found]
        return Hits(found, rows, self.rows.payload[rows], self.rows.day[rows])

    def free(self, rows: Places) -> None:
        """Count these rows no more."""
        self.dead = np.zeros(len(self), dtype=bool) if self.dead is None else self.dead
        self.dead[rows] = True

    def count(self, since: int) -> int:
        """Keys of this day and later ones, and those that letters hold."""
        late = self.rows.day >= since
        return int(np.count_nonzero(late if self.dead is None else late & ~self.dead))

    def cuts(self, bounds: Words) -> Places:
        """The row of the first key whose first half is not below each bound."""
        return np.searchsorted(self.rows.high, bounds)

    def part(self, first: int, end: int) -> KeyRows:
        """These rows, without those that were freed."""
        rows = self.rows[first:end]
        return rows if self.dead is None else rows[~self.dead[first:end]]


Run = SortedRun | StoredRun


class KeyIndex:
    """Set of keys with payload hash, day, and whether a letter holds them. Not picklable: it is made from the ledger.

    Args:
        folder: of files; None: files end with this process.
        stored: files that were opened there.
        flush_rows, run_rows: FLUSH_ROWS and RUN_ROWS if None.
    """

    def __init__(
        self,
        folder: KeyFolder | None = None,
        stored: Sequence[StoredRun] = (),
        *,
        flush_rows: int | None = None,
        run_rows: int | None = None,
    ) -> None:
        self._folder, self._stored = folder or KeyFolder(), list(stored)
        self._tail: list[SortedRun] = []
        self._flush_rows, self._run_rows = flush_rows or FLUSH_ROWS, run_rows or RUN_ROWS
        self._patience = 0  # keys in memory after which writing is tried again
        self._since = 0  # the first day that was not purged
        self._gone: list[str] = []  # files that the next list does not name
        self._listed = {run.name for run in stored}
        self._joining: Joining | None = None

    def __len__(self) -> int:
        return sum(run.count(self._since) for run in self._runs)

    @property
    def _runs(self) -> list[Run]:
        return [*self._stored, *self._tail]

    def add(self, keys: pa.Array | pa.ChunkedArray, payload: npt.ArrayLike, day: npt.ArrayLike) -> int:
        """Take in keys; those already known keep what they have, unless it is of an earlier day. Returns how many were taken in.

        A process that forgot a purged key reserves it again, perhaps before the rows of the purge are dropped. The next purge must not take
        the old day for the new one.

        Args:
            day: when each was reserved, or one for all; HELD for those that letters hold.

        Raises:
            DamagedKeys: a file has to be made again.
        """
        # A purge is of what was reserved before it: what comes later counts, whatever a clock or the purge's day says.
        rows = _rows(keys, payload, np.maximum(np.asarray(day, dtype=np.uint16), np.uint16(self._since)))
        new = rows[~self._known_since(rows)]
        if len(new):
            self._push(SortedRun(new))
        return len(new)

    def discard(self, keys: pa.Array | pa.ChunkedArray) -> int:
        """Forget keys; returns how many were known. Raises DamagedKeys."""
        high, low = _words(keys)
        order, known = by_key(high, low), 0
        for run in self._runs:
            hits = run.find(high[order], low[order])
            if len(hits.rows):
                run.free(hits.rows)
                known += len(np.unique(hits.rows[hits.day >= self._since]))
        return known

    def forget_before(self, day: int) -> None:
        """Keys of earlier days than this one are not known any more, but for those that letters hold. Raises DamagedKeys."""
        if day <= self._since:
            return
        self._since = day
        over = [run for run in self._stored if min(run.days) < day and max(run.days.keys() - {HELD}) < day]
        if over and self._joining is not None:
            self._joining.abandon()
            self._joining = None
        held = [SortedRun(rows) for run in over if HELD in run.days for rows in self._merged([run], len(run) // SLICE_ROWS + 1)]
        self._gone += [run.name for run in over if run.name is not None]
        self._stored = [run for run in self._stored if run not in over]
        for run in held:
            self._push(run)

    def probe(self, keys: pa.Array | pa.ChunkedArray) -> tuple[Bools, I64, Bools]:
        """For each key: whether it is known, the payload hash it was reserved with (0 if unknown), and whether a letter holds it.

        Raises:
            DamagedKeys: a file has to be made again.
        """
        high, low = _words(keys)
        # Sorted questions walk the run once; random ones miss the cache at every step.
        order = by_key(high, low)
        known, payload, held = np.zeros(len(high), bool), np.zeros(len(high), np.int64), np.zeros(len(high), bool)
        for _, hits in self._found(high[order], low[order]):
            at = order[hits.found]
            known[at], payload[at], held[at] = True, hits.payload, hits.day == HELD
        return known, payload, held

    def keep(self, ledger: str, keyspace_since: int, seq: int, attempt: str) -> KeptKeys | None:
        """Write down that this is everything up to a decision, where enough is new; returns what was written down.

        Raises:
            DamagedKeys: another process has replaced files, or a file is not as it was written.

        Crash: the old list counts, or the new one.
        """
        names = {run.name for run in self._stored}
        if not self._folder.usable or (self._few and (self._patience or None in names or names == self._listed)):
            return None
        self._flush()
        files = {run.name: run.dead.tolist() for run in self._stored if run.name is not None}
        if self._tail or len(files) < len(self._stored):
            return None  # some are nowhere but in this process
        self._folder.require(files)
        listed = KeyList(ledger, keyspace_since, seq, attempt, files)
        self._folder.save(listed, self._gone)
        self._gone, self._listed = [], set(files)
        return KeptKeys(listed, tuple(self._stored))

    @property
    def _few(self) -> bool:
        return sum(map(len, self._tail)) < max(self._flush_rows, self._patience)

    def _known_since(self, rows: KeyRows) -> Bools:
        """Which of these are known from their day or a later one; those of an earlier day are freed."""
        known = np.zeros(len(rows), dtype=bool)
        for run, hits in self._found(rows.high, rows.low):
            earlier = hits.day < rows.day[hits.found]
            if earlier.any():
                run.free(hits.rows[earlier])
            known[hits.found] = ~earlier
        return known

    def _found(self, high: Words, low: Words) -> Iterator[tuple[Run, Hits]]:
        """Of each run that has some of these keys what is not purged."""
        for run in self._runs:
            hits = run.find(high, low)
            hits = hits.those(hits.day >= self._since)
            if len(hits.rows):
                yield run, hits

    def _push(self, run: SortedRun) -> None:
        self._tail.append(run)
        while len(self._tail) > 1 and len(self._tail[-2]) <= 2 * len(self._tail[-1]):
            last = [self._tail.pop(), self._tail.pop()]
            self._tail += [SortedRun(rows) for rows in self._merged(last, 1)]
        if not self._few:
            self._flush()

    def _flush(self) -> None:
        """Put the keys in memory into a file, and go on joining small ones; where there is no room, keys stay where they are."""
        try:
            try:
                self._store()
            except OSError as error:
                self._folder.failed(error)
                self._store()
            self._join_some()
            self._patience = 0
        except OSError as error:
            count = sum(map(len, self._tail))
            self._patience = 2 * count
            log.error(
                "%s known keys stay in memory, because no file can be written: %s. Make room, or choose another folder: "
                "DeltaStore(..., keys_folder=...).",
                f"{count:,}",
                error,
            )

    def _store(self) -> None:
        """One file in place of the keys in memory. Raises OSError; then they are still there."""
        if self._tail:
            joining = Joining(self._folder, self._tail, self._merged(self._tail, 1))
            made = joining.go_on(2)
            self._stored, self._tail = [*self._stored, *([made] if made else [])], []

    def _join_some(self) -> None:
        """One large file in place of small ones, some slices with each flush: no batch waits for all of it. Raises DamagedKeys."""
        small = [run for run in self._stored if len(run) < self._run_rows // 2]
        if self._joining is None and len(small) >= MOST_SMALL:
            rows = np.cumsum([len(run) for run in small])
            some = small[: max(2, int(np.searchsorted(rows, self._run_rows, "right")))]
            self._joining = Joining(self._folder, some, self._merged(some, sum(map(len, some)) // SLICE_ROWS + 1))
        joining = self._joining
        if joining is None:
            return
        try:
            made = joining.go_on(2 if len(small) < 2 * MOST_SMALL else len(small) * SLICE_ROWS)
        except OSError as error:
            self._joining = None
            self._folder.failed(error)
            return
        except DamagedKeys:
            self._joining = None
            raise
        if joining.over:
            self._joining = None
            self._gone += [run.name for run in joining.stored if run.name is not None]
            self._stored = [*(run for run in self._stored if run not in joining.stored), *([made] if made else [])]

    def _merged(self, runs: Sequence[Run], pieces: int) -> Iterator[KeyRows]:
        """All keys of these runs that are still known, in ascending order, in so many pieces."""
        bounds = np.array([(i << 64) // pieces for i in range(1, pieces)], dtype=np.uint64)
        cuts = [[0, *run.cuts(bounds).tolist(), len(run)] for run in runs]
        for i in range(pieces):
            rows = KeyRows.concat([run.part(cut[i], cut[i + 1]) for run, cut in zip(runs, cuts, strict=True)])
            rows = rows[rows.day >= self._since] if self._since else rows
            if len(rows):
                yield rows[by_key(rows.high, rows.low)]


class Joining:
    """A file in place of runs, as far as it is written. While that lasts, the runs count."""

    def __init__(self, folder: KeyFolder, runs: Sequence[Run], slices: Iterator[KeyRows]) -> None:
        self.stored = [run for run in runs if isinstance(run, StoredRun)]
        self._slices, self.over = slices, False
        self._dead = [run.dead for run in self.stored]
        self._file = folder.new(sum(map(len, runs)))

    def go_on(self, slices: int) -> StoredRun | None:
        """Write so many slices more; the file once all are written, without keys that were freed meanwhile.

        Raises:
            OSError, DamagedKeys: the file is gone; the runs are there.
        """
        try:
            for rows in itertools.islice(self._slices, slices):
                self._file.add(rows)
                slices -= 1
            self.over = slices > 0
            made = self._file.finish() if self.over else None
        except BaseException:
            self.abandon()
            raise
        if made is not None:
            self._free_again(made)
        return made

    def _free_again(self, made: StoredRun) -> None:
        """What was freed while the file was written."""
        for run, dead in zip(self.stored, self._dead, strict=True):
            made.free(made.find(*run.keys(np.setdiff1d(run.dead, dead))).rows)

    def abandon(self) -> None:
        """Delete the file."""
        self._file.abandon()


def _words(keys: pa.Array | pa.ChunkedArray) -> tuple[Words, Words]:
    if keys.null_count:
        raise ValueError(f"{keys.null_count} keys are null")
    return key_words(keys)


def _rows(keys: pa.Array | pa.ChunkedArray, payload: npt.ArrayLike, day: npt.ArrayLike) -> KeyRows:
    """The first of each key with the last of its days, in ascending order."""
    high, low = _words(keys)
    days = np.broadcast_to(np.asarray(day, dtype=np.uint16), len(high))
    order = by_key(high, low)
    rows = KeyRows(high, low, np.asarray(payload, dtype=np.int64), days)[order]
    first = np.flatnonzero(np.r_[True, (rows.high[1:] != rows.high[:-1]) | (rows.low[1:] != rows.low[:-1])][: len(rows)])
    if len(first) == len(rows):
        return rows
    return replace(rows[first], day=np.maximum.reduceat(rows.day, first))
