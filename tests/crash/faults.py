"""The kinds of fault. Each breaks one thing once while processes work, repairs it, and leaves no process behind."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

from checkpoint import changes
from crash.lane import Lane
from crash.places import Disk, Postgres
from kit.children import Child
from kit.pg_help import Copy, every_table
from kit.pg_proxy import COMMIT_MESSAGE, proxied

Fault = Callable[[Lane, random.Random], str]
"""Breaks something; returns what exactly."""


def kill_at_step(lane: Lane, dice: random.Random) -> str:
    """SIGKILL of the consumer's process right before a step."""
    step, nth = dice.choice(lane.steps), dice.randrange(1, 4)
    lane.wait(lane.start(die_at=step, nth=nth))
    lane.missed = lane.ended == ["finished"]
    return f"{step} {nth}"


def kill_at_moment(lane: Lane, dice: random.Random) -> str:
    """SIGKILL of the consumer's process at a random moment, wherever it is."""
    process = started(lane)
    seconds = _sleep(lane, dice)
    lane.missed = process.ended
    _signal(process, signal.SIGKILL)
    lane.wait(process)
    return seconds


def stop_and_take_over(lane: Lane, dice: random.Random) -> str:
    """SIGSTOP for longer than every time-out; another instance takes over and finishes; SIGCONT."""
    step, nth = dice.choice([*lane.steps, None]), dice.randrange(1, 4)
    zombie = started(lane, after=0.4, **({"die_at": step, "nth": nth, "signal": signal.SIGSTOP} if step else {}))
    where = f"{step} {nth}" if step else _sleep(lane, dice)
    if step is None:
        _signal(zombie, signal.SIGSTOP)
    while not zombie.ended and not _stopped(zombie):
        time.sleep(0.005)
    lane.missed = zombie.ended
    lane.wait(lane.start(after=0.4, patience=30.0))
    _signal(zombie, signal.SIGCONT)
    lane.wait(zombie)
    return where


def instances_at_once(lane: Lane, dice: random.Random) -> str:
    """Three instances with one name over the same batches, one of them killed and one stopped for a while."""
    instances = [lane.start(after=0.3) for _ in range(3)]
    seconds = _sleep(lane, dice)
    _signal(instances[0], signal.SIGKILL)
    _signal(instances[1], signal.SIGSTOP)
    time.sleep(dice.random())
    _signal(instances[1], signal.SIGCONT)
    for instance in instances:
        lane.wait(instance)
    return seconds


def disk_full(lane: Lane, dice: random.Random, disk: Disk, repair: Callable[[], object]) -> str:
    """No space left on the device that everything is on, while a process works; then there is space again.

    Args:
        repair: starts a server that gave up when its log could not be written.
    """
    left = dice.choice([0, 1, 4, 16, 64, 256]) * 1024
    disk.fill(left)
    try:
        lane.wait(lane.start(patience=dice.choice([0.0, 1.0])))
        lane.missed = lane.ended == ["finished"]
    finally:
        disk.free()
        repair()
    return f"{left} bytes left"


