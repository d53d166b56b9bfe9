"""A process that decides keys of a consumer on object storage, with files of a few keys and objects of a few bytes, until it is killed."""

from __future__ import annotations

import sys

from checkpoint.holders import take_epoch
from dedup.delta import DeltaStore, key_objects, keys
from kit import delta_kit as kit
from kit import key_kit

MOST = 5000
"""Keys that it looks for."""


def make_small() -> None:
    """A few keys make a file, and a file has a few parts."""
    keys.FLUSH_ROWS, keys.RUN_ROWS, keys.SLICE_ROWS, keys.MOST_SMALL = 4, 24, 5, 3
    key_objects.PART = 3000


def main(where: str, machine: str, count: str) -> None:
    """Say how many keys there are, after each decision and at the end, once everything is copied; raise where one is missing."""
    make_small()
    store = DeltaStore(f"{where}/state", keys_folder=machine or None)
    epoch = take_epoch(store, kit.NAME, "child", 1.0, force=True).epoch
    found = key_kit.known(store, MOST)
    first = len(found)
    assert found == list(range(first)), "keys are missing"
    print(first, flush=True)
    for at in range(first, first + int(count), 3):
        key_kit.decide(store, epoch, range(at, at + 3))
        print(at + 3, flush=True)
    store.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
