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

from deadletter.crashes import MAX_DEATHS, CrashMarker
from dedup.pipeline import company
from fixtures.variants import of_which

SUSPECT = json.dumps({"chunk": "c", "deaths": 1, "dead": [], "running": None})


def kept(text: str | None = None) -> tuple[CrashMarker, list[str | None]]:
    """A new process that finds this marker; and what it keeps."""
    markers = [text]
    return CrashMarker(lambda: markers[-1], markers.append), markers


def seated(crash_marker: CrashMarker) -> object:
    """The chunk `c` of these."""
    return company.seat(crash_marker, lambda: "c", "shop")


def begin(body: Callable[[], None]) -> threading.Thread:
    """It runs in a thread of its own."""
    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    return thread


def in_hand(crash_marker: CrashMarker, entered: threading.Event, go_on: threading.Event) -> Callable[[], None]:
    """A chunk that is in hand until it may go on."""

    def body() -> None:
        with seated(crash_marker):  # type: ignore[attr-defined]
            crash_marker.begin("c")
            crash_marker.mark(np.array([0]))
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
    for crash_marker, each in zip((one, two), entered, strict=True):
        threads.append(begin(in_hand(crash_marker, each, go_on)))
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
    threads = [begin(in_hand(crash_marker, each, go_on)) for crash_marker, each in zip((guilty, innocent), entered, strict=True)]
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
from dedup.pipeline import company
from deadletter.crashes import CrashMarker

marker = Path(sys.argv[1])
crash_marker = CrashMarker(lambda: marker.read_text() if marker.exists() else None, lambda text: marker.write_text(text or ""))

def slow():
    with company.seat(crash_marker, lambda: "c", "shop"):
        crash_marker.begin("c")
        crash_marker.mark(np.array([0]))
        print("begun", flush=True)
        threading.Event().wait(60)

def work():
    threading.Thread(target=slow, daemon=True).start()
    while True:
        time.sleep(0.05)  # a signal just before a long wait would be looked at after it

if sys.argv[2] == "run":
    with company.stopping_at_sigterm():
        work()
signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
work()
"""


@pytest.mark.parametrize(("how", "code"), of_which(1, [("run", -signal.SIGTERM), ("a handler of the user's", 3)]))
def test_deploys_in_the_middle_of_a_slow_chunk_make_no_suspect(tmp_path: Path, how: str, code: int) -> None:
    """SIGTERM ends the process as ever, with its own code, and it is noted that the chunk had nothing to do with it."""
    marker = tmp_path / "marker"
    for _ in range(MAX_DEATHS - 1):
        process = subprocess.Popen([sys.executable, "-c", STOPPED, str(marker), how], stdout=subprocess.PIPE, text=True)
        assert process.stdout and process.stdout.readline() == "begun\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == code
        process.stdout.close()
    found = CrashMarker(marker.read_text, lambda _: None)
    assert not found.suspects(lambda: "c")


def test_a_handler_of_sigterm_that_is_set_meanwhile_is_kept() -> None:
    """Whoever takes SIGTERM while a query runs keeps it when the query ends."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        with company.stopping_at_sigterm():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)


def wait_for(found: Callable[[], object]) -> None:
    """Until it is so."""
    while not found():
        threading.Event().wait(0.001)


def test_who_may_wait_for_a_call_inside_its_handler_is_not_blamed() -> None:
    """A handler that calls another consumer in a thread of a pool hangs because of the wait: the end of the process counts for nothing."""
    (outer, left), go_on, entered = kept(SUSPECT), threading.Event(), [threading.Event(), threading.Event()]
    threads = [begin(in_hand(outer, entered[0], go_on))]
    assert entered[0].wait(30)
    threads.append(begin(in_hand(kept()[0], entered[1], go_on)))
    wait_for(lambda: company._room.waiting)
    company.blame(outer)
    assert not json.loads(left[-1] or "")["sure"]
    go_on.set()
    for thread in threads:
        thread.join(30)