class ServerFaults:
    """What can happen to a PostgreSQL server and to the way to it."""

    def __init__(self, server: Postgres) -> None:
        self.server = server

    def all(self) -> dict[str, Fault]:
        """By name."""
        return {
            "kill -9 of a backend": self.kill_backend,
            "kill -9 of the postmaster": self.kill_postmaster,
            "immediate shutdown of the server": self.crash_server,
            "backend stopped and continued": self.stop_backend,
            "server stopped and continued": self.stop_server,
            "connection cut in COPY": self.cut_in_copy,
            "connection cut before COMMIT": self.cut_before_commit,
            "answer to COMMIT lost": self.lose_answer_to_commit,
            "connection cut after some bytes": self.cut_anywhere,
            "the state was copied back": copy_state_back,
            "one table was copied back": copy_table_back,
        }

    def kill_backend(self, lane: Lane, dice: random.Random) -> str:
        """The postmaster ends every other session then, and recovers."""
        process = started(lane, patience=_patience(dice))
        seconds = _sleep(lane, dice)
        backends = self.server.backends()
        lane.missed = not backends
        if backends:
            _kill(dice.choice(backends), signal.SIGKILL)
        lane.wait(process)
        self.server.wait()
        return f"{seconds}, {len(backends)} backends"

    def kill_postmaster(self, lane: Lane, dice: random.Random) -> str:
        """Its children end by themselves; the data is recovered at once, or after a second."""
        return self._without_server(lane, dice, self.server.kill_postmaster)

    def crash_server(self, lane: Lane, dice: random.Random) -> str:
        """As if its machine had failed."""
        return self._without_server(lane, dice, self.server.crash)

    def _without_server(self, lane: Lane, dice: random.Random, end: Callable[[], None]) -> str:
        process = started(lane, patience=_patience(dice))
        seconds = _sleep(lane, dice)
        lane.missed = process.ended
        end()
        time.sleep(dice.choice([0.0, 0.0, 1.0]))
        self.server.start()
        lane.wait(process)
        return seconds

    def stop_backend(self, lane: Lane, dice: random.Random) -> str:
        """A session that hangs; sometimes another instance comes meanwhile."""
        return self._stopped(lane, dice, lambda: self.server.backends()[:1])

    def stop_server(self, lane: Lane, dice: random.Random) -> str:
        """All of it hangs, the postmaster too."""
        return self._stopped(lane, dice, lambda: [*self.server.backends(), self.server.postmaster])

    def _stopped(self, lane: Lane, dice: random.Random, pids: Callable[[], list[int]]) -> str:
        process = started(lane, patience=30.0, after=0.4)
        seconds, found = _sleep(lane, dice), pids()
        lane.missed = process.ended
        for pid in found:
            _kill(pid, signal.SIGSTOP)
        other = lane.start(patience=30.0, after=0.4) if dice.random() < 0.5 else None
        time.sleep(dice.choice([0.2, 1.0, 2.0]))
        for pid in found:
            _kill(pid, signal.SIGCONT)
        for one in filter(None, (process, other)):
            lane.wait(one)
        return f"{seconds}, {len(found)} processes"

    def cut_in_copy(self, lane: Lane, dice: random.Random) -> str:
        """In the middle of the rows: the server has the first piece of them."""
        return self._through_proxy(lane, dice, b"PGCOPY\n\xff\r\n\0", deliver=dice.random() < 0.5)

    def cut_before_commit(self, lane: Lane, dice: random.Random) -> str:
        """The server never gets it."""
        return self._through_proxy(lane, dice, COMMIT_MESSAGE, deliver=False)

    def lose_answer_to_commit(self, lane: Lane, dice: random.Random) -> str:
        """The server commits, and the client never hears of it."""
        return self._through_proxy(lane, dice, COMMIT_MESSAGE, deliver=True)

    def cut_anywhere(self, lane: Lane, dice: random.Random) -> str:
        """After so many pieces that the client sent, whatever is in them."""
        return self._through_proxy(lane, dice, b"", deliver=dice.random() < 0.5)

    def _through_proxy(self, lane: Lane, dice: random.Random, trigger: bytes, *, deliver: bool) -> str:
        with proxied(self.server.port) as proxy:
            skipped = dice.randrange(3 if trigger else 60)
            proxy.trigger, proxy.deliver, proxy.skip = trigger, deliver, skipped
            proxy.armed = True
            url = lane.place.url.replace(f":{self.server.port}/", f":{proxy.port}/")
            lane.wait(lane.start(place=url, patience=_patience(dice)))
            lane.missed = not proxy.cut.is_set()
            return f"{skipped} skipped, {'delivered' if deliver else 'not delivered'}"


REFUSED = ("progress", "consumer", "batch", "reservation_000001")
"""Tables that contradict the others where they alone are older."""

HARMLESS = ("checkpoint", "heartbeat", "crash_marker")
"""Tables with which the stream goes on."""


def copy_state_back(lane: Lane, dice: random.Random) -> str:
    """All tables of the state from before a batch, and not the sinks: refused; then the right ones are put back."""
    return _copied_back(lane, every_table)


def copy_table_back(lane: Lane, dice: random.Random) -> str:
    """One table of the state from before a batch: refused, and the right one is put back; or the stream goes on with it."""
    table = dice.choice((*REFUSED, *HARMLESS))
    return f"{table} {_copied_back(lane, lambda _: [f'dedup.{table}'], harmless=table in HARMLESS)}"


def _copied_back(lane: Lane, tables: Callable[[str], list[str]], *, harmless: bool = False) -> str:
    store = lane.place.store()
    store.migrate()  # type: ignore[attr-defined]
    older = Copy(lane.place.url, tables(lane.place.url))
    lane.wait(lane.start(until=lane.batches - 1))
    newer = Copy(lane.place.url, every_table(lane.place.url))
    older.load()
    lane.wait(lane.start())
    assert ("StoreRestored" in lane.ended[-1]) != harmless, lane.ended
    if not harmless:
        newer.load()
        for decision in (changes.accept_restore, changes.accept_gap):  # nothing is missing
            store.amend("shop", decision, by="crash", reason="put back")
    store.close()  # type: ignore[attr-defined]
    return f"after {lane.batches - 1} batches"


FAULTS: dict[str, Fault] = {
    "kill -9 at a step": kill_at_step,
    "kill -9 at a moment": kill_at_moment,
    "instance stopped, taken over, continued": stop_and_take_over,
    "three instances at once": instances_at_once,
}
"""Of every store."""


def _patience(dice: random.Random) -> float:
    """Half of the processes stop at the first error, half go on by themselves."""
    return dice.choice([0.0, 30.0])


def started(lane: Lane, **task: object) -> Child:
    """A process that has begun to work."""
    mark = lane.folder / f"started{len(lane.ended)}-{time.monotonic_ns()}"
    process = lane.start(started=str(mark), **task)
    while not Path(mark).exists() and not process.ended:
        time.sleep(0.002)
    return process


def _sleep(lane: Lane, dice: random.Random) -> str:
    """Until a random moment in the life of a process."""
    seconds = dice.random() * lane.life * 0.8
    time.sleep(seconds)
    return f"after {seconds:.3f} s"


def _stopped(process: Child) -> bool:
    return Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T"


def _signal(process: Child, number: signal.Signals) -> None:
    if not process.ended:
        process.send(number)


def _kill(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):  # it was faster
        os.kill(pid, number)
