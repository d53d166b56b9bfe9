"""Faults of a Delta store: somebody copies a folder back to an older time, and the other folders stay as they are."""

from __future__ import annotations

import contextlib
import random
import shutil
from pathlib import Path

from deltalake import DeltaTable

from crash import child
from crash.faults import Fault, started
from crash.lane import Lane

LEDGER, LETTERS = "state/ledger/shop", "state/dead_letters/shop"

SINKS = tuple(f"sinks/{name}" for name in (*child.SINKS, *child.MERGED))


def state_copied_back(lane: Lane, dice: random.Random) -> str:
    """The state, its ledger, or the newest log files of that: refused where a table is ahead, then put right in one of two ways."""
    what = dice.choice(["state", "ledger", "log files"])
    if not _at(lane, LEDGER).exists():
        lane.wait(lane.start(until=1))  # of a state that is lost altogether nothing is left to compare
    old, new = _Kept(lane, "old"), _Kept(lane, "new")
    old.keep()
    shown = _shown(lane, SINKS if what == "state" else (*SINKS, LETTERS))
    where = _some_work(lane, dice)
    new.keep()
    if what == "log files":
        _lose_log_files(_at(lane, LEDGER), old.version(LEDGER))
    else:
        old.back("state" if what == "state" else LEDGER)
    old.progress_back()
    ahead = _shown(lane, shown) != shown
    lane.wait(lane.start())
    _require(lane, "StoreRestored", ahead)
    if ahead and dice.random() < 0.5:
        new.back("state", "sinks")
        new.progress_back()
    elif ahead:
        old.back("state", "sinks")
    old.forget()
    new.forget()
    lane.missed = not ahead
    return f"{what}, {where}"


def table_copied_back(lane: Lane, dice: random.Random) -> str:
    """One sink, or the dead letters: refused where a publication is missing; then the newer one is put back."""
    name = dice.choice([*SINKS, LETTERS])
    old, new = _Kept(lane, "old"), _Kept(lane, "new")
    old.keep()
    shown = _shown(lane, (name,))
    where = _some_work(lane, dice)
    new.keep()
    lacks = _shown(lane, (name,)) != shown
    if lacks:
        old.back(name)
    lane.wait(lane.start())
    if lacks:
        _require(lane, "PublicationStuck", True)
        new.back(name)
    old.forget()
    new.forget()
    lane.missed = not lacks
    return f"{name}, {where}"


def keys_damaged(lane: Lane, dice: random.Random) -> str:
    """Files of keys and their list are cut, changed, deleted or exchanged with older ones, beside a process and before the next one."""
    lane.wait(lane.start(until=lane.batches - 1))
    keys, older = _at(lane, "state/keys"), lane.folder / "older keys"
    shutil.copytree(keys, older, dirs_exist_ok=True)
    process = started(lane)
    found = [_damage(keys, older, dice) for _ in range(3)]
    lane.missed = not any(found)
    lane.wait(process)
    found += [_damage(keys, older, dice) for _ in range(3)]
    shutil.rmtree(older)
    return ", ".join(filter(None, found))


def _damage(keys: Path, older: Path, dice: random.Random) -> str:
    """One file; nothing if another process deletes it at that moment."""
    files = sorted(path for path in keys.rglob("*") if path.is_file())
    path, what = dice.choice(files or [keys]), dice.choice(["cut", "changed", "deleted", "older"])
    with contextlib.suppress(FileNotFoundError, IsADirectoryError):
        if what == "deleted":
            path.unlink()
        elif what == "older":
            old = dice.choice(sorted(one for one in older.rglob("*") if one.is_file()))
            shutil.copy(old, path)
        else:
            with path.open("r+b") as file:
                at = dice.randrange(path.stat().st_size or 1)
                file.truncate(at) if what == "cut" else (file.seek(at), file.write(dice.randbytes(8)))
        return f"{path.name} {what}"
    return ""


FAULTS: dict[str, Fault] = {
    "the state was copied back": state_copied_back,
    "one table was copied back": table_copied_back,
    "files of keys were damaged": keys_damaged,
}


class _Kept:
    """Everything as it was at one moment."""

    def __init__(self, lane: Lane, name: str) -> None:
        self._lane, self._folder = lane, lane.folder / name

    def keep(self) -> None:
        for part in ("state", "sinks"):
            if _at(self._lane, part).exists():
                shutil.copytree(_at(self._lane, part), self._folder / part)
        progress = self._lane.folder / "progress"
        if progress.exists():
            shutil.copy(progress, self._folder / "progress")

    def back(self, *parts: str) -> None:
        for part in parts:
            shutil.rmtree(_at(self._lane, part), ignore_errors=True)
            if (self._folder / part).exists():
                shutil.copytree(self._folder / part, _at(self._lane, part))

    def progress_back(self) -> None:
        (self._lane.folder / "progress").unlink(missing_ok=True)
        if (self._folder / "progress").exists():
            shutil.copy(self._folder / "progress", self._lane.folder / "progress")

    def version(self, part: str) -> int:
        return DeltaTable(str(self._folder / part)).version() if (self._folder / part).exists() else -1

    def forget(self) -> None:
        shutil.rmtree(self._folder)


def _some_work(lane: Lane, dice: random.Random) -> str:
    """A process that comes nearly to the end of the log, or dies on the way."""
    step, nth = dice.choice([*lane.steps, None]), dice.randrange(1, 4)
    lane.wait(lane.start(until=lane.batches - 1, **({"die_at": step, "nth": nth} if step else {})))
    return f"{step} {nth}" if step else "finished"


def _at(lane: Lane, part: str) -> Path:
    return Path(lane.place.where) / part


def _shown(lane: Lane, parts: tuple[str, ...] | dict[str, int]) -> dict[str, int]:
    """What tables show, by their rows that were ever added: a compaction changes nothing."""
    return {part: _added(_at(lane, part)) for part in parts}


def _added(table: Path) -> int:
    """Commits that published something."""
    if not (table / "_delta_log").exists():
        return 0
    return sum(
        entry["operation"] not in ("OPTIMIZE", "CREATE TABLE", "VACUUM START", "VACUUM END") for entry in DeltaTable(str(table)).history()
    )


def _lose_log_files(table: Path, version: int) -> None:
    """Those above this version, and what points at a newer checkpoint."""
    for file in (table / "_delta_log").glob("*.json"):
        if int(file.stem) > version:
            file.unlink()
    for file in (table / "_delta_log").glob("*.checkpoint*"):
        if int(file.name.partition(".")[0]) > version:
            file.unlink()
            (table / "_delta_log/_last_checkpoint").unlink(missing_ok=True)


def _require(lane: Lane, error: str, refused: bool) -> None:
    """The process was refused, or had no reason to be."""
    ended = lane.ended[-1]
    assert ended.endswith(error) == refused, f"refused: {refused}, and it ended with {ended}"
