"""Which process is this, and is that one still alive: the proof that a holder of an epoch is gone.

Promises to say "gone" only where it is proven: same host name, same boot, same process namespace, and no live process of that start time.
Called by whoever takes an epoch. Linux tells all of it in /proc; elsewhere the answer is "unknowable" and a takeover waits.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import NamedTuple

_PROC = Path("/proc")


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
