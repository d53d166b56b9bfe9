"""A store beside a dictionary: whatever happens to keys, files and processes, each answer about a key is that of the dictionary."""

from __future__ import annotations

import contextlib
import datetime as dt
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pyarrow as pa
import pytest

from checkpoint import changes
from checkpoint.errors import CommitConflict, CommitUnknown, StoreUnavailable
from checkpoint.holders import take_epoch
from deadletter.letter import HISTORY, LETTERS
from deadletter.store import KEYS, Change, Commit, Free, Park
from dedup.delta import DeltaStore, key_files, keys
from dedup.delta.key_files import KeyFolder, NewFile
from dedup.delta.ledger import Ledger
from fixtures.variants import of_which
from kit import delta_kit as kit
from kit.clock import showing
from kit.delta_kit import open_store

pytestmark = pytest.mark.delta

ALL = range(70)

REFUSED = (StoreUnavailable, CommitConflict, CommitUnknown)

PAGES = {"many pages": 3, "one page": key_files.PAGE_KEYS}

CHANGED = ("id", "holds_key", "status")
"""Columns of a letter whose key is freed."""


class Known(NamedTuple):
    """What the dictionary has of a key."""

    payload: int
    day: int
    held: bool


class Plan(NamedTuple):
    """A decision: how a store makes it, and what becomes of the dictionary."""

    act: Callable[[DeltaStore], None]
    effect: Callable[[], None]


class Weather:
    """What fails just now, in some of its calls."""

    def __init__(self, dice: random.Random) -> None:
        self.kind, self._dice = "fine", dice

    def breaks(self, place: Any, name: str, kind: str, share: float, error: Exception) -> Any:
        """Let a function fail in weather of this kind."""
        whole = getattr(place, name)

        def call(*args: Any, **options: Any) -> Any:
            if self.kind == kind and self._dice.random() < share:
                raise error
            return whole(*args, **options)

        return mock.patch.object(place, name, call)

    @contextlib.contextmanager
    def able(self) -> Iterator[None]:
        """All of it, where it is chosen."""
        full = OSError(28, "No space left on device")
        with (
            self.breaks(os, "pread", "reads fail", 0.2, OSError(5, "I/O error")),
            self.breaks(KeyFolder, "new", "no room", 0.7, full),
            self.breaks(NewFile, "finish", "no end", 0.5, full),
            self.breaks(Ledger, "read", "no ledger", 0.1, StoreUnavailable("away")),
            self.breaks(Ledger, "drop_reservations", "dies", 1, StoreUnavailable("died before the rows were dropped")),
        ):
            yield

    @contextlib.contextmanager
    def now(self, kind: str) -> Iterator[None]:
        """For a while."""
        before, self.kind = self.kind, kind
        yield
        self.kind = before


