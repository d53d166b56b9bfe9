"""Three instances fight for one log while they are killed and stopped at random: nothing is lost, nothing is doubled."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from deltalake import DeltaTable

from deadletter.selection import Selection
from kit import delta_child
from kit import delta_kit as kit

pytestmark = [pytest.mark.delta, pytest.mark.crash]

ROUNDS = int(os.environ.get("DEDUP_CRASH_ROUNDS", "2"))
SECONDS = 120


def spawn(folder: Path) -> subprocess.Popen[bytes]:
    """One more instance."""
    return subprocess.Popen([sys.executable, "-m", "kit.delta_child", str(folder)])


class Instances:
    """Three running instances, and what was done to them."""

    def __init__(self, folder: Path, dice: random.Random) -> None:
        self.folder, self.dice = folder, dice
        self.running = [spawn(folder) for _ in range(3)]
        self.stopped: list[subprocess.Popen[bytes]] = []
        self.kills = self.stops = 0

    def disturb(self) -> None:
        """Kill one and replace it, stop one, or let a stopped one go on."""
        chosen = self.dice.choice(self.running)
        if chosen.poll() is not None:
            return
        if self.dice.random() < 0.35:
            chosen.kill()
            chosen.wait()
            self.running[self.running.index(chosen)] = spawn(self.folder)
            self.kills += 1
        elif chosen not in self.stopped and len(self.stopped) < 2:
            chosen.send_signal(signal.SIGSTOP)
            self.stopped.append(chosen)
            self.stops += 1
        elif self.stopped:
            self._go_on(self.stopped.pop(0))

    def finish(self) -> list[int]:
        """Let all of them come to their end; their exit codes."""
        while self.stopped:
            self._go_on(self.stopped.pop())
        return [instance.wait(SECONDS) for instance in self.running]

    def end(self) -> None:
        """Leave nothing running."""
        for instance in self.running:
            instance.kill()
            instance.wait()

    @staticmethod
    def _go_on(instance: subprocess.Popen[bytes]) -> None:
        if instance.poll() is None:
            instance.send_signal(signal.SIGCONT)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(ROUNDS))
def test_kills_and_stops_lose_nothing_and_double_nothing(tmp_path: Path, seed: int) -> None:
    """Every key is in each sink once, or held by one letter; both sinks agree; the ledger proves itself."""
    delta_child.create(tmp_path)
    dice = random.Random(seed)
    instances = Instances(tmp_path, dice)
    try:
        deadline = time.monotonic() + SECONDS
        while any(c.poll() is None for c in instances.running) and time.monotonic() < deadline:
            time.sleep(dice.random() * 0.6)  # the schedule of the disturbances, not a wait for anything
            instances.disturb()
            if instances.kills + instances.stops > 30:
                break
        assert instances.finish() == [0, 0, 0]
    finally:
        instances.end()
    check(tmp_path)
    print(f"seed {seed}: {instances.kills} kills, {instances.stops} stops")


def check(folder: Path) -> None:
    """Compare sinks, letters, reservations and checkpoints with the log."""
    store = delta_child.open_store(folder)
    store.publish(kit.NAME)
    want = {e.key for p in range(delta_child.PARTITIONS) for e in delta_child.log(p)}
    tables = [DeltaTable(str(folder / name)).to_pyarrow_table() for name in ("orders", "copy")]
    one, two = (sorted(zip(t["id"].to_pylist(), t["text"].to_pylist(), strict=True)) for t in tables)
    parked = store.letters(Selection(limit=None))["payload_hash"].to_pylist()
    written = [key for key, _ in one]
    assert one == two
    assert len(written) == len(set(written)) and len(parked) == len(set(parked)), "doubled"
    assert set(written) | set(parked) == want, "lost"
    assert not set(written) & set(parked), "both written and parked"
    assert store.reserved(kit.NAME) == len(want)
    assert store.problems(kit.NAME) == []
    points = store.head(kit.NAME).checkpoints
    assert {p.partition: c.sequence_number for p, c in points.items()} == dict.fromkeys(
        range(delta_child.PARTITIONS), delta_child.LENGTH - 1
    )
