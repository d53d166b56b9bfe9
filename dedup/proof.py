"""What one `verify` has proven, kept so that the next one reads only what was decided since.

A file of the person who asks, not of the store: it proves nothing to anybody else. It is bound to the state by its last record: where that
is not the same any more (purged, restored, another database), everything is checked again.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from checkpoint.errors import ConfigError
from checkpoint.position import Partition, Ranges
from dedup.store import Head, Store
from dedup.wanted import Wanted

VERSION = 1

Life = tuple[Partition, int]
"""(partition, incarnation): positions mean something only within one."""


@dataclass(frozen=True)
class Proof:
    """Everything up to one decision adds up."""

    consumer: str
    keyspace: int
    seq: int  # the last decision that was looked at
    anchor: int  # the last one of them with a batch record
    digest: str  # of that record
    counts: dict[str, int] = field(default_factory=dict)  # as in the report, from the beginning
    lettered: int = 0  # of the counts, dead letters at positions
    key_only: bool = False
    seen: dict[Life, Ranges] = field(default_factory=dict)

    def holds(self, store: Store, head: Head) -> bool:
        """Whether the state is the one that was proven, or what became of it since."""
        same = (self.consumer, self.keyspace) == (head.consumer, head.keyspace) and self.seq <= head.seq
        return same and digest(store, self.consumer, self.anchor) == self.digest


def digest(store: Store, consumer: str, seq: int) -> str:
    """Of the batch records of one decision."""
    rows = store.batches(consumer, Wanted(after=seq - 1, until=seq)).to_pylist()
    return hashlib.sha256(json.dumps(rows, default=str, sort_keys=True).encode()).hexdigest()


def load(path: Path) -> dict[str, Proof]:
    """The proofs of a file, by consumer; none where there is no file. Raises ConfigError where it is no such file."""
    if not path.exists():
        return {}
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
        if told["version"] != VERSION:
            return {}
        return {p["consumer"]: _proof(p) for p in told["proofs"]}
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is no file of proofs ({error}). Name another one; `dedup verify --proof` writes it.") from error


def _proof(told: dict[str, Any]) -> Proof:
    seen = {
        (Partition(source, topic, partition), life): Ranges(firsts, lasts) for source, topic, partition, life, firsts, lasts in told["seen"]
    }
    return Proof(**{**told, "seen": seen})


def save(path: Path, proofs: dict[str, Proof]) -> None:
    """Write them. Crash: the old file is there, or the new one."""
    told = [
        {**vars(proof), "seen": [[*p, life, s.firsts.tolist(), s.lasts.tolist()] for (p, life), s in sorted(proof.seen.items())]}
        for proof in proofs.values()
    ]
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.write_text(json.dumps({"version": VERSION, "proofs": told}), encoding="utf-8")
    temporary.replace(path)
