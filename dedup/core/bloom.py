"""A Bloom filter of keys: what it does not know is certainly not among them. Pure. Called by both stores.

Source: Putze, Sanders, Singler, "Cache-, Hash- and Space-Efficient Bloom Filters" (2007): bits of a key together in a word. Here they
are in two words, and the second word is read only if the bits of the first are set: where there is room, that rules out nearly all keys.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dedup.core.keys import Bools, Words

BITS = 16
"""Of memory for each key: with so many about one key in seven hundred that is not in seems to be, with half as many one in 16,000."""

_SET = 3
"""Bits that a key sets in each of its two words."""

_MIXED = np.uint64(0x9E3779B97F4A7C15)
"""Odd, from the golden ratio (Knuth): spreads keys over the words that have bits in common, as random UUIDs have."""


def memory(capacity: int) -> int:
    """Bytes of a filter for so many keys: a power of two, from two to four for each key."""
    return 16 << _width(capacity)


def _width(capacity: int) -> int:
    return max((capacity * BITS // 128 - 1).bit_length(), 1)


class Placed(NamedTuple):
    """One half of each key."""

    mixed: Words  # its high bits, as many as the filter is wide, say the word
    bits: Words  # in that word


class Bloom:
    """Room for `capacity` keys; with more in it, more keys seem to be in that are not.

    Args:
        capacity: keys.
        words: what `words` of a filter was, or only the first of them: then more keys seem to be in that are not. None: it begins empty.
    """

    def __init__(self, capacity: int, words: tuple[Words, ...] | None = None) -> None:
        self.words: tuple[Words, ...] = words or (_empty(capacity), _empty(capacity))
        self._shift = np.uint64(65 - len(self.words[0]).bit_length())
        self.capacity, self.size = capacity, 0

    @property
    def crowded(self) -> bool:
        """Whether a larger one is due."""
        return self.size > 2 * self.capacity

    @property
    def nbytes(self) -> int:
        """Of memory."""
        return sum(words.nbytes for words in self.words)

    def folded(self, times: int) -> Bloom:
        """The same keys in words half as many, so many times over: more keys seem to be in that are not. It takes no new ones."""
        return Bloom(self.capacity, tuple(fold(words, times) for words in self.words)) if times else self

    def add(self, high: Words, low: Words) -> None:
        """Put in keys, given by their halves."""
        for words, half in zip(self.words, (high, low), strict=True):
            mixed, bits = _placed(half)
            np.bitwise_or.at(words, mixed >> self._shift, bits)
        self.size += len(high)

    def may_have(self, high: Words, low: Words) -> Bools:
        """For each key whether it may be in."""
        return self.may_have_placed(placed(high, low))

    def may_have_placed(self, keys: tuple[Placed, Placed]) -> Bools:
        """The same of keys that are asked of several filters."""
        high, low = keys
        found = self._has(0, high)
        if len(self.words) > 1:
            found[found] = self._has(1, Placed(low.mixed[found], low.bits[found]))
        return found

    def _has(self, which: int, half: Placed) -> Bools:
        found: Bools = (self.words[which][half.mixed >> self._shift] & half.bits) == half.bits
        return found


def placed(high: Words, low: Words) -> tuple[Placed, Placed]:
    """Where keys, given by their halves, are in a filter of any size."""
    return _placed(high), _placed(low)


def _placed(half: Words) -> Placed:
    mixed = half * _MIXED
    bits, rest = np.zeros(len(half), dtype=np.uint64), mixed >> np.uint64(10)
    for _ in range(_SET):
        bits |= np.uint64(1) << (rest & np.uint64(63))
        rest >>= np.uint64(6)
    return Placed(mixed, bits)


def _empty(capacity: int) -> Words:
    return np.zeros(1 << _width(capacity), dtype=np.uint64)


def fold(words: Words, times: int) -> Words:
    """Words, or a run of them, of a filter that has half as many, so many times over. Their number is a multiple of 2 ** times.

    A key's word is said by the high bits of its number, so neighbours become one.
    """
    halved: Words = np.bitwise_or.reduce(words.reshape(-1, 1 << times), axis=1)
    return halved
