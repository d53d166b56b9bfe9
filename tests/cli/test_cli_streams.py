"""What the program does where its standard streams are closed, full, or read by nobody: real processes, real pipes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fixtures.variants import of_which
from kit.orders import batch, consumer, orders
from kit.places import DeltaPlace

PROGRAM = f"{sys.executable} -m dedup"

pytestmark = pytest.mark.delta


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a store with one batch and nothing wrong."""
    place = DeltaPlace(tmp_path_factory.mktemp("streams"))
    place.create_sink()
    consumer(place.store())(batch(*orders(range(3))), 0)
    return str(place.url)


def shell(line: str) -> subprocess.CompletedProcess[str]:
    """A command line of bash, where a pipe fails with the code of the program."""
    return subprocess.run(["bash", "-c", f"set -o pipefail; {line}"], capture_output=True, text=True, timeout=120)


@pytest.mark.full
def test_a_closed_standard_output_changes_no_exit_code(store: str) -> None:
    """A scheduler that closes standard output gets the exit code of the command, and no stack trace."""
    done = shell(f"{PROGRAM} status --store {store} >&-")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.full
@pytest.mark.parametrize(("path", "code"), of_which(1, [("/absent", 2), ("", 0)]))
def test_a_closed_standard_error_changes_no_exit_code(path: str, code: int, store: str) -> None:
    """A daemon without standard error gets the exit code of the command."""
    assert shell(f"{PROGRAM} verify --store {store}{path} 2>&-").returncode == code


def test_a_reader_that_has_gone_is_not_taken_for_a_contradiction(store: str) -> None:
    """Exit code 1 of `verify` means a contradiction; a closed pipe has a code of its own."""
    assert shell(f"{PROGRAM} verify --store {store} | true").returncode == 141


@pytest.mark.full
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_full_disk_is_one_sentence(store: str) -> None:
    """A disk that is full is no unexpected error: the message says what to do."""
    done = shell(f"{PROGRAM} status --store {store} > /dev/full")
    assert (done.returncode, done.stderr) == (2, "dedup: There is no space left for the output. Free some, or write elsewhere.\n")
