"""Small file systems without root: in a user and mount namespace of our own (`unshare -rm`), left again for the user that we were.

`python -m crash` starts itself anew through here where it may not mount. PostgreSQL refuses to run as root, and root of a namespace is
root: so the disks are mounted there, and everything else runs in a second namespace inside, as the user it was.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

MEGABYTES = {"postgres": 300, "delta": 32}
"""Of the small file systems."""

MADE = "DEDUP_CRASH_DISKS"
"""Variable with the folder in which they are mounted already, one for each store."""

_MOUNT = "mount -t tmpfs -o size={size}m,mode=755 dedup-crash {folder}"


def mounted(kind: str) -> Path | None:
    """The small file system of this store, where `again` has made one."""
    return Path(os.environ[MADE]) / kind if MADE in os.environ else None


def possible() -> bool:
    """Whether this machine lets an ordinary user do it."""
    try:
        done = subprocess.run(
            ["unshare", "-rm", "unshare", "-U", "--map-user=1", "--map-group=1", "true"], capture_output=True, check=False
        )
    except OSError:
        return False
    return done.returncode == 0


def again(command: list[str]) -> None:
    """Become this command, with small file systems mounted; returns where that is not possible, or not needed."""
    if os.geteuid() == 0 or MADE in os.environ or sys.platform != "linux" or not possible():
        return
    root = Path(tempfile.mkdtemp(prefix="small-disks-"))
    mounts = []
    for kind, size in MEGABYTES.items():
        (root / kind).mkdir()
        mounts.append(_MOUNT.format(size=size, folder=root / kind))
    inside = f'exec unshare -U --map-user={os.geteuid()} --map-group={os.getegid()} "$@"'
    os.environ[MADE] = str(root)
    os.execvp("unshare", ["unshare", "-rm", "sh", "-ec", "\n".join([*mounts, inside]), "sh", *command])
