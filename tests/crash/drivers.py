"""Spark drivers to be killed: a process works through one task after the other until it is killed, because Spark starts slowly."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kit.paths import environment

LIMIT = 600.0
"""Seconds for one task."""

ANSWER, DONE = "answer ", "done"
"""Before what a driver says of a task; of one that ended well."""


class Driver:
    """A process and its task; as children.Child, as far as lanes look at one."""

    def __init__(self, folder: Path, number: int, options: Sequence[str], around: Mapping[str, str]) -> None:
        self._errors = folder / f"driver{number}"
        command = [sys.executable, "-m", "crash.spark_child", *options]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        with self._errors.open("wb") as said:
            self._process = subprocess.Popen(command, env=dict(around), stderr=said, start_new_session=True, **pipes)
        self.pid, self.idle, self._answer = self._process.pid, True, ""
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(ANSWER):  # the JVM has the same stdout
                self._lines.put(line.removeprefix(ANSWER).strip())

    def give(self, task: dict[str, Any]) -> None:
        """One more task."""
        assert self.idle and self._process.stdin is not None
        self.idle, self._answer = False, ""
        with contextlib.suppress(BrokenPipeError):  # whoever waits for it hears that it is gone
            self._process.stdin.write(json.dumps(task) + "\n")
            self._process.stdin.flush()

    @property
    def alive(self) -> bool:
        """Whether it may be given a task."""
        return self._process.poll() is None

    @property
    def ended(self) -> bool:
        """Whether its task has."""
        return self.idle or not self._lines.empty() or not self.alive

    def wait(self) -> tuple[int, str]:
        """How the task ended: as the exit code of a process, and what it said. A process that has died takes its JVM with it."""
        if not self.idle:
            self._answer, self.idle = self._heard(), True
        if self._answer:
            return (0, "") if self._answer == DONE else (1, f"{self._answer}:")
        self.kill()
        return self._process.returncode, self._said()

    def _heard(self) -> str:
        """Its answer; none of one that has died."""
        until = time.monotonic() + LIMIT
        while time.monotonic() < until:
            alive = self.alive  # asked first: what it said before it died has arrived a moment later
            with contextlib.suppress(queue.Empty):
                return self._lines.get(timeout=0.1)
            if not alive:
                return ""
        self.kill()
        raise AssertionError(f"a driver hangs: {self._said()}")

    def _said(self) -> str:
        return self._errors.read_text(errors="replace")[-3000:]

    def finish(self) -> None:
        """It must end well."""
        code, said = self.wait()
        assert code == 0, said + self._said()

    def send(self, number: signal.Signals) -> None:
        """A signal for it and for all below it."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def kill(self) -> None:
        """With all below it; returns when they are gone."""
        self.send(signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                pipe.close()  # type: ignore[union-attr]

    def below(self, word: str) -> list[int]:
        """Processes below it with this word in their command line."""
        return below(self.pid, word)


def below(pid: int, word: str) -> list[int]:
    """Processes below this one with this word in their command line."""
    every, family = list(_processes()), {pid}
    while more := {pid for pid, parent, _ in every if parent in family} - family:
        family |= more
    return sorted(pid for pid, _, line in every if pid in family and word in line)


def _processes() -> Iterable[tuple[int, int, str]]:
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError, IndexError):
            fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            yield int(entry.name), int(fields[1]), (entry / "cmdline").read_text().replace("\0", " ")


class Garage:
    """Drivers, seen from the loop: a task goes to one that has nothing to do, or to a new one.

    Args:
        options: of each driver's command.
        around: its environment; this process's one where it is not given.
    """

    def __init__(self, folder: Path, options: Sequence[str] = (), around: Mapping[str, str] | None = None) -> None:
        self._folder, self._made, self._drivers = folder, 0, list[Driver]()
        self._options, self._around = options, environment() if around is None else around

    def start(self, task: dict[str, Any]) -> Driver:
        """A driver at work on this task."""
        for gone in [d for d in self._drivers if not d.alive]:
            gone.kill()  # what is left of it, and its pipes
            self._drivers.remove(gone)
        idle = next((d for d in self._drivers if d.idle), None)
        driver = idle or self._new()
        driver.give(task)
        return driver

    def _new(self) -> Driver:
        self._made += 1
        self._drivers.append(Driver(self._folder, self._made, self._options, self._around))
        return self._drivers[-1]

    def retire(self) -> None:
        """End those that have nothing to do, but one."""
        for driver in [driver for driver in self._drivers if driver.idle][1:]:
            driver.kill()
            self._drivers.remove(driver)

    def close(self) -> None:
        """End them all."""
        for driver in self._drivers:
            driver.kill()
