"""Whether what passes for a redelivery is one: a position that was seen has to hold the event that was decided there. Pure.

A re-created topic starts again at sequence number 0; without these checks its events would be dropped as redeliveries.
Called by dedup/pipeline/commit.py between the redeliveries and the reservations.
"""

from __future__ import annotations

from typing import NoReturn

import numpy as np
import pyarrow as pa

from checkpoint.advice import command
from checkpoint.errors import IncarnationChanged
from dedup.index import Index, Ints
from dedup.planning import Sifted
from dedup.store import Head


def suspects(sifted: Sifted, known: pa.Table, compare_payload: bool) -> Ints:
    """Rows at positions seen before that reservations alone do not explain: no key, an unknown key, or another payload.

    Args:
        known: which of `sifted.recheck` are decided, with their payload hashes.
        compare_payload: False where copies with another payload leave no letter (on_key_conflict="duplicate").
    """
    index, replayed = sifted.index, np.flatnonzero(sifted.replayed)
    at, payload = Index.of_keys(known).find_words(index.high[replayed], index.low[replayed])
    explained = (at >= 0) & ~index.no_key[replayed] & ~index.undecodable[replayed]
    if compare_payload:
        explained &= payload == index.payload[replayed]
    return replayed[~explained]


def unexplained(index: Index, rows: Ints, letters: pa.Table, head: Head) -> Ints:
    """Those of the suspects that no letter at their position explains, by its payload hash."""
    lives = [head.incarnations.get((s, t), 0) for s, t in zip(letters["source"].to_pylist(), letters["topic"].to_pylist(), strict=True)]
    current = letters.filter(pa.array([a == b for a, b in zip(letters["incarnation"].to_pylist(), lives, strict=True)], pa.bool_()))
    parked = set(zip(index.locate(current).tolist(), current["payload_hash"].to_pylist(), strict=True))
    return np.array([row for row in rows.tolist() if (row, int(index.payload[row])) not in parked], dtype=np.int64)


def check_redeliveries(index: Index, rows: Ints, freed: pa.Table, head: Head) -> None:
    """Raise IncarnationChanged where a position seen before now holds another event than the one decided then.

    A re-created topic starts again at sequence number 0; without this its events would pass for redeliveries and be lost.

    Args:
        rows: the suspects that are `unexplained`.
        freed: KEYS that letters have and hold no more: a person let them go, and a copy decided before that is still a redelivery.
    """
    at, payload = Index.of_keys(freed).find_words(index.high[rows], index.low[rows])
    wrong = rows[(at < 0) | (payload != index.payload[rows]) | index.no_key[rows] | index.undecodable[rows]]
    if len(wrong):
        refuse_incarnation(index, wrong.tolist(), head)


def refuse_incarnation(index: Index, wrong: list[int], head: Head) -> NoReturn:
    """Raise IncarnationChanged for rows whose positions were decided for other events."""
    partition = index.partition_of(wrong[0])
    raise IncarnationChanged(
        f"Consumer {head.consumer!r}: positions decided before now hold other events ({', '.join(index.describe(r) for r in wrong[:5])}). "
        f"If decode, its schema or on_key_conflict were changed, finish this batch with the old ones; if a key or payload is computed from "
        f"the clock or at random, that is the fault. Only if topic {partition.topic!r} was deleted and created again: "
        f"{command('consumer', 'accept-incarnation', head.consumer, '--source', partition.source, '--topic', partition.topic)}."
    )
