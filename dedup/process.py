"""The end of a process that is this library's own: the command `dedup`, and the driver that the demo kills."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from contextlib import suppress
from typing import NoReturn


def leave(ended: SystemExit) -> NoReturn:
    """End this process as Python would for this exit, but without freeing the interpreter.

    A thread of Arrow that lets go of a Python object meanwhile would abort the process after all its work ("terminate called without an
    active exception", exit code 134; https://github.com/apache/arrow/issues/34314). So multiprocessing ends its children, too.
    """
    if isinstance(ended.code, str):
        print(ended.code, file=sys.stderr)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in filter(None, (sys.stdout, sys.stderr)):  # None where it was closed from the start
        with suppress(OSError, ValueError):  # nobody reads it any more
            stream.flush()
    os._exit(ended.code if isinstance(ended.code, int) else int(ended.code is not None))
