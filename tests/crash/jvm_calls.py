"""Kills Spark's JVM at one of the calls by which Python asks it, counted from where the handler begins."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

from py4j.clientserver import ClientServerConnection

from crash.drivers import below

DYING_SECONDS = 0.3


def kill_soon(started: Path) -> None:
    """SIGKILL of the JVM as soon as the handler, which may run anywhere, has touched this file."""

    def watch() -> None:
        while not started.exists():
            time.sleep(0.001)
        _kill()

    threading.Thread(target=watch, daemon=True).start()


def kill_at(number: int, started: Path) -> None:
    """SIGKILL of the JVM right before call `number` after the handler has touched this file; where it is negative, during that call."""
    real, lock, seen = ClientServerConnection.send_command, threading.Lock(), [0]

    def send(self: Any, command: str) -> Any:
        if started.exists():
            with lock:
                seen[0] += 1
            if seen[0] == number:
                _kill()
                time.sleep(DYING_SECONDS)
            elif seen[0] == -number:
                threading.Thread(target=_kill, args=(0.01,)).start()
        return real(self, command)

    ClientServerConnection.send_command = send


def _kill(wait: float = 0.0) -> None:
    time.sleep(wait)
    for pid in below(os.getpid(), "java"):
        os.kill(pid, signal.SIGKILL)
