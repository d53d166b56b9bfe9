"""Makes the n-th file operation below a folder fail, in this very process: whoever asks for it, Python, Arrow or delta-rs.

A library of a few C functions stands before those of libc (`LD_PRELOAD`): it has to be there when the process starts, and needs a C
compiler.
"""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

WAYS = ("passes", "error", "lost", "full", "killed before", "killed after")
"""What happens: an I/O error instead of the operation, or after it was done; no space left instead of it; SIGKILL before or after it."""


class NoCompiler(RuntimeError):
    """No C compiler here, or not Linux: file operations cannot be made to fail. Install gcc or clang."""


@functools.cache
def library() -> Path:
    """The library, compiled. Raises NoCompiler."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None or not Path("/proc/self").exists():
        raise NoCompiler(NoCompiler.__doc__)
    made = Path(tempfile.mkdtemp(prefix="file-calls-")) / "file_calls.so"
    source = Path(__file__).with_name("file_calls.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", str(made), str(source), "-ldl"], check=True)
    return made


def environment() -> dict[str, str]:
    """Of a process whose file operations may fail. Raises NoCompiler."""
    return {**os.environ, "LD_PRELOAD": str(library())}


def arm(folder: str, number: int, way: str, *, reads: bool = False) -> None:
    """Count operations below a folder from now on; the one with this number (from 1) fails. 0: none does."""
    ctypes.CDLL(None).calls_arm(os.fsencode(folder), ctypes.c_long(number), WAYS.index(way), int(reads))


def failed() -> str:
    """What failed since then: the operation and its path below the folder."""
    calls = ctypes.CDLL(None)
    calls.calls_failed.restype = ctypes.c_char_p
    return os.fsdecode(calls.calls_failed())


def seen() -> int:
    """How many operations there were since then."""
    calls = ctypes.CDLL(None)
    calls.calls_seen.restype = ctypes.c_long
    return int(calls.calls_seen())
