"""A lane whose processes are Spark drivers, and what can die of one: the driver, its JVM, its Python workers."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from crash import log
from crash.lane import Lane

LIMIT = 600.0
"""Seconds for one life of a driver."""


class Driver:
    """A process that was started by us; as children.Child, as far as lanes look at one."""

    def __init__(self, command: list[str], errors: Path) -> None:
        self._errors = errors
        with errors.open("wb") as said:
            self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=said, start_new_session=True)
        self.pid = self._process.pid

    @property
    def ended(self) -> bool:
        """Whether it has."""
        return self._process.poll() is not None

    def wait(self) -> tuple[int, str]:
        """Its exit code and what it said; its JVM is gone as well then."""
        try:
            code = self._process.wait(LIMIT)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
        return code, self._errors.read_text(errors="replace")

    def finish(self) -> None:
        """It must end well."""
        code, said = self.wait()
        assert code == 0, said[-3000:]

    def below(self, word: str) -> list[int]:
        """Processes below it with this word in their command line."""
        every, family = list(_processes()), {self.pid}
        while more := {pid for pid, parent, _ in every if parent in family} - family:
            family |= more
        return sorted(pid for pid, _, line in every if pid in family and word in line)


def _processes() -> Iterable[tuple[int, int, str]]:
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError, IndexError):
            fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            yield int(entry.name), int(fields[1]), (entry / "cmdline").read_text().replace("\0", " ")


class SparkLane(Lane):
    """Its log is a folder of files, one for each batch; its progress is Spark's own."""

    def start(self, **task: Any) -> Driver:  # type: ignore[override]
        """A driver that reads to the end of the log."""
        (self.folder / "landing").mkdir(exist_ok=True)
        for number in range(self.batches):
            file = self.folder / f"landing/{number:06d}.parquet"
            if not file.exists():
                pq.write_table(log.planned(self.seed, number), file)
                os.utime(file, (1_000_000_000 + number,) * 2)
        where = str(self.place.folder) if self.kind == "delta" else self.place.url  # type: ignore[attr-defined]
        told = {
            "kind": self.kind,
            "place": where,
            "folder": str(self.folder),
            "patience": 0.0,
            "started": str(self.folder / "mark"),
            **task,
        }
        command = [sys.executable, "-m", "crash.spark_child", json.dumps(told)]
        return Driver(command, self.folder / f"errors-{uuid.uuid4().hex[:8]}")

    @classmethod
    def new(cls, kind: str, where: str, nursery: Any, seed: int) -> SparkLane:
        """Rejections at random are the plain loops'."""
        made = super().new(kind, where, nursery, 2 * seed)
        assert isinstance(made, SparkLane)
        return made


def _killed(word: str | None) -> Callable[[Lane, random.Random], str]:
    def fault(lane: Lane, dice: random.Random) -> str:
        """SIGKILL of the driver, or of one of the processes below it, in the middle of a batch."""
        mark = lane.folder / f"mark-{uuid.uuid4().hex[:8]}"
        driver: Any = lane.start(started=str(mark))
        while not mark.exists() and not driver.ended:
            time.sleep(0.02)
        while word is not None and not driver.below(word) and not driver.ended:
            time.sleep(0.02)  # Python workers come when a task wants one
        seconds = dice.random() * 3
        time.sleep(seconds)
        found = [driver.pid] if word is None else driver.below(word)
        lane.missed = driver.ended or not found
        if found and not driver.ended:
            with contextlib.suppress(ProcessLookupError):
                os.kill(dice.choice(found), signal.SIGKILL)
        lane.wait(driver)
        return f"after {seconds:.3f} s, {len(found)} of them"

    return fault


FAULTS = {
    "Spark: kill -9 of the driver": _killed(None),
    "Spark: kill -9 of the JVM": _killed("java"),
    "Spark: kill -9 of a Python worker": _killed("pyspark.daemon"),
}
"""Of every store."""
