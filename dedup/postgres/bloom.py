"""A Bloom filter of keys, by numpy: says of a key that it is surely not in, or that it may be.

Source: Putze, Sanders, Singler, "Cache-, Hash- and Space-Efficient Bloom Filters" (2007): bits of a key together in a word. Here they
are in two words, the second of which is looked at where the first one has them: where there is room, that rules out nearly all. Called
by known_filter.py.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dedup.postgres.arrays import HALVES, Keys

BITS = 16
"""Of memory for each key: with so many about one key in seven hundred that is not in seems to be, with half as many one in 16,000."""

_SET = 3
"""Bits that a key sets in each of its two words."""

_MIXED = np.uint64(0x9E3779B97F4A7C15)
"""Odd, from the golden ratio (Knuth): spreads keys over the words that have bits in common, as random UUIDs have."""

Places = tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]
"""Of each key the word, and its bits there."""


def memory(capacity: int) -> int:
    """Bytes of a filter for so many keys: a power of two, from two to four for each key."""
    return 16 << _width(capacity)


def _width(capacity: int) -> int:
    return max((capacity * BITS // 128 - 1).bit_length(), 1)


class Bloom:
    """Room for `capacity` keys; with more in it, more keys seem to be in that are not.

    Args:
        capacity: keys.
    """

    def __init__(self, capacity: int) -> None:
        self._shift = np.uint64(64 - _width(capacity))
        self._words = tuple(np.zeros(1 << _width(capacity), dtype=np.uint64) for _ in range(2))
        self.capacity, self.size = capacity, 0

    @property
    def crowded(self) -> bool:
        """Whether a larger one is due."""
        return self.size > 2 * self.capacity

    def add(self, keys: Keys) -> None:
        """Put these in."""
        for which, words in enumerate(self._words):
            np.bitwise_or.at(words, *self._places(keys, which))
        self.size += len(keys)

    def may_have(self, keys: Keys) -> npt.NDArray[np.bool_]:
        """For each key whether it may be in."""
        found = self._has(keys, 0)
        found[found] = self._has(keys[found], 1)
        return found

    def _has(self, keys: Keys, which: int) -> npt.NDArray[np.bool_]:
        word, bits = self._places(keys, which)
        found: npt.NDArray[np.bool_] = (self._words[which][word] & bits) == bits
        return found

    def _places(self, keys: Keys, which: int) -> Places:
        """Of one half of each key: its high bits, once mixed, say the word, and the bits below them which bits there."""
        mixed = keys.view(HALVES)["low" if which else "high"].astype(np.uint64) * _MIXED
        bits, rest = np.zeros(len(keys), dtype=np.uint64), mixed >> np.uint64(10)
        for _ in range(_SET):
            bits |= np.uint64(1) << (rest & np.uint64(63))
            rest >>= np.uint64(6)
        return mixed >> self._shift, bits
