"""Libraries of a few C functions that stand before those of libc (`LD_PRELOAD`): they have to be there when a process starts."""

from __future__ import annotations

import functools
import shutil
import subprocess
import tempfile
from pathlib import Path


class NoCompiler(RuntimeError):
    """No C compiler here, or not Linux: functions of libc cannot be replaced. Install gcc or clang."""


@functools.cache
def compiled(source: Path) -> Path:
    """The library, in a folder of its own that every user can enter: a server that root starts runs as somebody else. Raises NoCompiler."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None or not Path("/proc/self").exists():
        raise NoCompiler(NoCompiler.__doc__)
    folder = Path(tempfile.mkdtemp(prefix=f"{source.stem}-"))
    folder.chmod(0o755)
    made = folder / f"{source.stem}.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", str(made), str(source), "-ldl"], check=True)
    return made
