"""Where lanes live: a PostgreSQL server of the loop's own, or a folder; on the disk, or on a small file system that can be filled."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import psycopg

from crash import disks
from kit import pg_server


class NoDisk(RuntimeError):
    """No small file system can be mounted here: that needs root, or `unshare -rm` for users (see disks.py)."""


class Disk:
    """A small file system of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._filler = folder, folder / "filler"

    def fill(self, left: int) -> None:
        """Leave so many bytes, or fewer: others write meanwhile."""
        size = -1
        with self._filler.open("wb") as file:
            while size:
                space = os.statvfs(self.folder)
                size = max(0, space.f_bavail * space.f_frsize - left)
                with contextlib.suppress(OSError):
                    return os.posix_fallocate(file.fileno(), 0, size) if size else None

    def free(self) -> None:
        """Give the space back."""
        self._filler.unlink(missing_ok=True)


@contextlib.contextmanager
def small_disk(kind: str) -> Iterator[Disk]:
    """Mounted for the length of the block, or before it. Raises NoDisk."""
    if (there := disks.mounted(kind)) is not None:
        yield Disk(there)
        return
    folder = Path(tempfile.mkdtemp(prefix="small-disk-"))
    command = ["mount", "-t", "tmpfs", "-o", f"size={disks.MEGABYTES[kind]}m,mode=755", "dedup-crash", str(folder)]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    if made.returncode:
        folder.rmdir()
        raise NoDisk(f"{NoDisk.__doc__} {made.stderr.strip()}")
    try:
        yield Disk(folder)
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
        folder.rmdir()


class Postgres:
    """A server that may be broken."""

    def __init__(self, server: pg_server.Server) -> None:
        self._server = server

    @property
    def port(self) -> int:
        """Where it listens."""
        return self._server.port

    @property
    def postmaster(self) -> int:
        """Its process."""
        assert self._server.process is not None
        return self._server.process.pid

    def database(self) -> str:
        """The DSN of a new, empty database."""
        name = f"lane_{uuid.uuid4().hex[:12]}"
        with psycopg.connect(self._server.dsn, autocommit=True) as connection:
            connection.execute(f"create database {name}")
        return f"{self._server.dsn.rsplit('/', 1)[0]}/{name}"

    def drop(self, dsn: str) -> None:
        """A database that is done with."""
        with psycopg.connect(self._server.dsn, autocommit=True) as connection:
            connection.execute(f"drop database {dsn.rsplit('/', 1)[1]} with (force)")

    def backends(self) -> list[int]:
        """Processes of client sessions, as the machine sees them: asking the server would be one more session."""
        found = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError, ValueError, IndexError):
                fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
                title = (entry / "cmdline").read_text() if int(fields[1]) == self.postmaster else ""
                if "postgres: postgres lane_" in title:
                    found.append(int(entry.name))
        return sorted(found)

    def kill_postmaster(self) -> None:
        """SIGKILL; whoever it left behind ends by itself before another one can start."""
        backends, process = self.backends(), self._server.process
        assert process is not None
        process.send_signal(signal.SIGKILL)
        process.wait()
        self._server.process = None
        _gone(backends)

    def crash(self) -> None:
        """Stop at once, as if the machine had failed."""
        self._server.kill()

    def start(self) -> None:
        """Recover. The shared memory of a killed postmaster may be in use for a moment longer."""
        until = time.monotonic() + pg_server.START_SECONDS
        while True:
            try:
                return self._server.start()
            except RuntimeError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.1)

    def wait(self) -> None:
        """Until it answers; a server that gave up is started again."""
        process = self._server.process
        if process is None or process.poll() is not None:
            return self.start()
        until = time.monotonic() + pg_server.START_SECONDS
        while True:
            try:
                return psycopg.connect(self._server.dsn).close()
            except psycopg.OperationalError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.05)


def _gone(pids: list[int]) -> None:
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        time.sleep(0.01)


@contextlib.contextmanager
def postgres(folder: Path | None = None) -> Iterator[Postgres]:
    """A server for the length of the block."""
    with pg_server.running_server(folder) as server:
        yield Postgres(server)


@contextlib.contextmanager
def folders(root: Path | None = None) -> Iterator[Path]:
    """A folder for Delta lanes, deleted afterwards."""
    made = Path(tempfile.mkdtemp(prefix="lanes-", dir=root))
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)
