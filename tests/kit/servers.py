"""What servers of tests have in common: free ports, a process that ends with its starter, and how it is ended."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

START_SECONDS, END_SECONDS = 60.0, 90.0


def free_ports(number: int) -> list[int]:
    """So many ports of this machine that nobody listens on."""
    probes = [socket.socket() for _ in range(number)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    ports = [int(probe.getsockname()[1]) for probe in probes]
    for probe in probes:
        probe.close()
    return ports


def die_with_parent(how: signal.Signals = signal.SIGKILL) -> None:
    """For `preexec_fn`: the process gets this signal when its starter ends, so that a killed test run leaves no server behind."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, how)  # PR_SET_PDEATHSIG


@contextlib.contextmanager
def listening(name: str, command: Sequence[str], port: int, **environ: str) -> Iterator[None]:
    """A server that listens on this port of this machine, in a folder of its own, for the length of the block.

    Raises:
        RuntimeError: it did not start; the end of what it said.
    """
    with tempfile.TemporaryDirectory(prefix=f"{name}-") as folder, (Path(folder) / "log").open("wb") as log:
        around = {**os.environ, **environ, "TMPDIR": folder}
        process = subprocess.Popen(command, env=around, stdout=log, stderr=log, cwd=folder, preexec_fn=die_with_parent)
        try:
            _wait(name, process, port, Path(log.name))
            yield
        finally:
            process.kill()
            process.wait(END_SECONDS)


def _wait(name: str, process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    until = time.monotonic() + START_SECONDS
    while time.monotonic() < until and process.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.05)
    raise RuntimeError(f"{name} did not start:\n" + log.read_text()[-2000:])


class RunsProcess:
    """A server that runs as a process of ours."""

    process: subprocess.Popen[bytes] | None

    def _end(self, how: signal.Signals) -> None:
        """Send it this signal, and wait for its end."""
        if self.process is not None:
            self.process.send_signal(how)
            self.process.wait(END_SECONDS)
            self.process = None
