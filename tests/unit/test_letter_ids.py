"""The ids of letters: the same position parks under the same id, for ever."""

from __future__ import annotations

from deadletter.letter import LetterIds, letter_id

KNOWN = "a5b512fec4b0377f1710efb0d82e1255"


def test_many_ids_at_once_are_those_of_one_at_a_time() -> None:
    """Also of names that hold the separator or what is no Unicode; and an id never changes between versions."""
    for beginning in (("shop", 0, "broker", "orders", 0, 3), ("a\x1f1:b", 1, "", "ü\ud800", 2, 0)):
        numbers, parts = (0, -1, 2**63 - 1, 17), (1, 0, -20, 1000)
        found = LetterIds(*beginning).of_each(numbers, parts)
        assert found == [letter_id(*beginning, number, part) for number, part in zip(numbers, parts, strict=True)]
    assert letter_id("shop", 0, "broker", "orders", 0, 3, 17, 0) == KNOWN
