"""A real PgBouncer in front of a real PostgreSQL. Debian's package `pgbouncer` has it; DEDUP_TEST_PGBOUNCER may name the program."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from psycopg.conninfo import conninfo_to_dict, make_conninfo

from kit.pg_server import _identity
from kit.servers import die_with_parent, free_ports

SECONDS = 30.0


def program() -> str | None:
    """Where it is; None where it is not installed."""
    return os.environ.get("DEDUP_TEST_PGBOUNCER") or shutil.which("pgbouncer", path=f"{os.environ.get('PATH', '')}:/usr/sbin")


@contextmanager
def pooled(dsn: str, mode: str) -> Iterator[str]:
    """The DSN of the same database behind a pooler.

    Args:
        mode: "session" or "transaction".
    """
    server, port, found = conninfo_to_dict(dsn), free_ports(1)[0], program()
    assert found is not None
    folder = Path(tempfile.mkdtemp(prefix="dedup-bouncer-"))
    folder.chmod(0o755)
    (folder / "users.txt").write_text(f'"{server["user"]}" ""\n')
    (folder / "bouncer.ini").write_text(
        f"[databases]\n* = host={server['host']} port={server['port']}\n[pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {port}\n"
        f"unix_socket_dir =\nauth_type = trust\nauth_file = {folder}/users.txt\npool_mode = {mode}\nserver_round_robin = 1\n"
    )
    line = [found, "-q", str(folder / "bouncer.ini")]
    with subprocess.Popen(line, preexec_fn=die_with_parent, **_identity()) as process:  # type: ignore[call-overload]
        try:
            _wait(port)
            yield make_conninfo(dsn, host="127.0.0.1", port=port)
        finally:
            process.kill()
            shutil.rmtree(folder)


def _wait(port: int) -> None:
    until = time.monotonic() + SECONDS
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            assert time.monotonic() < until, "PgBouncer does not listen"
            time.sleep(0.05)
