"""One thousand seeded schedules of the real flow and planning code against model stores."""

from __future__ import annotations

import os

import pytest
from simulation import World, effects
from simulation_joined import JoinedWorld

from dedup.verify import verify

SCHEDULES = int(os.environ.get("DEDUP_SCHEDULES", "1000"))


def check(world: World) -> None:
    """Each invariant of the promise, once."""
    store_view = world.shared
    events = [e for part in world.log for e in part]
    keys = {e.key for e in events if e.key is not None and not e.undecodable}
    rows, held = effects(world)
    freed = {int.from_bytes(key, "big") for key in store_view.freed}
    for key in keys:
        times = rows.get(key, 0) + held.get(key, 0)
        assert times == 1 or (times == 0 and key in freed), f"key {key}: {rows.get(key, 0)} rows, {held.get(key, 0)} letters"
    keyless = [e for e in events if e.undecodable or e.key is None]
    parked = list(store_view.letters.values())
    assert sum(letter["key"] is None for letter in parked) == len(keyless)
    for letter in parked:
        stuck = letter["status"] in ("OPEN", "BLOCKED") and letter["key"] is not None
        assert not stuck or any(x["key"] is None for x in store_view.waiting(letter["sequence"])), "what can be reprocessed was"
    for sequence in {e.sequence for e in events} - {None}:
        done = [row["sequence_number"] for row in store_view.sink if row["sequence"] == sequence]
        assert done == sorted(done), f"sequence {sequence!r} has its effects in the order {done}"
    for p, part in enumerate(world.log):
        points = {k.partition: c.sequence_number for k, c in store_view.head.checkpoints.items()}
        assert points[p] == part[-1].number, "the checkpoint stands at the end of the log"
    report = verify(_store(world), "simulated")
    assert report.ok, report.contradictions
    assert {(p.partition.partition, n) for p in report.partitions for r in p.seen.items for n in range(r.first, r.last + 1)} == {
        (e.partition, e.number) for e in events
    }


def _store(world: World):  # type: ignore[no-untyped-def]
    from simulation import SimStore

    return SimStore(world.shared, lambda _: None, world.rng, ledger=world.ledger)


@pytest.mark.parametrize("ledger", [False, True], ids=["transactional", "ledger"])
def test_no_schedule_of_crashes_copies_and_replays_loses_or_doubles(ledger: bool) -> None:
    """Whatever dies, sleeps or is replayed, each key has one effect or one letter, and every position is accounted for."""
    crashes = 0
    for seed in range(SCHEDULES // 2):
        world = World(seed, ledger=ledger)
        world.run()
        crashes += world.crashes
        try:
            check(world)
        except AssertionError as e:
            raise AssertionError(f"seed {seed}, {'ledger' if ledger else 'transactional'}: {e}") from e
    assert crashes > SCHEDULES // 4, "the schedules did not crash anything"


@pytest.mark.parametrize("ledger", [False, True], ids=["transactional", "ledger"])
def test_no_schedule_of_processes_that_share_an_epoch_loses_or_doubles(ledger: bool) -> None:
    """Runners claim partitions from each other, sleep, crash and take turns with queries: the same invariants hold."""
    lost = 0
    for seed in range(SCHEDULES // 10):
        world = JoinedWorld(seed, ledger=ledger)
        world.run()
        lost += sum(number > 1 for number in world.claims.values())
        try:
            check(world)
        except AssertionError as e:
            raise AssertionError(f"seed {seed}, {'ledger' if ledger else 'transactional'}: {e}") from e
    assert lost > SCHEDULES // 20, "the schedules did not take partitions away"


def test_without_the_comparison_of_claims_the_simulation_finds_the_damage() -> None:
    """A store that lets an old claim commit is found out within a few schedules: the test above can fail."""
    with pytest.raises(AssertionError):
        for seed in range(SCHEDULES // 10):
            world = JoinedWorld(seed, ledger=False, fenced=False)
            world.run()
            check(world)
