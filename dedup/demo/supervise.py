"""Runs a child process to its end, killing it on the way.

A killed Python leaves its JVM behind for half a second, and Spark's Python workers are in a process group of their own: the child gets a
session of its own, all of which is killed and awaited before the next start. Called by main.py and by the tests.
"""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from dedup import DedupError

POLL = 0.1
"""Seconds between two looks at the child."""

GONE_WITHIN = 60.0
"""Seconds within which a process that was sent SIGKILL has to be gone."""


class DemoFailed(DedupError):
    """The demo could not be carried through."""


@dataclass(frozen=True)
class Kill:
    """When to kill: as soon as `after` events are decided, and then `delay` seconds later."""

    after: int
    delay: float


@dataclass(frozen=True)
class SupervisedRun:
    """What happened to the child."""

    kills: int
    """Kills that hit a child which had decided something since its start."""
    seconds: float
    """From the first start to the last end."""


def moments(seed: int, events: int, kills: int = 3, longest: float = 1.0) -> list[Kill]:
    """Random moments, one in each part of the first 60 % of the events, so that work is left after the last.

    Args:
        longest: seconds that a kill may come after its event, so that it hits any step of a batch.
    """
    rng = random.Random(seed)
    part = 0.6 * events / max(kills, 1)
    return [Kill(int(part * (k + rng.uniform(0.1, 0.9))), rng.uniform(0, longest)) for k in range(kills)]


def run(
    command: Sequence[str],
    log: Path,
    kills: Sequence[Kill],
    decided: Callable[[], int],
    tell: Callable[[int, int], None] = lambda killed, events: None,
    environment: Mapping[str, str] | None = None,
) -> SupervisedRun:
    """Run `command` until it ends by itself, start it again after each kill.

    Args:
        command: the child; what it prints goes to `log`.
        kills: in ascending order of `after`.
        decided: how many events the store holds as decided, now.
        tell: called with (kills so far, events decided) at each look.
        environment: of the child; None: this process's own.

    Raises:
        DemoFailed: the child ended with an error; the last one in its log is in the message.

    Crash: killed children leave whatever they were doing, which is the point; if this process dies by an exception, its child dies first.
    """
    began, killed, left = time.monotonic(), 0, list(kills)
    while True:
        with _child(command, log, environment) as child:
            if not _until_kill(child, left[0] if left else None, decided, partial(tell, killed)):
                _check_end(child, log)
                return SupervisedRun(killed, time.monotonic() - began)
        killed += 1
        left.pop(0)


@contextmanager
def _child(command: Sequence[str], log: Path, environment: Mapping[str, str] | None) -> Iterator[subprocess.Popen[bytes]]:
    """Start the child in a session of its own; at the end of the block all of it is gone, however the block ends."""
    with log.open("ab") as output:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment, start_new_session=True)
    try:
        yield child
    finally:
        end(child)


def _until_kill(child: subprocess.Popen[bytes], kill: Kill | None, decided: Callable[[], int], tell: Callable[[int], None]) -> bool:
    """Whether the moment to kill has come; False where the child ended by itself."""
    at_start = decided()
    while child.poll() is None:
        events = decided()
        tell(events)
        if kill is not None and events > max(at_start, kill.after):
            time.sleep(kill.delay)
            return child.poll() is None
        time.sleep(POLL)
    tell(decided())
    return False


def _check_end(child: subprocess.Popen[bytes], log: Path) -> None:
    if child.returncode:
        lines = log.read_text(errors="replace").splitlines()
        errors = [line for line in lines if re.match(r"(\w+\.)+[A-Z]\w+: |\w+(Error|Exception): ", line)] or lines
        raise DemoFailed(f"The stream ended with exit code {child.returncode} ({''.join(errors[-1:])}). Its whole output is in {log}.")


def end(child: subprocess.Popen[bytes]) -> None:
    """SIGKILL the child and everything in its session, and wait until all of it is gone.

    Raises:
        DemoFailed: something survives a minute of SIGKILL.
    """
    deadline = time.monotonic() + GONE_WITHIN
    while members := _members(child):
        for pid in members:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        child.poll()
        if time.monotonic() > deadline:
            raise DemoFailed(f"Processes {sorted(members)} do not end.")
        time.sleep(0.02)
    child.wait()


def _members(child: subprocess.Popen[bytes]) -> set[int]:
    """Process ids of the child's session that still run; a zombie runs no more, whether or not anybody collects it."""
    mine = str(child.pid)
    return {pid for pid, state, group, session in processes() if mine in (group, session) and not state.startswith("Z")}


def processes() -> Iterator[tuple[int, str, str, str]]:
    """(process id, state, process group, session) of every process; from /proc where there is one: small images lack `ps`."""
    if not Path("/proc/self/stat").exists():
        listing = subprocess.run(["ps", "-A", "-o", "pid=,stat=,pgid=,sess="], capture_output=True, text=True, check=True).stdout
        for line in listing.splitlines():
            pid, state, group, session = line.split()
            yield int(pid), state, group, session
        return
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
                state, _, group, session, *_ = (entry / "stat").read_text().rpartition(")")[2].split()
                yield int(entry.name), state, group, session
