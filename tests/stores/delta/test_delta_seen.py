"""Positions with holes: exact for ever, while memory, summaries and starts cost as much as the newest of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoint import changes
from checkpoint.errors import StoreRestored
from checkpoint.position import Partition, Ranges
from dedup.delta import seen, state
from dedup.delta.ledger import BATCH, LOG, STRETCH, SUMMARY
from dedup.delta.seen import PartitionLife, SeenPositions, positions_of
from kit import delta_kit as kit
from kit.delta_kit import ledger, open_store
from kit.parts import run_contract

pytestmark = pytest.mark.delta

ROWS = pa.schema(
    [("seq", pa.int64()), *((name, pa.string()) for name in ("kind", "source", "topic")), ("partition", pa.int32()), ("doc", pa.string())]
)
Pairs = list[tuple[int, int]]
PAIRS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 9)).map(lambda p: (p[0], p[0] + p[1])), min_size=1, max_size=6)
PLACES = [PartitionLife(Partition("s", "t", number), life) for number in (0, 1) for life in (0, 1)]


class Log:
    """The rows of a ledger, as decisions append them, and a process that has read up to `known`."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.summary = 0

    def process(self) -> SeenPositions:
        """A new one, that has read nothing."""
        return SeenPositions(lambda place, stretch: positions_of(self.table(0), place, stretch) or pytest.fail("no stretch"))

    def table(self, after: int) -> pa.Table:
        """Rows of later decisions."""
        return pa.Table.from_pylist([row for row in self.rows if row["seq"] > after], schema=ROWS)

    def decide(self, seq: int, writer: SeenPositions, place: PartitionLife, pairs: Pairs, *, summary: bool) -> None:
        """One batch, and perhaps a summary of what the writer knew before."""
        self.rows += [dict(zip(ROWS.names, (seq, *row), strict=True)) for row in writer.rows(seq, summary=summary)]
        self.summary = seq if summary else self.summary
        doc = json.dumps({"incarnation": place.life, "seen": Ranges.of(pairs).items})
        self.rows.append(dict(zip(ROWS.names, (seq, BATCH, *place.partition, doc), strict=True)))


@pytest.mark.full
@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(PLACES), PAIRS, st.booleans(), st.integers(0, 3)), min_size=1, max_size=20), PAIRS)
def test_any_process_knows_exactly_what_was_seen(decisions: list[tuple[PartitionLife, Pairs, bool, int]], asked: Pairs) -> None:
    """Processes that read each decision, read some at once, or begin at the newest summary: the same answer as the union of all batches."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(seen, "MOST_RANGES", 2)
        patch.setattr(seen, "LOADED", 1)
        log, truth = Log(), dict.fromkeys(PLACES, Ranges())
        writer, slow, behind = log.process(), log.process(), 0
        for seq, (place, pairs, summary, reads) in enumerate(decisions, 1):
            log.decide(seq, writer, place, pairs, summary=summary)
            writer.take_in(log.table(seq - 1), log.summary)
            truth[place] = truth[place] | Ranges.of(pairs)
            if not reads:
                slow.take_in(log.table(behind), log.summary)
                behind = seq
        slow.take_in(log.table(behind), log.summary)
        fresh = log.process()
        fresh.take_in(log.table(log.summary - 1), log.summary)
        for place in PLACES:
            for process in (writer, slow, fresh):
                for span in asked:
                    assert process.within(place, *span) == truth[place] & Ranges.of([span])


def holes(count: int, store: Any, number: int, first: int = 0) -> None:
    """So many batches of one event each, with a hole after it."""
    for i in range(first, first + count):
        kit.process(store, number, kit.events([i], 2 * i), i)


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three ranges in memory, a summary every four decisions."""
    monkeypatch.setattr(seen, "MOST_RANGES", 3)
    monkeypatch.setattr(state, "SUMMARY_EVERY", 4)


def known(store: Any, number: int, first: int, last: int) -> list[int]:
    """First positions of the ranges that a transaction knows."""
    with store.begin(kit.NAME, number) as tx:
        found = tx.seen({kit.partition(0): (first, last)})
    return [r.first for r in found[kit.partition(0)].items] if found else []


@pytest.mark.usefixtures("few")
def test_what_is_left_to_the_ledger_is_known_to_every_process(folder: Path) -> None:
    """To the one that left it, to one that watched, and to one that begins now, also after the ledger was compacted."""
    store, watching = open_store(folder), open_store(folder)
    number = kit.epoch(store)
    for i in range(0, 30, 3):
        holes(3, store, number, i)
        assert known(watching, number, 0, 100) == [2 * n for n in range(i + 3)]
    store.maintain(kit.NAME)
    for process in (store, watching, open_store(folder)):
        assert known(process, number, 0, 100) == [2 * n for n in range(30)]
        assert known(process, number, 9, 12) == [10, 12]
        held = process._states.of(kit.NAME)._seen.known
        assert max(len(one.recent.whole().firsts) for one in held.values()) < 10
    kinds = ledger(folder).to_pyarrow_table(columns=["kind"])["kind"].to_pylist()
    assert kinds.count(STRETCH) > 3 and kinds.count(SUMMARY) > 3
    assert open_store(folder).problems(kit.NAME) == []


@pytest.mark.usefixtures("few")
def test_a_reset_forgets_what_was_left_to_the_ledger(folder: Path) -> None:
    """Positions from before a reset are new again."""
    store = open_store(folder)
    number = kit.epoch(store)
    holes(12, store, number)
    store.amend(kit.NAME, changes.reset, by="ann", reason="")
    number = kit.epoch(store)
    for process in (store, open_store(folder)):
        assert known(process, number, 0, 100) == []


@pytest.mark.full
@pytest.mark.usefixtures("few")
def test_a_stretch_that_is_lost_is_told(folder: Path) -> None:
    """Nothing near it is decided: the ledger was damaged."""
    store = open_store(folder)
    number = kit.epoch(store)
    holes(12, store, number)
    table = ledger(folder)
    table.delete(f"section = '{LOG}' AND kind = '{STRETCH}'")
    with pytest.raises(StoreRestored, match=r"has lost positions that decision \d+ has kept"):
        known(open_store(folder), number, 0, 4)


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_the_contract_holds_with_positions_in_the_ledger() -> None:
    """Every promise of a store, where nearly all positions are read from the ledger."""
    done = run_contract("delta and not spark", DEDUP_TEST_POSITIONS="few")
    assert done.returncode == 0, done.stdout[-3000:]
