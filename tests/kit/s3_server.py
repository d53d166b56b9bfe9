"""MiniStack, an emulator of S3: installed once beside the virtual environment, run on a free port, gone with its starter.

It lives in an environment of its own, because it pins versions of libraries that the tests use, too. Its put-if-absent is what Delta's
commits rest on, so `prove_put_if_absent` is asked first. Plain functions, no pytest: benchmarks use them, too.
"""

from __future__ import annotations

import contextlib
import fcntl
import subprocess
import sys
import urllib.error
import urllib.request
import venv
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kit.servers import free_ports, listening

MINISTACK = "ministack==1.5.33"
HOME = Path(sys.prefix) / "ministack"

IMPATIENT = "import sys; sys.setswitchinterval(1e-6); from ministack.app import main; sys.argv = ['ministack']; main()"
"""Threads of the server interrupt each other at every few instructions: what is not atomic there shows."""

WRITERS, ROUNDS = 32, 20


@contextlib.contextmanager
def running_s3() -> Iterator[str]:
    """The address of a server that keeps objects in memory, for the length of the block."""
    python, port = _installed(), free_ports(1)[0]
    settings = {"GATEWAY_PORT": str(port), "BIND_HOST": "127.0.0.1", "SERVICES": "s3", "S3_PERSIST": "0", "LOG_LEVEL": "WARNING"}
    with listening("ministack", [python, "-c", IMPATIENT], port, **settings):
        yield f"http://127.0.0.1:{port}"


def put(address: str, path: str, body: bytes = b"", *, absent: bool = False) -> int:
    """The status of a PUT of /bucket or /bucket/key; the emulator asks for no signature."""
    request = urllib.request.Request(f"{address}/{path}", data=body, method="PUT", headers={"If-None-Match": "*"} if absent else {})
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        error.close()
        return error.code


def prove_put_if_absent(address: str, bucket: str) -> None:
    """Many writers of one key, again and again. Raises AssertionError where not exactly one of them was told that it wrote it."""
    with ThreadPoolExecutor(WRITERS) as pool:
        for number in range(ROUNDS):
            path = f"{bucket}/proof/{number}"
            told = sorted(pool.map(lambda writer, path=path: put(address, path, f"{writer}".encode(), absent=True), range(WRITERS)))  # type: ignore[misc]
            assert told == [200] + [412] * (WRITERS - 1), f"put-if-absent of {address} is not atomic: {told}"


def _installed() -> str:
    """The interpreter of its environment, made where it is missing. Safe to call from several processes at once."""
    HOME.mkdir(exist_ok=True)
    python, ready = HOME / "bin/python", HOME / MINISTACK
    with (HOME / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not ready.exists():
            venv.create(HOME, with_pip=True)
            install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", MINISTACK]
            done = subprocess.run(install, capture_output=True, text=True, check=False)
            if done.returncode:
                raise RuntimeError(f"{MINISTACK} could not be installed:\n" + (done.stdout + done.stderr)[-2000:])
            ready.touch()
    return str(python)
