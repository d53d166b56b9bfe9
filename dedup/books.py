"""Batch records and letters, page by page, added up and compared: the arithmetic of `verify`, by columns. Pure but for what it is given."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from checkpoint import advice
from checkpoint.position import Ints, Partition, Ranges, overlapping
from dedup.index import KEY_ONLY
from dedup.locate import places
from dedup.proof import Life, Proof

COUNTS = ("delivered", "redelivered", "processed", "duplicate", "skipped_rows", "dead_lettered", "reserved")

_PARTS = ("redelivered", "processed", "duplicate", "skipped_rows", "dead_lettered")

MANY = 100
"""Contradictions of one kind that are told one by one."""


@dataclass
class Books:
    """What the records say so far."""

    consumer: str
    contradictions: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(COUNTS, 0)))
    lettered: int = 0  # dead letters at positions, by the records
    key_only: bool = False
    seen: dict[Life, Ranges] = field(default_factory=dict)
    last: int = 0  # the last decision with a record

    @classmethod
    def going_on(cls, proof: Proof) -> Books:
        """After what was proven."""
        return cls(proof.consumer, [], Counter(proof.counts), proof.lettered, proof.key_only, dict(proof.seen), proof.anchor)

    def add(self, records: pa.Table) -> None:
        """A page of batch records, in the order of their decisions."""
        for name in COUNTS:
            self.counts[name] += pc.sum(records[name]).as_py() or 0
        at_positions = pc.not_equal(records["partition"], KEY_ONLY.partition)
        self.lettered += pc.sum(records["dead_lettered"].filter(at_positions)).as_py() or 0
        self.key_only |= bool(pc.sum(records["delivered"].filter(pc.invert(at_positions))).as_py())
        self.last = max(self.last, pc.max(records["seq"]).as_py() or 0)
        self._check_rows(records)
        self._check_outcomes(records)
        self._add_seen(records)

    def _check_rows(self, records: pa.Table) -> None:
        total = np.sum([records[name].to_numpy() for name in _PARTS], axis=0)
        for row in np.flatnonzero(total != records["delivered"].to_numpy())[:MANY].tolist():
            record = _record(records, row)
            self.contradictions.append(
                f"{_name(record)}: {record['delivered']} rows delivered, {int(total[row])} accounted for. {advice.CHANGED}"
            )

    def _check_outcomes(self, records: pa.Table) -> None:
        """Outcomes lie in what was seen."""
        lengths = [pc.list_value_length(records[name]).to_numpy() for name in ("duplicates", "skipped", "late")]
        for row in np.flatnonzero(np.sum(lengths, axis=0)).tolist():
            record = _record(records, row)
            for outcome in ("duplicates", "skipped", "late"):
                outside = _ranges(record[outcome]) - _ranges(record["seen"])
                if outside:
                    self.contradictions.append(f"{_name(record)}: {outcome} {outside} were not seen. {advice.CHANGED}")

    def _add_seen(self, records: pa.Table) -> None:
        """No position is seen twice."""
        parents, firsts, lasts = _flat(records["seen"])
        codes, lives = _lives(records)
        for code, life in enumerate(lives):
            mine = codes[parents] == code
            known = self.seen.get(life, Ranges())
            if overlapping(firsts[mine], lasts[mine]) or known.touched(firsts[mine], lasts[mine]).any():
                self._tell_twice(records, np.flatnonzero(codes == code), known)
            self.seen[life] = known | Ranges.of_columns(firsts[mine], lasts[mine])

    def _tell_twice(self, records: pa.Table, rows: Ints, seen: Ranges) -> None:
        for row in rows.tolist():
            record = _record(records, row)
            mine = _ranges(record["seen"])
            if twice := seen & mine:
                told = advice.seen_twice(self.consumer, _partition(record), twice)
                self.contradictions.append(f"{_name(record)}: {twice} were seen by an earlier batch as well. {told}")
            seen |= mine

    def proof(self, keyspace: int, seq: int, digest: str) -> Proof:
        """What has been looked at."""
        kept = {life: seen for life, seen in self.seen.items() if seen}
        return Proof(self.consumer, keyspace, seq, self.last, digest, dict(self.counts), self.lettered, self.key_only, kept)


@dataclass(frozen=True)
class LetterBooks:
    """The letters so far: how many there are at positions, and where no batch has been."""

    kept: int = 0
    outside: dict[Partition, Ranges] = field(default_factory=dict)

    def add(self, letters: pa.Table, seen: dict[Life, Ranges]) -> LetterBooks:
        """With a page of letters."""
        placed = letters.filter(pc.not_equal(letters["partition"], KEY_ONLY.partition))
        outside = dict(self.outside)
        codes, lives = _lives(placed)
        numbers = placed["sequence_number"].to_numpy()
        for code, life in enumerate(lives):
            mine = np.unique(numbers[codes == code])
            lost = mine[~seen.get(life, Ranges()).contains(mine)]
            if len(lost):
                outside[life[0]] = outside.get(life[0], Ranges()) | Ranges.of_numbers(lost)
        return replace(self, kept=self.kept + placed.num_rows, outside=outside)

    def contradictions(self, recorded: int) -> list[str]:
        """Every letter lies at a position that was seen, and there are as many as the records say."""
        found = [
            f"{partition}: dead letters at {where}, which no batch has seen. {advice.LETTERS}" for partition, where in self.outside.items()
        ]
        if recorded != self.kept:
            found.append(f"batch records tell of {recorded} dead letters, there are {self.kept}. {advice.LETTERS}")
        return found


def _flat(ranges: pa.ChunkedArray) -> tuple[Ints, Ints, Ints]:
    """Row, first and last of each range of a column of RANGES."""
    whole = ranges.combine_chunks()
    pairs = pc.list_flatten(whole)
    return pc.list_parent_indices(whole).to_numpy(), pc.struct_field(pairs, "first").to_numpy(), pc.struct_field(pairs, "last").to_numpy()


def _lives(rows: pa.Table) -> tuple[Ints, list[Life]]:
    """The code of each row's life, and the lives by code."""
    partitions, place = places(rows)
    incarnations = rows["incarnation"].to_numpy()
    many = int(incarnations.max(initial=0)) + 1
    lives, codes = np.unique(place * many + incarnations, return_inverse=True)
    return codes, [(partitions[life // many], life % many) for life in lives.tolist()]


def _record(records: pa.Table, row: int) -> dict[str, Any]:
    return dict(records.slice(row, 1).to_pylist()[0])


def _partition(row: dict[str, Any]) -> Partition:
    return Partition(row["source"], row["topic"], row["partition"])


def _ranges(items: list[dict[str, int]]) -> Ranges:
    return Ranges.of((r["first"], r["last"]) for r in items)


def _name(record: dict[str, Any]) -> str:
    return f"batch {record['batch_id']} chunk {record['chunk']} of query {record['query_id']}, {_partition(record)}"
