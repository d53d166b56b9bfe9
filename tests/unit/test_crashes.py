"""The marker of what a process was trying: it blames the chunk in which processes die, and no other one."""

from __future__ import annotations

import json

import numpy as np
import pytest

from deadletter.crashes import MAX_DEATHS, CrashMarker

LEFT = json.dumps({"chunk": "b", "deaths": 1, "dead": [], "running": [0, 3]})
"""By a process that died while it tried the chunk `b`."""


def started(*kept: str | None) -> tuple[CrashMarker, list[str | None]]:
    """A new process that finds the last of these."""
    markers = list(kept)
    return CrashMarker(lambda: markers[-1], markers.append), markers


def test_a_chunk_that_is_decided_leaves_the_marker_of_a_later_one() -> None:
    """A process that starts again goes through what is decided before it comes to the chunk that kills, whose deaths count."""
    process, markers = started(LEFT)
    process.forget("a")
    assert markers == [LEFT] and not process.tries("a")
    process.begin("b")
    assert process.deaths == 2 and process.tries("b")


def test_the_marker_of_a_chunk_that_is_decided_is_removed() -> None:
    """Whoever died right after its commit has not been killed by it, and must not look as if it were still at work."""
    process, markers = started(LEFT)
    process.forget("b")
    assert markers == [LEFT, None]


@pytest.mark.parametrize("end", ["survived", "stop"])
def test_an_end_that_was_asked_for_is_no_death(end: str) -> None:
    """A process that is stopped in the middle of a slow chunk leaves no suspect, however often, and does not mark what it tries still."""
    _, markers = started(None)
    for _ in range(3 * MAX_DEATHS):
        process = CrashMarker(lambda: markers[-1], markers.append)
        process.begin("b")
        process.mark(np.array([0, 3]))
        getattr(process, end)()
        if end == "stop":
            process.mark(np.array([0, 1]))
    found = CrashMarker(lambda: markers[-1], markers.append)
    assert not found.suspects(lambda: "b")
    found.begin("b")
    assert found.deaths == 0


def test_a_process_that_is_ended_for_a_chunk_counts_for_it_beside_others() -> None:
    """The watchdog knows who is due: the first death counts, and the halves are tried as soon as for a chunk that was alone."""
    _, markers = started(None)
    for _ in range(MAX_DEATHS + 1):
        process = CrashMarker(lambda: markers[-1], markers.append)
        process.seated(alone=False)
        process.begin("b")
        process.mark(np.array([0]))
        process.convict()
    found = CrashMarker(lambda: markers[-1], markers.append)
    found.begin("b")
    assert found.deaths == MAX_DEATHS + 1 and found.kills(np.array([0]))


def test_who_was_alone_and_is_joined_by_another_is_not_blamed() -> None:
    """A suspect that was alone when it began, and is no longer, dies of nobody knows what."""
    _, markers = started(LEFT)
    process = CrashMarker(lambda: markers[-1], markers.append)
    assert process.suspects(lambda: "b") and not process.suspects(lambda: "a")
    process.begin("b")
    process.mark(np.array([0]))
    process.disturbed()
    found = CrashMarker(lambda: markers[-1], markers.append)
    found.begin("b")
    assert found.deaths == process.deaths == 2


def lives(process: CrashMarker, markers: list[str | None], chunk: str, row: int, *, deaths: int, alone: bool = True) -> CrashMarker:
    """So many processes begin this chunk, try this one row and die."""
    for _ in range(deaths):
        process = CrashMarker(lambda: markers[-1], markers.append, alone=alone)
        process.begin(chunk)
        process.mark(np.array([row]))
    found = CrashMarker(lambda: markers[-1], markers.append, alone=alone)
    found.begin(chunk)
    return found


def test_one_event_is_tried_once_more_before_it_is_blamed() -> None:
    """Three processes that end may be three restarts; a chunk of one event cannot be tried in parts, so it gets a try of its own."""
    process, markers = started(None)
    process = lives(process, markers, "b", 0, deaths=MAX_DEATHS)
    assert process.deaths == MAX_DEATHS and not process.kills(np.array([0]))
    process = lives(process, markers, "b", 0, deaths=1)
    assert process.kills(np.array([0]))


def test_who_dies_beside_others_is_not_blamed() -> None:
    """However often tasks die while other slices are tried beside them: only what was alone can be told from what killed it."""
    process, markers = started(None)
    process = lives(process, markers, "b", 0, deaths=3 * MAX_DEATHS, alone=False)
    assert process.deaths == 1 and not process.careful
    process = lives(process, markers, "b", 0, deaths=MAX_DEATHS)
    assert process.kills(np.array([0]))


def test_a_process_that_goes_on_after_a_stop_keeps_markers_again() -> None:
    """A handler of SIGTERM may let the process finish its work: a death in a later chunk is found as ever."""
    process, markers = started(None)
    process.begin("a")
    process.mark(np.array([0]))
    process.stop()
    process.begin("b")
    process.mark(np.array([0]))
    assert json.loads(markers[-1] or "")["chunk"] == "b"
