"""`verify` proves what the tables say, goes on from what it has proven, and names ranges and what to do about each."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from checkpoint import changes
from checkpoint.errors import ConfigError
from checkpoint.position import Ranges
from checkpoint.records import RecordFilter
from deadletter.selection import Selection
from dedup.reprocessing.from_log import coverage
from dedup.verify import COUNTS, LOOKS, load, save, verify
from fixtures.variants import of_which
from kit.orders import batch, consumer, event, orders
from kit.people import failing
from kit.pg_run import run
from kit.places import Place, PostgresPlace


def fill(place: Place, first: int = 0, batches: int = 4) -> None:
    """Some batches with a gap, duplicates, a letter and an undecodable body."""
    run_ = consumer(place.store())
    for n in range(first, first + batches):
        rows = [event(10 * n, f"a{n}"), event(10 * n + 1, f"a{n}"), event(10 * n + 3, f"b{n}", -1), event(10 * n, body=b"x", partition=1)]
        run_(batch(*rows), n)


def facts(report: Any) -> Any:
    """What two ways of checking must agree on."""
    return report.ok, report.counts, [dataclasses.astuple(p) for p in report.partitions]


@pytest.mark.full
def test_a_proof_is_gone_on_from(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a proof only what was decided since is read, through a file, and the answer is that of checking everything."""
    fill(place)
    first = verify(place.store(), "shop")
    assert first.ok and first.proof and first.since == 0
    save(tmp_path / "proofs", {"shop": first.proof})
    fill(place, 4)
    store, asked = place.store(), []
    inner = store.batches
    monkeypatch.setattr(store, "batches", lambda name, wanted: asked.append(wanted) or inner(name, wanted))
    again = verify(store, "shop", load(tmp_path / "proofs")["shop"])
    assert again.since == first.proof.seq > 0 and all(w.after >= first.proof.anchor - 1 for w in asked)
    assert facts(again) == facts(verify(place.store(), "shop")) and facts(again) != facts(first)
    assert again.proof and again.proof.seq > first.proof.seq


