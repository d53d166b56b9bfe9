"""The marker of what a process was trying: it blames the chunk in which processes die, and no other one."""

from __future__ import annotations

import json

import numpy as np

from dedup.trial import MAX_DEATHS, Trials

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


def lives(process: Trials, markers: list[str | None], chunk: str, row: int, *, deaths: int, alone: bool = True) -> Trials:
    """So many processes begin this chunk, try this one row and die."""
    for _ in range(deaths):
        process = Trials(lambda: markers[-1], markers.append, alone=alone)
        process.begin(chunk)
        process.mark(np.array([row]))
    found = Trials(lambda: markers[-1], markers.append, alone=alone)
    found.begin(chunk)
    return found


def test_one_event_is_tried_once_more_before_it_is_blamed() -> None:
    """Three processes that end may be three restarts; a chunk of one event cannot be tried in parts, so it gets a try of its own."""
    process, markers = trials(None)
    process = lives(process, markers, "b", 0, deaths=MAX_DEATHS)
    assert process.deaths == MAX_DEATHS and not process.kills(np.array([0]))
    process = lives(process, markers, "b", 0, deaths=1)
    assert process.kills(np.array([0]))


def test_who_dies_beside_others_is_not_blamed() -> None:
    """However often tasks die while other slices are tried beside them: only what was alone can be told from what killed it."""
    process, markers = trials(None)
    process = lives(process, markers, "b", 0, deaths=3 * MAX_DEATHS, alone=False)
    assert process.deaths == 3 * MAX_DEATHS and not process.careful
    process = lives(process, markers, "b", 0, deaths=1)
    assert process.kills(np.array([0]))
