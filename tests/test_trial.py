"""The marker of what a process was trying: it blames the chunk in which processes die, and no other one."""

from __future__ import annotations

import json

from dedup.trial import Trials

LEFT = json.dumps({"chunk": "b", "deaths": 1, "dead": [], "running": [0, 3]})
"""By a process that died while it tried the chunk `b`."""


def trials(*kept: str | None) -> tuple[Trials, list[str | None]]:
    """A new process that finds the last of these."""
    markers = list(kept)
    return Trials(lambda: markers[-1], markers.append), markers


def test_a_chunk_that_is_decided_leaves_the_marker_of_a_later_one() -> None:
    """A process that starts again goes through what is decided before it comes to the chunk that kills, whose deaths count."""
    process, markers = trials(LEFT)
    process.forget("a")
    assert markers == [LEFT] and not process.tries("a")
    process.begin("b")
    assert process.deaths == 2 and process.tries("b")


def test_the_marker_of_a_chunk_that_is_decided_is_removed() -> None:
    """Whoever died right after its commit has not been killed by it, and must not look as if it were still at work."""
    process, markers = trials(LEFT)
    process.forget("b")
    assert markers == [LEFT, None]
