"""The arithmetic of known keys: the Bloom filter, and which keys are among others."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dedup.core.bloom import Bloom
from dedup.postgres import wire
from dedup.postgres.key_filter import words_of
from kit.known_filter_kit import digests


def test_no_key_that_is_in_seems_not_to_be() -> None:
    """A key that the filter rules out is surely not known, and of the others few are looked up for nothing."""
    bloom = Bloom(100_000)
    known = digests(100_000)
    first, *rest = np.array_split(known, 2)
    bloom.add(*words_of(first))
    assert bloom.may_have(*words_of(digests(100_000, "other"))).mean() < 0.0005
    for part in rest:
        bloom.add(*words_of(part))
    assert bloom.may_have(*words_of(known)).all()
    assert bloom.may_have(*words_of(digests(100_000, "other"))).mean() < 0.005
    assert not bloom.crowded
    bloom.add(*words_of(digests(100_001, "more")))
    assert bloom.crowded and bloom.may_have(*words_of(known)).all()


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5))), st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5))), st.booleans())
def test_among_is_what_a_set_says(some: list[tuple[int, int]], others: list[tuple[int, int]], high_bits: bool) -> None:
    """Also for keys that share their first half, that come twice, that use the highest bits, and for none."""
    top = 2**64 - 6 if high_bits else 0
    mine, theirs = (
        np.frombuffer(b"".join((top + a).to_bytes(8, "big") + (top + b).to_bytes(8, "big") for a, b in pairs), dtype="V16")
        for pairs in (some, others)
    )
    ordered = mine[wire.order_of(mine)]
    assert [k.tobytes() for k in ordered] == sorted(k.tobytes() for k in mine)
    there = {k.tobytes() for k in theirs}
    assert wire.among(ordered, theirs).tolist() == [k.tobytes() in there for k in ordered]
