"""Waiting through an outage: for as long as somebody waits for what is to be tried again."""

from __future__ import annotations

import pytest

from deadletter.outage import LOOK_SECONDS, while_wanted
from dedup import SparkGone


def test_a_pause_ends_soon_once_nobody_waits() -> None:
    """A pause of minutes looks again and again whether the query still runs, and is the whole pause where it does."""
    slept: list[float] = []
    while_wanted(slept.append, lambda: False)(2.5)
    assert slept == [LOOK_SECONDS, LOOK_SECONDS, 0.5]
    slept.clear()
    with pytest.raises(SparkGone, match="was stopped"):
        while_wanted(slept.append, lambda: len(slept) == 2)(600.0)
    assert slept == [LOOK_SECONDS, LOOK_SECONDS]