@pytest.mark.full
def test_small_pages_give_the_same_answer(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many records and letters are read at once."""
    fill(place)
    whole = verify(place.store(), "shop")
    monkeypatch.setattr("dedup.verify.PAGE", 2)
    monkeypatch.setattr("dedup.verify.LETTER_PAGE", 3)
    assert facts(verify(place.store(), "shop")) == facts(whole) and whole.ok


@pytest.mark.fast_on("postgres")
def test_a_proof_of_another_state_is_not_believed(place: Place) -> None:
    """After a reset, for another consumer's records, or where its last record is another one, everything is checked."""
    fill(place)
    proven = verify(place.store(), "shop").proof
    assert proven
    for wrong in (dataclasses.replace(proven, digest="x"), dataclasses.replace(proven, seq=10**9), dataclasses.replace(proven, keyspace=7)):
        report = verify(place.store(), "shop", wrong)
        assert report.ok and report.since == 0 and any("another state" in note for note in report.notes)
    place.store().amend("shop", changes.reset, by="test", reason="start over")
    assert verify(place.store(), "shop", proven).since == 0


@pytest.mark.fast_on("postgres")
def test_a_proof_that_a_restore_took_back_is_no_contradiction(place: Place) -> None:
    """The proof is of two decisions about letters more than a restore has left; batches have taken their numbers: all of it is checked."""
    fill(place)
    proven = verify(place.store(), "shop").proof
    assert proven
    fill(place, 4)
    report = verify(place.store(), "shop", dataclasses.replace(proven, seq=proven.seq + 2))
    assert report.ok and report.since == 0 and any("another state" in note for note in report.notes)
    assert report.proof and verify(place.store(), "shop", report.proof).since == report.proof.seq


def test_a_broken_file_of_proofs_is_told(tmp_path: Path) -> None:
    """What is no such file is refused in words, and is not overwritten; a missing one is empty."""
    (tmp_path / "x").write_text("{")
    with pytest.raises(ConfigError, match="no file of proofs"):
        load(tmp_path / "x")
    assert load(tmp_path / "none") == {}


@pytest.mark.fast_on("postgres")
def test_the_command_keeps_its_proof(place: Place, dedup: Any, tmp_path: Path) -> None:
    """`dedup verify --proof FILE` reads on from the file; with --full it checks everything again."""
    fill(place)
    file = tmp_path / "proofs.json"
    assert dedup(f"verify shop --proof {file}", place)[0] == 0 and file.exists()
    code, out, _ = dedup(f"verify shop --proof {file}", place)
    assert (code, "were proven before" in out) == (0, True)
    assert "were proven before" not in dedup(f"verify shop --proof {file} --full", place)[1]


BROKEN = {
    "update dedup.batch set seen = '{[0,1],[3,3],[10,10]}' where batch_id = 0 and partition = 0": [
        "dedup consumer replay MODULE:shop",
        "10",
    ],
    "update dedup.checkpoint set sequence_number = 40 where partition = 0": ["--from-log", "--from 34 --to 40", "34-40"],
    "update dedup.batch set processed = processed + 1 where batch_id = 2 and partition = 0": [
        "batch 2 chunk 0",
        "4 accounted for",
        "report it",
    ],
    "delete from dedup.dead_letter where partition = 1 and sequence_number = 20": ["tell of 8 dead letters, there are 7", "by hand"],
    "update dedup.checkpoint set sequence_number = 20 where partition = 0": ["21-33 were seen above", "Nothing is lost"],
    "update dedup.batch set duplicates = '{[99,99]}' where batch_id = 1 and partition = 0": ["duplicates [99] were not seen"],
    "update dedup.dead_letter set sequence_number = 77 where partition = 1 and sequence_number = 20": ["dead letters at [77]", "by hand"],
}
"""Damage -> what the contradiction says."""


@pytest.mark.parametrize("damage", of_which(4, BROKEN))
def test_each_contradiction_names_its_range_and_what_to_do(postgres: str, damage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is wrong in the tables is told with positions, and with the command or the advice that goes with it."""
    place = PostgresPlace(postgres)
    place.create_sink()
    fill(place)
    assert verify(place.store(), "shop").ok
    run(postgres, damage)
    report = verify(place.store(), "shop")
    assert not report.ok and report.proof is None
    told = "\n".join(report.contradictions)
    assert [words for words in BROKEN[damage] if words not in told] == [], told
    monkeypatch.setattr("dedup.verify.PAGE", 1)
    assert verify(place.store(), "shop").contradictions == report.contradictions


@pytest.mark.full
def test_a_consumer_that_goes_on_is_looked_at_again(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches that commit while it reads contradict nothing: records and letters are of one moment in the end."""
    fill(place)
    store, inner, rounds = place.store(), place.store().letters, []

    def letters(*args: Any, **options: Any) -> pa.Table:
        rounds.append(1)
        if len(rounds) <= 2:
            fill(place, 3 + len(rounds), 1)
        return inner(*args, **options)

    monkeypatch.setattr(store, "letters", letters)
    report = verify(store, "shop")
    assert report.ok and not any("goes on" in note for note in report.notes), report
    assert report.counts["delivered"] == 4 * 6


@pytest.mark.fast_on("postgres")
def test_a_consumer_that_never_pauses_contradicts_nothing(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is decided after the last look is neither missed nor proven: the next call goes on with it."""
    run_, store, inner = consumer(place.store()), place.store(), place.store().letters
    run_(batch(*orders(range(5))), 0)
    rounds: list[int] = []

    def letters(*args: Any, **options: Any) -> pa.Table:
        rounds.append(1)
        run_(batch(*orders(range(5 * len(rounds), 5 * len(rounds) + 5))), len(rounds))
        return inner(*args, **options)

    monkeypatch.setattr(store, "letters", letters)
    report = verify(store, "shop")
    assert report.ok and any("goes on deciding" in note for note in report.notes), report
    assert report.proof and report.counts["delivered"] == 5 * LOOKS
    again = verify(place.store(), "shop", report.proof)
    assert again.ok and again.since == report.proof.seq and again.counts["delivered"] == 5 * (LOOKS + 1)


@pytest.mark.fast_on("postgres")
def test_a_window_of_positions_reads_its_own_records(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is decided about a range is answered from the records of that range, as from all of them."""
    fill(place)
    store, got = place.store(), []
    inner = store.batches

    def batches(name: str, record_filter: RecordFilter) -> pa.Table:
        got.append(inner(name, record_filter))
        return got[-1]

    monkeypatch.setattr(store, "batches", batches)
    head = store.head("shop")
    zero = min(head.checkpoints)
    found = coverage(store, head, zero, Selection("shop", *zero, first=9, last=12))
    assert (found.processed, found.duplicates, found.absent) == (
        Ranges.of([(10, 10)]),
        Ranges.of([(11, 11)]),
        Ranges.of([(9, 9), (12, 12)]),
    )
    assert {(r["partition"]) for r in got[0].to_pylist()} == {zero.partition}
    if isinstance(place, PostgresPlace):
        assert got[0].num_rows == 1


def test_the_tally_of_letters_in_a_failing_batch(place: Place) -> None:
    """Letters of every kind are counted where the records say."""
    failing(place.store())
    report = verify(place.store(), "shop")
    assert report.ok and report.counts["dead_lettered"] == 3 and COUNTS[0] == "delivered"
    consumer(place.store())(batch(*orders([9])), 1)
    assert verify(place.store(), "shop", report.proof).ok
