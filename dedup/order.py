"""Which events have to wait: the order of a sequence is kept, also behind a dead letter. Pure.

A sequence is the events of one partition with one sequence key. Called by pipeline/commit.py and pipeline/attempts.py.
"""

from __future__ import annotations

import copy

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dedup.index import Bools, Ints
from dedup.store import SEQUENCES

_SEQUENCE, _NO_TAILS = pa.binary(16), SEQUENCES.empty_table()

_NEVER = np.iinfo(np.int64).max


class Order:
    """The sequences of a chunk's rows, and from which row on each of them is blocked."""

    def __init__(self, sequences: pa.Array | pa.ChunkedArray | None, rows: int) -> None:
        if sequences is None:
            sequences = pa.nulls(rows, pa.binary(16))
        whole = sequences.combine_chunks() if isinstance(sequences, pa.ChunkedArray) else sequences
        encoded = (whole if whole.type == _SEQUENCE else whole.cast(_SEQUENCE)).dictionary_encode()
        self.known = encoded.dictionary
        codes = encoded.indices.fill_null(-1) if whole.null_count else encoded.indices
        self._codes: Ints = codes.to_numpy(zero_copy_only=False).astype(np.int64)
        self._from = np.full(len(self.known) + 1, _NEVER, dtype=np.int64)  # the last one is that of rows without a sequence
        self.tails = _NO_TAILS

    def copy(self) -> Order:
        """One whose rows can be blocked without blocking them here."""
        found = copy.copy(self)
        found._from = self._from.copy()
        return found

    @property
    def kept(self) -> bool:
        """Whether there is any order to keep."""
        return len(self.known) > 0

    def lanes(self, rows: Ints) -> Ints:
        """The number of each row's sequence; -1 where it has none."""
        return self._codes[rows]

    def asked(self, rows: Ints) -> pa.Array:
        """The distinct sequences of these rows, sorted."""
        codes = np.unique(self._codes[rows])
        found = self.known.take(pa.array(codes[codes >= 0]))
        return found.sort() if len(found) > 1 else found

    def block_behind_letters(self, tails: pa.Table) -> None:
        """Sequences (SEQUENCES) that are blocked before this chunk: all their rows wait."""
        self.tails = tails
        codes = pc.index_in(tails["sequence"], value_set=self.known)
        self._from[codes.to_numpy()] = -1

    def block_behind(self, rows: Ints) -> None:
        """Later rows of the sequences of these rows wait."""
        codes, at = self._codes[rows], rows[self._codes[rows] >= 0]
        np.minimum.at(self._from, codes[codes >= 0], at)

    def waits(self, rows: Ints) -> Bools:
        """Which of these rows stand behind something that blocks their sequence."""
        waiting: Bools = self._from[self._codes[rows]] < rows
        return waiting
