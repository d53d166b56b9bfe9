"""Makes the n-th file operation below a folder fail, in this very process: whoever asks for it, Python, Arrow or delta-rs.

A library of a few C functions stands before those of libc (`LD_PRELOAD`): it has to be there when the process starts, and needs a C
compiler.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

from kit.preload import compiled

WAYS = ("passes", "error", "lost", "full", "killed before", "killed after")
"""What happens: an I/O error instead of the operation, or after it was done; no space left instead of it; SIGKILL before or after it."""


def environment() -> dict[str, str]:
    """Of a process whose file operations may fail. Raises NoCompiler."""
    return {**os.environ, "LD_PRELOAD": str(compiled(Path(__file__).with_suffix(".c")))}


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
