"""Copies of files of keys on emulators of object storage: a new machine fetches them, and processes that make them are killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from dedup.delta import DeltaStore, key_objects, keys
from kit import delta_kit as kit
from kit import http_proxy, key_child, object_storage
from kit.http_proxy import BEFORE, LOST, HttpProxy
from kit.key_child import MOST
from kit.key_kit import copied, copies_of, decide, folder_of, known, noted_reads, wrong
from kit.paths import environment

pytestmark = pytest.mark.objects

S3, AZ = pytest.param("s3"), pytest.param("az", marks=pytest.mark.full)


@pytest.fixture
def where(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """An empty place on the storage; a few keys make files of a few parts."""
    for name in ("FLUSH_ROWS", "RUN_ROWS", "SLICE_ROWS", "MOST_SMALL"):
        monkeypatch.setattr(keys, name, getattr(keys, name))  # so that they come back
    monkeypatch.setattr(key_objects, "PART", key_objects.PART)
    key_child.make_small()
    found: str = request.getfixturevalue(f"{request.param}_folder")
    return found


@pytest.fixture
def settings(request: pytest.FixtureRequest, where: str) -> dict[str, str]:
    """What leads to the server."""
    found: dict[str, str] = request.getfixturevalue(f"{where.partition(':')[0]}_settings")
    return found


@pytest.fixture
def proxy(settings: dict[str, str]) -> Iterator[HttpProxy]:
    """Before the server, for other processes."""
    with http_proxy.proxied(object_storage.server(settings)) as made:
        yield made


@pytest.mark.parametrize("where", [S3, AZ], indirect=True)
def test_a_new_machine_fetches_the_files_from_the_storage(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In parts, with a folder and without: it reads no reservation that the files have, and upkeep leaves what is needed."""
    reads = noted_reads(monkeypatch)
    store = DeltaStore(f"{where}/state")
    epoch = kit.epoch(store)
    for first in range(0, 60, 5):
        decide(store, epoch, range(first, first + 5))
        copied(store)
    store.maintain(kit.NAME)
    for machine in (None, tmp_path / "machine"):
        reads.clear()
        started = DeltaStore(f"{where}/state", keys_folder=machine)
        assert known(started) == list(range(60)) and reads == [] and wrong(started) == []
    assert caplog.text == "" and any(folder_of(tmp_path / "machine").glob("*.keys"))


class Killer:
    """A rule that kills a process at its Nth request for copies: before it arrives, or once it is carried out."""

    def __init__(self, nth: int, way: str) -> None:
        self.process: subprocess.Popen[str] | None = None
        self._left, self._way, self._lock = nth, way, threading.Lock()

    def __call__(self, method: str, path: str) -> str:
        if "keys" not in path or self.process is None:
            return ""
        with self._lock:
            self._left -= 1
            if self._left != -1:
                return ""
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait()
        return self._way


def run(killer: Killer, where: str, machine: Path, settings: dict[str, str]) -> tuple[list[int], int]:
    """What a process said before it was killed, and its exit code."""
    line = [sys.executable, "-m", "kit.key_child", where, str(machine), "24"]
    killer.process = subprocess.Popen(line, stdout=subprocess.PIPE, text=True, env=environment(**settings))
    told, _ = killer.process.communicate(timeout=120)
    return [*map(int, told.split())], killer.process.returncode


@pytest.mark.full
@pytest.mark.parametrize(
    ("where", "step"),
    [("s3", 13), ("s3", 1), ("az", 1)],
    indirect=["where"],
)
def test_a_kill_at_any_request_misleads_no_start(
    where: str,
    step: int,
    proxy: HttpProxy,
    settings: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """kill -9 while files are fetched, copied, listed and deleted: each start knows every key, and no list lacks files."""
    monkeypatch.setattr(key_objects.Aside, "do", lambda *args: None)  # this process only looks
    reached, nth = 0, 0
    while True:
        proxy.rule = killer = Killer(nth, (BEFORE, LOST)[nth % 2])
        told, code = run(killer, where, tmp_path / f"machine {nth // (3 * step)}", object_storage.through(settings, proxy.address))
        assert code in (0, -signal.SIGKILL) and all(number >= reached for number in told)
        reached = max([reached, *told])
        found = known(DeltaStore(f"{where}/state"), MOST)
        assert found == list(range(len(found))) and len(found) >= reached
        if code == 0:
            break
        nth += step
    reads, last = noted_reads(monkeypatch), DeltaStore(f"{where}/state")
    assert nth >= 20 and known(last, MOST) == list(range(reached))
    assert all(seq > copies_of(last).lists()[0].seq for seq in reads), "only what came after the copies"
    assert wrong(DeltaStore(f"{where}/state")) == [] and "cannot be used" not in caplog.text