class World:
    """A ledger, two processes, their files, and the dictionary.

    Args:
        folder: of all of it.
        dice: chooses everything.
    """

    def __init__(self, folder: Path, dice: random.Random) -> None:
        self.folder, self.dice, self.weather = folder, dice, Weather(dice)
        self.clock = dt.datetime(2026, 3, 1, 12, tzinfo=dt.UTC)
        self.epoch = take_epoch(open_store(folder), kit.NAME, "model", 1.0, force=True).epoch
        self.own = dice.random() < 0.3  # whether the second process has its files for itself
        self.stores, self.observer = [self.opened(0), self.opened(1)], open_store(folder)
        self.truth, self.letters = dict[int, Known](), dict[int, str]()
        self.since = self.position = self.before = 0
        self.trace = list[str]()

    def opened(self, which: int) -> DeltaStore:
        """A process that starts."""
        return open_store(self.folder, **({"keys_folder": self.folder / "own"} if which and self.own else {}))

    @property
    def today(self) -> int:
        """As the ledger counts days."""
        return (self.clock.date() - dt.date(1970, 1, 1)).days

    def some(self, most: int, among: Callable[[int], bool] = lambda one: True) -> list[int]:
        """Some of these keys."""
        return [one for one in self.dice.sample(ALL, self.dice.randint(1, most)) if among(one)]

    def step(self) -> None:
        """Something happens; then all answers are compared."""
        choices = {self.reserve: 8, self.free: 2, self.park: 1, self.purge: 1, self.maintain: 1, self.reset: 0.2}
        others = {self.restart: 3, self.harm: 4, self.wait: 1}
        what = self.dice.choices([*choices, *others], [*choices.values(), *others.values()])[0]
        kind = self.dice.choice(["fine"] * 5 + ["reads fail", "no room", "no end", "no ledger", "dies"])
        self.trace.append(f"{what.__name__}, {kind}")
        with self.weather.now(kind):
            if (plan := what()) is not None:
                self.decide(plan, self.dice.choice(self.stores))
            self.check(self.dice.choice(self.stores))
        if self.dice.random() < 0.1:
            self.check_fresh()

    def decide(self, plan: Plan, store: DeltaStore) -> None:
        """Try it. Where it is refused, the ledger says whether it was decided all the same."""
        self.before = self.seq()
        with contextlib.suppress(*REFUSED):
            plan.act(store)
        if self.seq() != self.before:
            plan.effect()
        self.before = self.seq()

    def seq(self) -> int:
        """The newest decision."""
        with self.weather.now("fine"):
            return self.observer.head(kit.NAME).seq

    def commit(self, tx: Any, store: DeltaStore) -> None:
        """Perhaps after somebody else."""
        if self.dice.random() < 0.1:
            other = self.stores[1 - self.stores.index(store)]
            self.decide(self.reserve(), other)
        tx.execute(Commit())

    def reserve(self) -> Plan:
        """Keys as a batch has them, some of which letters hold."""
        asked = {one: self.dice.randrange(10**6) for one in self.some(9)}
        new = {one: payload for one, payload in asked.items() if one not in self.truth}
        held = [one for one in new if self.dice.random() < 0.2]
        wanted = {kit.key_bytes(one): self.truth[one].payload for one in asked if one in self.truth}

        def act(store: DeltaStore) -> None:
            with store.begin(kit.NAME, self.epoch) as tx:
                found = tx.reserve(rows(asked))
                assert dict(zip(found["key"].to_pylist(), found["payload_hash"].to_pylist(), strict=True)) == wanted
                self.hold(tx, {one: new[one] for one in held})
                self.commit(tx, store)

        day = max(self.today, self.since)
        return Plan(act, lambda: self.truth.update({one: Known(payload, day, one in held) for one, payload in new.items()}))

    def hold(self, tx: Any, some: dict[int, int]) -> None:
        """Letters that hold these keys."""
        if some:
            events = [kit.Event(0, self.position + at, one) for at, one in enumerate(some)]
            self.position += len(events)
            table = kit.letters(tx.head, events)
            at = table.schema.get_field_index("payload_hash")
            tx.execute(Park(table.set_column(at, LETTERS.field("payload_hash"), pa.array(some.values(), pa.int64()))))
            self.letters.update(zip(some, table["id"].to_pylist(), strict=True))

    def free(self) -> Plan | None:
        """Keys of letters and others, by a person."""
        some = self.some(4, self.truth.__contains__)

        def act(store: DeltaStore) -> None:
            with store.begin_letters(kit.NAME) as tx:
                if ids := [self.letters[one] for one in some if self.truth[one].held]:
                    tx.lock(ids)
                    tx.execute(released(ids, self.clock))
                tx.execute(Free(rows(dict.fromkeys(some, 0)).select(["key"])))
                self.commit(tx, store)

        return Plan(act, lambda: [self.truth.pop(one) for one in some] and None) if some else None

    def park(self) -> Plan | None:
        """A replay: written keys become keys of letters, by one decision."""
        some = self.some(4, lambda one: one in self.truth and not self.truth[one].held)

        def act(store: DeltaStore) -> None:
            with store.begin(kit.NAME, self.epoch) as tx:
                tx.execute(Free(rows(dict.fromkeys(some, 0)).select(["key"])))
                self.hold(tx, dict.fromkeys(some, 7))
                self.commit(tx, store)

        return Plan(act, lambda: self.truth.update(dict.fromkeys(some, Known(7, self.today, True)))) if some else None

    def purge(self) -> Plan | None:
        """Of a later day than the last one."""
        day = self.today + self.dice.choice([-3, -2, -1, 0, 0, 1])
        before = dt.date(1970, 1, 1) + dt.timedelta(days=day)

        def effect() -> None:
            self.since = day
            self.truth = {one: told for one, told in self.truth.items() if told.held or told.day >= day}

        act = lambda store: store.purge(kit.NAME, before, by="model", reason="", although_behind=True)  # noqa: E731
        return Plan(act, effect) if day > self.since else None

    def reset(self) -> Plan:
        """A new life of all keys."""
        return Plan(lambda store: store.amend(kit.NAME, changes.reset, by="model", reason="") and None, self.truth.clear)

    def maintain(self) -> Plan:
        """Compaction, which decides nothing."""
        return Plan(lambda store: store.maintain(kit.NAME) and None, lambda: None)

    def restart(self) -> None:
        """One of the processes."""
        which = self.dice.randrange(2)
        self.stores[which].close()
        self.stores[which] = self.opened(which)

    def wait(self) -> None:
        """Some days."""
        self.clock += dt.timedelta(days=self.dice.randint(1, 2))

    def harm(self) -> None:
        """Something happens to files of keys, which may be open."""
        folder = self.folder / ("own" if self.own and self.dice.random() < 0.5 else "state/keys") / kit.NAME
        files = sorted(folder.glob("*.keys"))
        if files:
            harm = self.dice.choice([cut, spoil, spoil, swap, lose, lose_all, lose_list, spoil_list, put_back])
            self.trace.append(f"  {harm.__name__}")
            harm(folder, files, self.dice)

    def check(self, store: DeltaStore) -> None:
        """Every answer, where there is one."""
        with contextlib.suppress(StoreUnavailable), store._states.caught_up(kit.NAME) as state:
            known, payload, held = state.probe(rows(dict.fromkeys(ALL, 0))["key"])
            found = {one: (int(payload[one]), bool(held[one])) for one in np.flatnonzero(known).tolist()}
            count = state.reserved()
            assert found == {one: (told.payload, told.held) for one, told in self.truth.items()}
            assert count == len(self.truth)

    def check_fresh(self) -> None:
        """A process that starts, and `verify`."""
        fresh = open_store(self.folder)
        self.check(fresh)
        assert [told for told in fresh.problems(kit.NAME) if "reserved keys" in told or "more than once" in told] == []


