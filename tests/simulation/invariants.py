"""The promise, each invariant once and by name. Those of single commits are required by the stores, the others of a world at its end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from checkpoint.position import Partition, Ranges
from dedup.verify import verify

if TYPE_CHECKING:
    from checkpoint.head import Run
    from simulation.shared import Shared
    from simulation.world import World

ONE_OUTCOME = "exactly one outcome per position"
ONE_EFFECT = "effect once per key, or the key held by one letter"
NOTHING_PASSED = "the checkpoint never passes an undecided position"
FENCED = "a fenced instance commits nothing"
ORDER = "events of a blocked sequence stay behind the letter that blocks it"
RESTORED = "no query goes on past what a restore lost, until a person accepts it or another query has begun"
COMPLETE = "the consumer comes to the end of the log, and every letter that can be reprocessed is reprocessed"
PROVABLE = "verify proves all this from the tables"

NAMES = (ONE_OUTCOME, ONE_EFFECT, NOTHING_PASSED, FENCED, ORDER, RESTORED, COMPLETE, PROVABLE)


class Broken(AssertionError):
    """An invariant does not hold."""

    def __init__(self, name: str, detail: object) -> None:
        super().__init__(f"{name}: {detail}")
        self.name = name


def require(name: str, holds: bool, detail: object) -> None:
    """Raise Broken where it does not hold."""
    if not holds:
        raise Broken(name, detail)


WAITING = ("OPEN", "BLOCKED")


def place(row: Mapping[str, Any]) -> tuple[int, int]:
    """Where a letter or a row of the sink stands."""
    return row["partition"], row["sequence_number"]


# At every commit


def fenced(mine: object, newest: object) -> None:
    """What commits has the newest epoch, or the newest claim of its partition."""
    require(FENCED, mine == newest, f"{mine} commits, and {newest} is the newest")


def decided_up_to(shared: Shared, points: Iterable[Partition]) -> None:
    """Of every event up to a checkpoint it is recorded that it was seen; those that come late come after it."""
    for partition in points:
        number = shared.head.checkpoints[partition].sequence_number
        due = (e for e in shared.log.events if e.partition == partition.partition and e.number <= number and not e.held)
        missing = [e.at for e in due if e.at not in shared.seen]
        require(NOTHING_PASSED, not missing, f"the checkpoint of {partition.partition} is at {number}, {missing} are undecided")


def accepted(shared: Shared, run: Run) -> None:
    """A query that has finished what the restored tables lack commits nothing of its later batches.

    Where another query has begun since, one that the tables still know is compared by positions alone (NOTHING_PASSED); one that they
    know nothing of is refused all the same, unless a person accepted a gap.
    """
    head = shared.head
    known = {head.query_id, *(point.query_id for point in head.checkpoints.values())}
    if shared.begun - {run.query_id} and (run.query_id in known or head.gap_accepted):
        return
    lost = [at for at, batch in shared.lost.get(run.query_id, {}).items() if batch < run.batch_id and at not in shared.seen]
    require(RESTORED, not lost, f"query {run.query_id} commits batch {run.batch_id}, and the restored tables lack {lost}")


def in_order(shared: Shared, rows: Iterable[Mapping[str, Any]]) -> None:
    """Chains are whole, and no row overtakes a letter of its sequence that waits."""
    for sequence in {x["sequence"] for x in shared.letters.values()} - {None}:
        waiting = shared.waiting(sequence)
        chain = [(x["status"], x["blocked_by"]) for x in waiting]
        wanted = [("BLOCKED" if before else "OPEN", before) for before in (None, *(x["id"] for x in waiting[:-1]))]
        require(ORDER, chain == wanted[: len(chain)], f"sequence {sequence!r}: {chain}")
    for row in (r for r in rows if shared.letters and r.get("sequence")):
        overtaken = [place(x) for x in shared.waiting(row["sequence"]) if place(x) < place(row)]
        require(ORDER, not overtaken, f"{place(row)} overtook {overtaken}")


# At the end


def check(world: World, *, prove: bool = True) -> None:
    """All that has to be true when everything has come to rest.

    Args:
        prove: also by the real `verify`, which takes longer than the rest.
    """
    _one_outcome(world.shared)
    _one_effect(world.shared)
    _done_in_order(world.shared)
    _complete(world.shared)
    if prove:
        report = verify(world.store(lambda _: None), "simulated")  # type: ignore[arg-type]
        require(PROVABLE, report.ok, report.contradictions)


def _one_outcome(shared: Shared) -> None:
    times: Counter[tuple[int, int]] = Counter(place(row) for row in shared.sink if not row["again"])
    times.update(place(letter) for letter in shared.letters.values())
    times.update((b["partition"], n) for b in shared.batches for name in ("duplicates", "skipped") for n in _numbers(b[name]))
    wrong = {e.at: times[e.at] for e in shared.log.events if times[e.at] != 1}
    require(ONE_OUTCOME, not wrong and len(times) == len(shared.log.events), wrong)
    seen = Counter((b["partition"], n) for b in shared.batches for n in _numbers(b["seen"]))
    require(ONE_OUTCOME, seen == Counter(e.at for e in shared.log.events), f"recorded as seen: {dict(seen)}")


def _numbers(ranges: Iterable[Mapping[str, int]]) -> Iterable[int]:
    return (n for r in ranges for n in range(r["first"], r["last"] + 1))


def _one_effect(shared: Shared) -> None:
    rows, held = Counter(row["body"] for row in shared.sink), Counter(x["body"] for x in shared.letters.values() if x["holds_key"])
    freed = {str(int.from_bytes(key, "big")).encode() for key in shared.freed}
    for key in {str(e.key).encode() for e in shared.log.events if e.key is not None and not e.undecodable}:
        times = rows[key] + held[key]
        require(ONE_EFFECT, times == 1 or (times == 0 and key in freed), f"key {key.decode()}: {rows[key]} rows, {held[key]} letters")
    keyless = sum(e.undecodable or e.key is None for e in shared.log.events)
    require(ONE_EFFECT, sum(x["key"] is None for x in shared.letters.values()) == keyless, f"{keyless} events have no key")


def _done_in_order(shared: Shared) -> None:
    for sequence in {e.sequence for e in shared.log.events} - {None}:
        done = [place(row) for row in shared.sink if row["sequence"] == sequence]
        require(ORDER, done == sorted(done), f"sequence {sequence!r} has its effects in the order {done}")


def _complete(shared: Shared) -> None:
    for letter in shared.letters.values():
        stuck = letter["status"] in WAITING and letter["key"] is not None
        blocked = any(x["key"] is None for x in shared.waiting(letter["sequence"]))
        require(COMPLETE, not stuck or blocked, f"the letter at {place(letter)} is {letter['status']}")
    points = {p.partition: c.sequence_number for p, c in shared.head.checkpoints.items()}
    wanted = {part[0].partition: part[-1].number for part in shared.log.partitions}
    require(COMPLETE, points == wanted, f"the checkpoints are {points}, the log ends at {wanted}")


def spans(batch: Mapping[str, Any]) -> Ranges:
    """The positions that a batch record holds as seen."""
    return Ranges.of((r["first"], r["last"]) for r in batch["seen"])
