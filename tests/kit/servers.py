"""What servers of tests have in common: free ports, a process that ends with its starter, and how it is ended."""

from __future__ import annotations

import ctypes
import signal
import socket
import subprocess
import sys

END_SECONDS = 90.0


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


class RunsProcess:
    """A server that runs as a process of ours."""

    process: subprocess.Popen[bytes] | None

    def _end(self, how: signal.Signals) -> None:
        """Send it this signal, and wait for its end."""
        if self.process is not None:
            self.process.send_signal(how)
            self.process.wait(END_SECONDS)
            self.process = None