def rows(payloads: dict[int, int]) -> pa.Table:
    """KEYS."""
    return pa.table([pa.array(map(kit.key_bytes, payloads), pa.binary(16)), pa.array(payloads.values(), pa.int64())], schema=KEYS)


def released(ids: list[str], at: dt.datetime) -> Change:
    """Letters that hold their keys no more."""
    given = [dict(zip(CHANGED, (one, False, "DISCARDED"), strict=True)) for one in ids]
    told = [{"letter_id": one, "at": at, "action": "RELEASED", "reserved": -1, "by": "model"} for one in ids]
    schema = pa.schema([LETTERS.field(name) for name in CHANGED])
    return Change(pa.Table.from_pylist(given, schema=schema), pa.Table.from_pylist(told, schema=HISTORY))


def overwrite(path: Path, text: bytes) -> None:
    """In place, as whoever has it open sees it."""
    with path.open("r+b") as file:
        file.write(text)


def flipped(text: bytes, dice: random.Random) -> bytes:
    """With some other bits."""
    content = bytearray(text)
    for _ in range(dice.choice([1, 5, 200])):
        content[dice.randrange(len(content))] ^= 1 << dice.randrange(8)
    return bytes(content)


def cut(folder: Path, files: list[Path], dice: random.Random) -> None:
    """The end of a file is gone."""
    path = dice.choice(files)
    os.truncate(path, dice.randrange(path.stat().st_size + 1))


def spoil(folder: Path, files: list[Path], dice: random.Random) -> None:
    """Some bits of all files are others."""
    for path in filter(lambda path: path.stat().st_size, files):
        overwrite(path, flipped(path.read_bytes(), dice))


def swap(folder: Path, files: list[Path], dice: random.Random) -> None:
    """Two files have changed places."""
    one, two = dice.choice(files), dice.choice(files)
    first, second = one.read_bytes(), two.read_bytes()
    one.write_bytes(second)
    two.write_bytes(first)


def lose(folder: Path, files: list[Path], dice: random.Random) -> None:
    """A file is gone."""
    dice.choice(files).unlink()


def lose_all(folder: Path, files: list[Path], dice: random.Random) -> None:
    """The folder is gone."""
    shutil.rmtree(folder)


def lose_list(folder: Path, files: list[Path], dice: random.Random) -> None:
    """The list is gone."""
    (folder / key_files.LIST).unlink(missing_ok=True)


def spoil_list(folder: Path, files: list[Path], dice: random.Random) -> None:
    """Some bits of the list are others."""
    if (path := folder / key_files.LIST).exists():
        overwrite(path, flipped(path.read_bytes(), dice))


def put_back(folder: Path, files: list[Path], dice: random.Random) -> None:
    """The folder gets back what it had at an earlier time, and a copy is made of what it has now."""
    saved = folder.parent / "saved"
    copy = shutil.copytree(folder, folder.parent / "copy", dirs_exist_ok=True)
    if saved.exists():
        shutil.copytree(saved, folder, dirs_exist_ok=True)
        shutil.rmtree(saved)
    copy.rename(saved)


@pytest.mark.full
@pytest.mark.parametrize("pages", of_which(1, PAGES))
@pytest.mark.parametrize("seed", of_which(1, range(1, 32)))
def test_a_store_knows_keys_as_a_dictionary_does(folder: Path, monkeypatch: pytest.MonkeyPatch, seed: int, pages: str) -> None:
    """Keys are reserved, held, freed and purged by two processes that start again, lose and race, while files, disk and ledger fail."""
    for name, value in (("FLUSH_ROWS", 4), ("RUN_ROWS", 24), ("SLICE_ROWS", 5), ("MOST_SMALL", 3)):
        monkeypatch.setattr(keys, name, value)
    world = World(folder, random.Random(seed))
    for module in ("transaction", "upkeep", "store", "epoch", "tending"):
        monkeypatch.setattr(f"dedup.delta.{module}.dt", showing(lambda zone: world.clock))
    with world.weather.able(), kit.pages_of(PAGES[pages]):
        for number in range(60):
            try:
                world.step()
            except AssertionError as error:
                error.add_note(f"Step {number}: " + "; ".join(world.trace[-12:]))
                raise
