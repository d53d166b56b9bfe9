"""Who holds a consumer: which process this is, whether the holder of an epoch is still alive, and how an epoch is taken.

Promises to say "gone" only where it is proven: same host name, same boot, same process namespace, and no live process of that start time.
Linux tells all of it in /proc; elsewhere the answer is "unknowable", and a takeover waits. Called by the consumer at the first batch of a
query run, by members, and by both stores at a takeover.
"""

from __future__ import annotations

import logging
import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from checkpoint.head import Head, Holder, StateStore

log = logging.getLogger("dedup")

_PROC = Path("/proc")


@dataclass(frozen=True)
class Live:
    """One query run of this process that holds the epoch."""

    run_key: str
    head: Head
    begun: bool = False  # whether the last try of a batch was through


def take_epoch(store: StateStore, consumer: str, run_key: str, takeover_after: float, *, force: bool) -> Head:
    """The epoch of a query run, taken once: an instance that was fenced stays fenced. Raises StillHeld.

    Crash: as the store's `take_epoch` says.
    """
    holder = Holder(*this_process(), run_key)
    head = store.take_epoch(consumer, holder, takeover_after=takeover_after, force=force, on_wait=_tell_waiting)
    log.info("%s: epoch %d", consumer, head.epoch, extra={"epoch": head.epoch})
    return head


def _tell_waiting(seconds: float, who: str) -> None:
    log.warning("waiting %.0f s to see whether the other instance (%s) is alive; takeover=Takeover(now=True) does not wait", seconds, who)


class Process(NamedTuple):
    """One life of one process."""

    host: str
    pid: int
    started: str  # boot id / process namespace / start in clock ticks since boot; empty where the system does not tell


def this_process() -> Process:
    """The process that runs this call."""
    return Process(socket.gethostname(), os.getpid(), _started(os.getpid()) or "")


def is_alive(host: str, pid: int, started: str) -> bool | None:
    """Whether that process still runs; None where it cannot be known from here.

    A stopped process is alive. A zombie is not: it will never run again.

    Source: proc_pid_stat(5), fields 3 (state) and 22 (start time), read 2025-06.
    """
    here = this_process()
    if not started or not here.started or host != here.host or _world(started) != _world(here.started):
        return None
    return _started(pid) == started


def _world(started: str) -> str:
    """Boot and namespace: process numbers of another one say nothing about ours."""
    return started.rpartition("/")[0]


def _started(pid: int) -> str | None:
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
        namespace = os.readlink(_PROC / "self/ns/pid")
        # The command name may hold spaces and brackets: everything after the last one is plain.
        fields = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZXx" else f"{boot}/{namespace}/{fields[19]}"
