"""The consumers of one store, as this process knows them. Called by the store."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.fs as pafs

from checkpoint.errors import CommitConflict, ConfigError, DedupError
from deadletter.letter import SEQUENCES
from dedup.delta.commit import Decision, commit_decision
from dedup.delta.engine import Engine
from dedup.delta.epoch import SmallFile, Turns, exists
from dedup.delta.key_files import KeyFolder
from dedup.delta.key_objects import CLOSING, KeyObjects
from dedup.delta.ledger import DELETED, Header, Ledger
from dedup.delta.reservations import ReservedKeys
from dedup.delta.spark_ledger import SparkLedger
from dedup.delta.state import ConsumerState
from dedup.delta.storage import SPARK, StorageOptions, answering, by_objects, consumer_name, filesystem, is_local, join, safe_name

AMEND_ATTEMPTS = 20

DELETIONS = "deleted"
"""Folder of small files, one for each consumer that was deleted, or is about to be."""


class States:
    """States by consumer. What was read is left behind when it is pickled."""

    def __init__(self, root: str, options: StorageOptions, engine: Engine, keys_folder: str | os.PathLike[str] | None = None) -> None:
        self.root, self.options, self.engine = root, options, engine
        self._keys_folder = None if keys_folder is None else Path(keys_folder).expanduser().absolute()
        self._states: dict[str, ConsumerState] = {}
        self._turns: dict[str, Turns] = {}
        self.tidied: dict[str, float] = {}  # consumer -> when this process has looked for files that nobody needs; monotonic seconds
        self.looked: dict[str, float] = {}  # the same for old messages

    def __getstate__(self) -> Mapping[str, Any]:
        return {**self.__dict__, "_states": {}, "_turns": {}, "tidied": {}, "looked": {}}

    def of(self, consumer: str) -> ConsumerState:
        """The state of a consumer as of the last look."""
        if consumer not in self._states:
            name = safe_name(consumer)
            made = SparkLedger if self.engine.name == SPARK else Ledger
            ledger = made(join(self.root, "ledger", name), self.options, consumer, self.engine)
            return self._states.setdefault(consumer, ConsumerState(ledger, self.root, self.engine, self._keys(ledger, name)))
        return self._states[consumer]

    def _keys(self, ledger: Ledger, name: str) -> ReservedKeys:
        copied = self.engine.name != SPARK and by_objects(self.root, self.options)
        folder = KeyFolder(self._folder_of_keys(name), copied=copied)
        return ReservedKeys(ledger, folder, KeyObjects(join(self.root, "keys", name), self.options) if copied else None)

    def _folder_of_keys(self, name: str) -> Path | None:
        """Below the store's folder; one that a person names may serve several stores, with consumers of one name."""
        if self._keys_folder is None:
            return Path(self.root, "keys", name) if is_local(self.root) else None
        return self._keys_folder / f"{name}@{hashlib.blake2b(self.root.encode(), digest_size=8).hexdigest()}"

    def turns(self, consumer: str) -> Turns:
        """Whose turn it is."""
        return self._turns.setdefault(consumer, Turns.of(self.root, self.options, safe_name(consumer)))

    def names(self) -> list[str]:
        """The names of all consumers, sorted. Raises StoreUnavailable where the storage does not answer."""
        if not exists(self.root, self.options):
            return []
        names = sorted(consumer_name(info.base_name) for info in self._listed("ledger") if info.type == pafs.FileType.Directory)
        perhaps = {consumer_name(info.base_name) for info in self._listed(DELETIONS) if info.type == pafs.FileType.File}
        return [name for name in names if name not in perhaps or not self._is_deleted(name)]

    def was_used(self) -> bool:
        """Whether there is a ledger, also one of a consumer that was deleted. Raises StoreUnavailable."""
        return bool(self._listed("ledger"))

    def _listed(self, folder: str) -> list[pafs.FileInfo]:
        with answering(self.root):
            found: list[pafs.FileInfo] = filesystem(self.root, self.options).get_file_info(pafs.FileSelector(folder, allow_not_found=True))
        return found

    def hint_of_deletion(self, consumer: str) -> SmallFile:
        """Says that the ledger of this consumer has to be asked whether it is deleted. It is written before that is decided, and stays."""
        return SmallFile(self.root, self.options, DELETIONS, safe_name(consumer))

    def _is_deleted(self, consumer: str) -> bool:
        """One whose ledger cannot be read is there: whoever asks for it is told why."""
        with suppress(DedupError), self.caught_up(consumer) as state:
            return state.header.kind == DELETED
        return False

    @contextmanager
    def caught_up(self, consumer: str) -> Iterator[ConsumerState]:
        """The state as of now, for this thread alone."""
        state = self.of(consumer)
        with state.lock:
            state.catch_up()
            yield state

    @contextmanager
    def existing(self, consumer: str) -> Iterator[ConsumerState]:
        """The state as of now, for this thread alone.

        Raises ConfigError where there is no such consumer, Refused where it is being deleted.
        """
        with self.caught_up(consumer) as state:
            if state.table is None or state.header.kind == DELETED:
                raise ConfigError(f"There is no consumer {consumer!r} in {self.root}. Known: {', '.join(self.names()) or 'none'}.")
            state.require_not_deleted()
            yield state

    def header(self, consumer: str) -> Header:
        """The header of the newest decision."""
        with self.caught_up(consumer) as state:
            return state.header

    def commit_planned(self, consumer: str, plan: Callable[[ConsumerState], Header]) -> Header:
        """Commit what `plan` makes of the newest state; plan again where another decision comes first.

        Crash: it is decided or not.
        """
        for _ in range(AMEND_ATTEMPTS):
            with self.existing(consumer) as state:
                try:
                    commit_decision(state, Decision(plan(state)), lambda _: None)
                except CommitConflict:
                    continue
                return state.header
        raise CommitConflict(f"Consumer {consumer!r} commits too often: the change was not made. Try again.")

    def blocked(self) -> pa.Table:
        """The blocked sequences of all consumers: consumer, and SEQUENCES."""
        parts = []
        for name in self.names():
            with self.caught_up(name) as state:
                rows = state.sequences.all().select(SEQUENCES.names).cast(SEQUENCES)
            parts.append(rows.add_column(0, "consumer", pa.repeat(name, rows.num_rows)))
        return pa.concat_tables([pa.schema([pa.field("consumer", pa.string()), *SEQUENCES]).empty_table(), *parts])

    def forget(self) -> None:
        """Read everything anew; waits a while for copies of files of keys that are being written."""
        copies = [state.keys.copies for state in self._states.values() if state.keys.copies is not None]
        self._states.clear()
        until = time.monotonic() + CLOSING
        for each in copies:
            each.wait(max(until - time.monotonic(), 0.0))
