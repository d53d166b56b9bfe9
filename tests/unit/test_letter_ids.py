"""Letters before any store has them: ids that are for ever, and bodies as one column holds them."""

from __future__ import annotations

import hashlib

import pyarrow as pa
import pytest

from checkpoint.errors import BatchTooLarge
from deadletter.letter import LetterIds, letter_id
from dedup.core import letters
from dedup.core.letters import MOST_BODIES, TOO_LARGE_KEPT

KNOWN = "a5b512fec4b0377f1710efb0d82e1255"

MIB = 1 << 20


def test_many_ids_at_once_are_those_of_one_at_a_time() -> None:
    """Also of names that hold the separator or what is no Unicode; and an id never changes between versions."""
    for beginning in (("shop", 0, "broker", "orders", 0, 3), ("a\x1f1:b", 1, "", "ü\ud800", 2, 0)):
        numbers, parts = (0, -1, 2**63 - 1, 17), (1, 0, -20, 1000)
        found = LetterIds(*beginning).of_each(numbers, parts)
        assert found == [letter_id(*beginning, number, part) for number, part in zip(numbers, parts, strict=True)]
    assert letter_id("shop", 0, "broker", "orders", 0, 3, 17, 0) == KNOWN


def test_more_bytes_than_a_column_holds_are_refused() -> None:
    """Bodies of two gigabytes and more name the setting that makes the transaction smaller."""
    one = pa.array([bytes(16 * MIB)])
    content = pa.table({"body": pa.chunked_array([one] * (MOST_BODIES // (16 * MIB) + 1))})
    with pytest.raises(BatchTooLarge, match=r"128 dead letters .* 2,147,483,648 bytes .*max_events_per_transaction"):
        letters._bodies(content, 20 * MIB)


def test_bodies_in_pieces_are_kept_as_one_column_of_them() -> None:
    """Null, empty and whole bodies, and of a longer one the beginning, its size and its digest."""
    bodies = [b"abc", None, b"", b"x" * (TOO_LARGE_KEPT + 5), b"y" * 100]
    found = letters._bodies(pa.table({"body": pa.chunked_array([pa.array(bodies[:2]), pa.array(bodies[2:])])}), 99)
    assert found["body"].to_pylist() == [*bodies[:3], b"x" * TOO_LARGE_KEPT, bodies[4]]
    assert found["body_size"].to_pylist() == [3, None, 0, TOO_LARGE_KEPT + 5, 100]
    assert found["body_sha256"] == [None, None, None, *(hashlib.sha256(body or b"").digest() for body in bodies[3:])]
    assert letters._bodies(pa.table({"body": pa.chunked_array([], pa.binary())}), 99)["body"].to_pylist() == []
