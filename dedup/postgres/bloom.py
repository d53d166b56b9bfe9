"""A Bloom filter of keys, by numpy: says of a key that it is surely not in, or that it may be.

Source: Putze, Sanders, Singler, "Cache-, Hash- and Space-Efficient Bloom Filters" (2007): all bits of a key in one word. Keys are parts of
SHA-256 digests, so their own bits serve as the hashes. Called by known_filter.py.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dedup.postgres.arrays import HALVES, Keys

BITS = 16
"""Of memory for each key: with so many about one key in two hundred that is not in seems to be."""

_SET = 4
"""Bits that a key sets in its word."""


def memory(capacity: int) -> int:
    """Bytes of a filter for so many keys: a power of two, from two to four for each key."""
    return 8 << _width(capacity)


def _width(capacity: int) -> int:
    return max((capacity * BITS // 64 - 1).bit_length(), 1)


class Bloom:
    """Room for `capacity` keys; with more in it, more keys seem to be in that are not.

    Args:
        capacity: keys.
    """

    def __init__(self, capacity: int) -> None:
        self._shift = 64 - _width(capacity)
        self._words = np.zeros(1 << _width(capacity), dtype=np.uint64)
        self.capacity, self.size = capacity, 0

    @property
    def crowded(self) -> bool:
        """Whether a larger one is due."""
        return self.size > 2 * self.capacity

    def add(self, keys: Keys) -> None:
        """Put these in."""
        word, bits = self._places(keys)
        np.bitwise_or.at(self._words, word, bits)
        self.size += len(keys)

    def may_have(self, keys: Keys) -> npt.NDArray[np.bool_]:
        """For each key whether it may be in."""
        word, bits = self._places(keys)
        found: npt.NDArray[np.bool_] = (self._words[word] & bits) == bits
        return found

    def _places(self, keys: Keys) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
        halves = keys.view(HALVES)
        low = halves["low"].astype(np.uint64)
        bits = np.zeros(len(keys), dtype=np.uint64)
        for _ in range(_SET):
            bits |= np.uint64(1) << (low & np.uint64(63))
            low >>= np.uint64(6)
        return halves["high"].astype(np.uint64) >> np.uint64(self._shift), bits
