"""What a deliberate break of the protocol is."""

from __future__ import annotations

from typing import NamedTuple


class Mutant(NamedTuple):
    """One break. `old` occurs exactly once in the file."""

    name: str
    file: str
    old: str
    new: str
    test: str
