"""Which decision a table shows: its number, and bits of its identity, in the one transaction id that a commit carries.

A number alone is not enough: a ledger that was copied back gives the same numbers to other decisions. Versions grow with the number, so
Spark's idempotent writes take them; both engines read them from the table's newest snapshot. Pure.
"""

from __future__ import annotations

import hashlib

ID_BITS = 24
"""Bits of identity beside the number of a decision: another decision under the same number looks alike once in 16.8 million times."""

PART_BITS = 16
"""A decision may write so often to one sink, as a power of two. Each write but the last has a version of its own."""

_PART_ID_BITS = 16


def version_of(seq: int, attempt: str) -> int:
    """The transaction version of a whole decision."""
    return seq << ID_BITS | _identity(attempt, ID_BITS)


def part_version(seq: int, attempt: str, part: int) -> int:
    """The transaction version of one write of a decision that is not its last one to that sink."""
    return (seq << _PART_ID_BITS | _identity(attempt, _PART_ID_BITS)) << PART_BITS | part


def seq_of(version: int) -> int:
    """The number of the decision."""
    return version >> ID_BITS


def seq_of_part(version: int) -> int:
    """The same for a version of one write."""
    return version >> (_PART_ID_BITS + PART_BITS)


def reached(shown: int | None, version: int) -> bool:
    """Whether a table that shows the one version has taken the whole decision of the other one, or a later decision."""
    return shown is not None and (shown == version or seq_of(shown) > seq_of(version))


def part_reached(shown: int | None, version: int) -> bool:
    """The same for versions of one write."""
    if shown is None:
        return False
    same = shown >> PART_BITS == version >> PART_BITS
    return (same and shown >= version) or seq_of_part(shown) > seq_of_part(version)


def same_decision(part: int, seq: int, attempt: str) -> bool:
    """Whether the version of one write is of this decision."""
    return part >> PART_BITS == part_version(seq, attempt, 0) >> PART_BITS


def _identity(attempt: str, bits: int) -> int:
    return int.from_bytes(hashlib.blake2b(attempt.encode(), digest_size=4).digest()) >> (32 - bits)
