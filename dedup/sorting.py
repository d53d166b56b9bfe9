"""Rows in the order of their keys. Pure. Called by index.py and by both stores."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]

TIES = 8
"""Where more than one row in so many shares the first half of its key with another one, all rows are sorted by both halves at once."""


def by_key(high: Words, low: Words) -> npt.NDArray[np.intp]:
    """Rows in ascending order of their keys' halves, those of one key in their own order.

    As `np.lexsort((low, high))`. Halves of hashes are next to never equal but for copies, so one sort of one column does nearly all of it,
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
