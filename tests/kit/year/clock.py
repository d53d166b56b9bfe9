"""A time of day that a test sets, for whole processes: Python, Arrow, delta-rs and PostgreSQL read it from libc.

A library of five functions stands before those of libc (`LD_PRELOAD`), and needs a C compiler. Files keep the system's time: a year that
ends now has files from the future, so that nobody takes them for old ones, until `Clock.age` gives them their time.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from kit.preload import compiled


class Clock:
    """The time of all processes that are started with `environment`. Raises NoCompiler."""

    def __init__(self, now: float) -> None:
        self._library = compiled(Path(__file__).with_suffix(".c"))
        self._file = self._library.with_name(f"now-{os.getpid()}-{id(self)}")
        self._file.write_bytes(bytes(8))
        self._file.chmod(0o644)
        with self._file.open("r+b") as opened:
            self._ahead = mmap.mmap(opened.fileno(), 8)
        self.set(now)
        self._aged = 0.0

    @property
    def environment(self) -> Mapping[str, str]:
        """What a process needs to have this time."""
        return {"LD_PRELOAD": str(self._library), "DEDUP_TEST_CLOCK": str(self._file)}

    def now(self) -> float:
        """As the processes see it; this one has the system's time."""
        return float(time.time() + struct.unpack("=q", self._ahead[:])[0])

    def set(self, now: float) -> None:
        """Jump to this time, to the second. From there the clock goes on."""
        self._ahead[:] = struct.pack("=q", round(now - time.time()))

    def age(self, folder: Path) -> None:
        """Give the files below a folder that were written since the last call the clock's time."""
        since, self._aged, now = self._aged, time.time(), self.now()
        for where, _, names in os.walk(folder):
            for path in (Path(where, name) for name in names):
                with suppress(FileNotFoundError):  # whoever is at work removes some
                    if path.stat().st_mtime > since:
                        os.utime(path, (now, now))
