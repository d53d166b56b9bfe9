"""One instance of a consumer in a process of its own, to be killed and stopped: `python -m kit.delta_child FOLDER`.

Works through a small log of three partitions, batch after batch from the checkpoint, until it is done. About a tenth of the events repeats
a key; the handler answers differently each time it is asked.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

from checkpoint.errors import CommitConflict, CommitUnknown, Fenced, StillHeld
from dedup.delta import DeltaStore
from kit import delta_kit as kit

PARTITIONS, LENGTH, BATCH = 3, 60, 4


def log(number: int) -> list[kit.Event]:
    """One partition; repeats reach into all of them."""
    dice = random.Random(11)
    keys = [[dice.randrange(10**9) for _ in range(LENGTH)] for _ in range(PARTITIONS)]
    for row in keys:
        for i in range(1, LENGTH):
            if dice.random() < 0.1:
                row[i] = keys[dice.randrange(PARTITIONS)][dice.randrange(i)]
    return kit.events(keys[number], number=number)


def open_store(folder: Path) -> DeltaStore:
    """Two sinks, one of them partitioned."""
    return kit.open_store(folder, sinks=("orders", "copy"))


def create(folder: Path) -> None:
    """The sinks."""
    kit.create(str(folder / "orders"))
    kit.create(str(folder / "copy"), partition_by=["text"])


def step(store: DeltaStore, epoch: int) -> bool:
    """One batch; False at the end of the log."""
    head = store.head(kit.NAME)
    batch = []
    for number in range(PARTITIONS):
        point = head.checkpoints.get(kit.partition(number))
        start = point.sequence_number + 1 if point else 0
        # A broker delivers again: every batch begins a little below the checkpoint.
        batch += log(number)[max(0, start - 2) : start + BATCH] if start < LENGTH else []
    if not batch:
        return False
    who = str(random.randrange(3))
    kit.process(store, epoch, batch, (head.batch_id or 0) + 1, sinks=("orders", "copy"), reject=lambda key: random.random() < 0.1, text=who)
    return True


def run(folder: Path) -> None:
    """Take the epoch, work, and take it again when another instance took it: three instances fight for the same log."""
    store = open_store(folder)
    while True:
        try:
            epoch = kit.epoch(store, takeover_after=0.3)
            while step(store, epoch):
                pass
        except (Fenced, StillHeld, CommitConflict, CommitUnknown):
            continue
        return


if __name__ == "__main__":
    run(Path(sys.argv[1]))
