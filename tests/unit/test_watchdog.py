"""Limits of runs: each has its own, whatever else is limited in the process, and a hang ends the process whatever it holds."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from dedup.pipeline import reentry
from fixtures.variants import of_which

FILE = Path(reentry.__file__)
"""Processes that load nothing but this begin in a moment."""

HEAD = (
    f"""
import ctypes, faulthandler, os, sys, threading, time
sys.path.insert(0, {str(FILE.parent)!r})
import reentry
from reentry import limited
"""
    + """

def within(seconds, body, *more):
    def run():
        with limited(seconds, f"a run of {seconds} s", *more):
            begun.set()
            body()
    begun = threading.Event()
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    begun.wait()
    return thread

def hang():
    threading.Event().wait(30)

def hang_with_the_lock():
    ctypes.PyDLL(None).sleep(600)
"""
)

BODIES = {
    "a longer limit ends": "within(0.2, hang); within(600, lambda: None).join(); hang()",
    "a shorter limit begins later": "within(600, hang); within(0.2, hang); hang()",
    "the lock is held": "within(600, hang); within(0.2, hang_with_the_lock); hang()",
    "whoever is told fails": "within(0.2, hang, lambda: 1 / 0); hang()",
    "a child of a fork": "within(600, hang)\nif child := os.fork():\n    os._exit(os.waitpid(child, 0)[1] >> 8)\nwithin(0.2, hang); hang()",
    "a longer limit begins": "within(0.2, hang); within(600, hang); hang()",
    "a shorter limit ends": "within(0.5, hang); within(0.4, lambda: None).join(); hang()",
    "many limits come and go": "within(0.5, hang)\nwhile True:\n    with limited(0.4): pass",
    "the user takes the timer": "within(0.2, hang); faulthandler.cancel_dump_traceback_later(); hang()",
    "whoever is told hangs": "reentry.TELLING_SECONDS = 0.2; within(0.2, hang, hang); hang()",
    "a fork while it runs": "within(0.5, hang)\nif os.fork() == 0:\n    os._exit(0)\nhang()",
}


def end_of(body: str) -> tuple[int, str]:
    """Exit code and stderr of a process that runs this."""
    done = subprocess.run([sys.executable, "-c", HEAD + textwrap.dedent(body)], capture_output=True, text=True, timeout=40, check=False)
    return done.returncode, done.stderr


@pytest.mark.parametrize("body", of_which(5, BODIES.values()), ids=BODIES)
def test_a_hang_ends_the_process_whatever_else_is_limited(body: str) -> None:
    """The limit that is over ends the process, with its stacks on stderr: no other limit, lock, fork or timer keeps it alive."""
    code, said = end_of(body)
    assert code == 1 and "Timeout" in said and "most recent call first" in said, (code, said)


def test_runs_within_their_limits_leave_the_process_alone() -> None:
    """Also where others are limited beside them, and after a limit whose run is over in time would have been due."""
    code, said = end_of(
        "within(0.3, lambda: None).join(); within(0.3, lambda: None).join()\nwith limited(600): time.sleep(0.8)\nos._exit(7)"
    )
    assert (code, said) == (7, "")


def test_it_is_said_who_is_due_and_only_they_are_told() -> None:
    """The run that is over is named on stderr, and told before the end."""
    tells = 'lambda: os.write(2, b"told short"), lambda: os.write(2, b"told long")'
    code, said = end_of(f"short, long = {tells}\nwithin(600, hang, long); within(0.2, hang, short); hang()")
    assert code == 1 and "a run of 0.2 s took longer" in said and "told short" in said
    assert "a run of 600 s" not in said and "told long" not in said