def test_who_has_waited_before_is_no_call_inside_the_handler() -> None:
    """Where a query waits already when a suspect begins, the suspect that hangs is blamed."""
    (guilty, left), go_on = kept(SUSPECT), [threading.Event() for _ in range(3)]
    entered = [threading.Event() for _ in range(3)]
    threads = [begin(in_hand(kept()[0], entered[0], go_on[0]))]
    assert entered[0].wait(30)
    threads.append(begin(in_hand(guilty, entered[1], go_on[1])))
    wait_for(lambda: len(company._room.waiting) == 1)
    threads.append(begin(in_hand(kept()[0], entered[2], go_on[2])))
    wait_for(lambda: len(company._room.waiting) == 2)
    go_on[0].set()
    assert entered[1].wait(30)
    company.blame(guilty)
    assert json.loads(left[-1] or "")["sure"]
    for each in go_on:
        each.set()
    for thread in threads:
        thread.join(30)


def test_a_wait_is_short_beside_the_limit_of_a_handler() -> None:
    """A call inside a handler goes on long before `handler_timeout` ends the process."""
    outer, _ = kept(SUSPECT)
    with company.seat(outer, lambda: "c", "outer", 0.1):
        inner = begin(lambda: company.seat(kept()[0], lambda: "c", "inner").__enter__())
        inner.join(30)
        assert not inner.is_alive()
    company._room.seats.clear()


def test_a_slow_suspect_costs_one_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever comes after a query that went on beside a suspect waits for nothing: the suspect's death counts for nothing anyway."""
    monkeypatch.setattr(company, "PATIENCE_SECONDS", 0.05)
    go_on, entered = threading.Event(), [threading.Event() for _ in range(3)]
    threads = []
    for text, each in zip((SUSPECT, None, None), entered, strict=True):
        threads.append(begin(in_hand(kept(text)[0], each, go_on)))
        assert each.wait(30)
        if each is entered[1]:
            monkeypatch.setattr(company, "PATIENCE_SECONDS", 600)
    go_on.set()
    for thread in threads:
        thread.join(30)


@pytest.mark.parametrize("how", ["fails", "hangs"])
def test_another_consumers_store_that_is_away_stops_nobody(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """A query that goes on beside a suspect neither fails nor hangs with the suspect's store, and keeps nobody from leaving."""
    monkeypatch.setattr(company, "PATIENCE_SECONDS", 0.05)
    monkeypatch.setattr(company, "STOPPING_SECONDS", 0.05)
    go_on, entered, markers = threading.Event(), [threading.Event(), threading.Event()], [SUSPECT]

    def save(text: str | None) -> None:
        if len(markers) > 1 and how == "fails":
            raise ConnectionError
        if len(markers) > 1:
            go_on.wait(30)
        markers.append(text or "")

    threads = [begin(in_hand(CrashMarker(lambda: SUSPECT, save), entered[0], go_on))]
    assert entered[0].wait(30)
    threads.append(begin(in_hand(kept()[0], entered[1], go_on)))
    assert entered[1].wait(30)
    go_on.set()
    for thread in threads:
        thread.join(30)


def test_an_interrupt_while_it_sits_down_leaves_no_seat(monkeypatch: pytest.MonkeyPatch) -> None:
    """A notebook that is interrupted at that moment tries its next batch beside nothing."""
    enter = company._Room.enter

    def interrupted(*what: object) -> None:
        enter(*what)  # type: ignore[arg-type]
        raise KeyboardInterrupt

    monkeypatch.setattr(company._Room, "enter", interrupted)
    with pytest.raises(KeyboardInterrupt), company.taken("shop"):
        pass
    assert not company._room.seats


def test_a_suspect_does_not_wait_for_a_destination() -> None:
    """Sending may hang for long: a suspect runs beside it, and then its death counts for nothing."""
    (suspect, left), go_on, entered = kept(SUSPECT), threading.Event(), [threading.Event(), threading.Event()]

    def send() -> None:
        with company.sending("other"):
            entered[0].set()
            go_on.wait(30)

    threads = [begin(send)]
    assert entered[0].wait(30)
    threads.append(begin(in_hand(suspect, entered[1], go_on)))
    assert entered[1].wait(5)
    assert not json.loads(left[-1] or "")["sure"]
    go_on.set()
    for thread in threads:
        thread.join(30)
