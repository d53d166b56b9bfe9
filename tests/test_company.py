"""Chunks in hand in one process: a suspect is tried alone, nobody waits for ever, and an end that was asked for makes no suspect."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from dedup import company
from dedup.trial import MAX_DEATHS, Trials

SUSPECT = json.dumps({"chunk": "c", "deaths": 1, "dead": [], "running": None})


def kept(text: str | None = None) -> tuple[Trials, list[str | None]]:
    """A new process that finds this marker; and what it keeps."""
    markers = [text]
    return Trials(lambda: markers[-1], markers.append), markers


def seated(trials: Trials) -> object:
    """The chunk `c` of these."""
    return company.seat(trials, lambda: "c", "shop")


def begin(body: Callable[[], None]) -> threading.Thread:
    """It runs in a thread of its own."""
    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    return thread


def in_hand(trials: Trials, entered: threading.Event, go_on: threading.Event) -> Callable[[], None]:
    """A chunk that is in hand until it may go on."""

    def body() -> None:
        with seated(trials):  # type: ignore[attr-defined]
            trials.begin("c")
            trials.mark(np.array([0]))
            entered.set()
            go_on.wait(30)

    return body


@pytest.mark.parametrize("first", [None, SUSPECT], ids=["the suspect comes second", "the suspect comes first"])
def test_a_suspect_is_in_hand_alone(first: str | None) -> None:
    """Nothing is beside it from its first moment to its last; without one, chunks are side by side."""
    second = SUSPECT if first is None else None
    events = [threading.Event() for _ in range(4)]
    one = begin(in_hand(kept(first)[0], events[0], events[1]))
    events[0].wait(30)
    two = begin(in_hand(kept(second)[0], events[2], events[3]))
    assert not events[2].wait(0.1)
    events[1].set()
    assert events[2].wait(30)
    events[3].set()
    one.join(30)
    two.join(30)


def test_chunks_without_a_suspect_are_side_by_side() -> None:
    """No query of a process waits for another one."""
    go_on, entered = threading.Event(), [threading.Event(), threading.Event()]
    threads = [begin(in_hand(kept()[0], each, go_on)) for each in entered]
    assert all(each.wait(30) for each in entered)
    go_on.set()
    for thread in threads:
        thread.join(30)


@pytest.mark.parametrize("first", [None, SUSPECT], ids=["the suspect comes second", "the suspect comes first"])
def test_a_chunk_that_hangs_stops_no_other_query_for_ever(monkeypatch: pytest.MonkeyPatch, first: str | None) -> None:
    """After a while they go on side by side, and then the death of neither of them counts."""
    monkeypatch.setattr(company, "PATIENCE_SECONDS", 0.05)
    (one, left), (two, right) = kept(first), kept(SUSPECT if first is None else None)
    entered, go_on = [threading.Event(), threading.Event()], threading.Event()
    threads = []
    for trials, each in zip((one, two), entered, strict=True):
        threads.append(begin(in_hand(trials, each, go_on)))
        assert each.wait(30)
    assert not json.loads(left[-1] or "")["sure"] and not json.loads(right[-1] or "")["sure"]
    go_on.set()
    for thread in threads:
        thread.join(30)


def test_a_consumer_that_is_called_inside_a_handler_waits_for_nobody() -> None:
    """It is part of that handler's chunk, which it would wait for in vain; its own death counts for nothing."""
    outer, inner = kept(SUSPECT)[0], kept(SUSPECT)
    with seated(outer), seated(inner[0]):  # type: ignore[attr-defined]
        inner[0].begin("c")
        inner[0].mark(np.array([0]))
    assert not json.loads(inner[1][-1] or "")["sure"]
    with seated(kept()[0]):  # type: ignore[attr-defined]
        pass


def test_who_is_due_is_blamed_and_nobody_else() -> None:
    """The watchdog ends the process for one chunk: its death counts, what is in hand beside it is no suspect."""
    (guilty, found), (innocent, beside) = kept(), kept()
    entered, go_on = [threading.Event(), threading.Event()], threading.Event()
    threads = [begin(in_hand(trials, each, go_on)) for trials, each in zip((guilty, innocent), entered, strict=True)]
    assert all(each.wait(30) for each in entered)
    company.blame(guilty)
    assert json.loads(found[-1] or "")["sure"]
    assert json.loads(beside[-1] or "")["running"] is None
    go_on.set()
    for thread in threads:
        thread.join(30)


STOPPED = """
import signal, sys, threading, time
from pathlib import Path
import numpy as np
from dedup import company
from dedup.trial import Trials

marker = Path(sys.argv[1])
trials = Trials(lambda: marker.read_text() if marker.exists() else None, lambda text: marker.write_text(text or ""))

def slow():
    with company.seat(trials, lambda: "c", "shop"):
        trials.begin("c")
        trials.mark(np.array([0]))
        print("begun", flush=True)
        threading.Event().wait(60)

def work():
    threading.Thread(target=slow, daemon=True).start()
    threading.Event().wait(60)

if sys.argv[2] == "run":
    with company.stopping_at_sigterm():
        work()
signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
work()
"""


@pytest.mark.parametrize(("how", "code"), [("run", -signal.SIGTERM), ("a handler of the user's", 3)])
def test_deploys_in_the_middle_of_a_slow_chunk_make_no_suspect(tmp_path: Path, how: str, code: int) -> None:
    """SIGTERM ends the process as ever, with its own code, and it is noted that the chunk had nothing to do with it."""
    marker = tmp_path / "marker"
    for _ in range(MAX_DEATHS - 1):
        process = subprocess.Popen([sys.executable, "-c", STOPPED, str(marker), how], stdout=subprocess.PIPE, text=True)
        assert process.stdout and process.stdout.readline() == "begun\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == code
        process.stdout.close()
    found = Trials(marker.read_text, lambda _: None)
    assert not found.suspects(lambda: "c")
