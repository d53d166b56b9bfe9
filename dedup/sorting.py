"""128-bit keys as two columns of 64 bits: sorted, and looked up in sorted ones. Pure. Called by index.py and by both stores."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

Words = npt.NDArray[np.uint64]
Places = npt.NDArray[np.intp]
Bools = npt.NDArray[np.bool_]

_KEY = pa.binary(16)

TIES = 8
"""Where more than one row in so many shares the first half of its key with another one, all rows are sorted by both halves at once."""


def key_words(column: pa.ChunkedArray | pa.Array) -> tuple[Words, Words]:
    """The two halves of 16-byte keys as big-endian numbers, so that they sort as the bytes do; nulls are zero.

    Raises ValueError for keys of another length.
    """
    flat = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    try:
        flat = flat if flat.type == _KEY else flat.cast(pa.binary()).cast(_KEY)
    except pa.ArrowInvalid as error:
        raise ValueError(f"keys must have 16 bytes each: {error}") from error
    flat = pc.fill_null(flat, bytes(16)) if flat.null_count else flat
    words = np.frombuffer(flat.buffers()[1] or b"", dtype=">u8")[flat.offset * 2 : (flat.offset + len(flat)) * 2]
    return words[0::2].astype(np.uint64), words[1::2].astype(np.uint64)


def key_bytes(high: Words, low: Words) -> pa.Array:
    """The inverse of `key_words`: binary(16)."""
    words = np.empty(2 * len(high), dtype=">u8")
    words[0::2], words[1::2] = high, low
    return pa.FixedSizeBinaryArray.from_buffers(_KEY, len(high), [None, pa.py_buffer(words.tobytes())])


def by_key(high: Words, low: Words) -> Places:
    """Rows in ascending order of their keys' halves, those of one key in their own order.

    As `np.lexsort((low, high))`. Halves of hashes are next to never equal but for duplicates: one sort of one column does nearly all,
    in a tenth of the time (numpy 2.4 with AVX-512; 500,000 keys).
    """
    order = np.argsort(high)
    ordered = high[order]
    equal = ordered[1:] == ordered[:-1]
    if (count := np.count_nonzero(equal)) > len(order) // TIES:
        return np.lexsort((low, high))
    if count:
        tied = np.zeros(len(order), dtype=bool)
        tied[1:] = equal
        tied[:-1] |= equal
        rows = order[tied]
        order[tied] = rows[np.lexsort((rows, low[rows], high[rows]))]
    return order


def find_keys(high: Words, low: Words, wanted_high: Words, wanted_low: Words) -> tuple[Places, Bools]:
    """Where each wanted key stands, or would be inserted, among sorted keys, and whether it is there."""
    at = np.searchsorted(high, wanted_high, "left")
    if not len(high):
        return at, np.zeros(len(at), dtype=bool)
    further = np.flatnonzero(_equal(high, at, wanted_high) & (low[np.minimum(at, len(low) - 1)] < wanted_low))
    if len(further):
        at[further] = _among_equals(high, low, at[further], wanted_high[further], wanted_low[further])
    return at, _equal(high, at, wanted_high) & _equal(low, at, wanted_low)


def _equal(words: Words, at: Places, wanted: Words) -> Bools:
    found: Bools = (at < len(words)) & (words[np.minimum(at, len(words) - 1)] == wanted)
    return found


def _among_equals(high: Words, low: Words, left: Places, wanted_high: Words, wanted_low: Words) -> Places:
    """A binary search on the low half, all keys at once: equal high halves are rare for real hashes, but must be right for any."""
    right = np.searchsorted(high, wanted_high, "right")
    while (open_ := left < right).any():
        middle = (left + right) >> 1
        below = np.zeros(len(left), dtype=bool)
        below[open_] = low[middle[open_]] < wanted_low[open_]
        left = np.where(open_ & below, middle + 1, left)
        right = np.where(open_ & ~below, middle, right)
    return left
