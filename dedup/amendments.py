"""What a person decides about a consumer's state: pure functions from head to head, for `store.amend`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from checkpoint.errors import ConfigError
from deadletter.budget import WATCHED, Spent
from deadletter.letter import Kind
from dedup.store import Head

MOST_LIFTED = 1_000_000_000
"""Events that one decision may admit. `budget=None` admits all of them, for ever."""


def lift_budget(head: Head, events: int, kind: Kind) -> Head:
    """So many more events may fail in this way without being held back.

    Raises:
        ConfigError: more than MOST_LIFTED events, or a kind that has no budget.
    """
    if kind not in WATCHED:
        raise ConfigError(f"{kind} has no budget that could be lifted; {', '.join(WATCHED)} have one.")
    if not 1 <= events <= MOST_LIFTED:
        raise ConfigError(f"A budget is lifted for 1 to {MOST_LIFTED:,} events; {events:,} is no flood that anybody knows.")
    spent = head.spent.get(kind, Spent())
    return replace(head, spent={**head.spent, kind: replace(spent, lifted=spent.decided + events)})


def accept_gap(head: Head) -> Head:
    """The next query may begin after positions that nobody has seen, in every partition."""
    return replace(head, gap_accepted=True)


def close_gap(head: Head) -> Head:
    """From now on a gap is an error again."""
    return replace(head, gap_accepted=False)


def accept_incarnation(head: Head, source: str, topic: str) -> Head:
    """The topic begins a new life: its checkpoints are dropped, old batch records no longer apply; keys still count."""
    lives = {**head.incarnations, (source, topic): head.incarnations.get((source, topic), 0) + 1}
    return replace(
        head,
        incarnations=lives,
        incarnation_ids={t: told for t, told in head.incarnation_ids.items() if t != (source, topic)},
        checkpoints={p: c for p, c in head.checkpoints.items() if (p.source, p.topic) != (source, topic)},
        floors={p: f for p, f in head.floors.items() if (p.source, p.topic) != (source, topic)},
        passed={p: n for p, n in head.passed.items() if (p.source, p.topic) != (source, topic)},
    )


def accept_restore(head: Head) -> Head:
    """Go on from the restored state: a new generation that remembers no Spark query.

    Nor do its checkpoints: the query from before, restarted by itself, would go on behind what was lost, and is one that nobody knows now.
    """
    points = {p: replace(point, query_id="") for p, point in head.checkpoints.items()}
    return replace(head, generation=head.generation + 1, query_id=None, batch_id=None, checkpoints=points)


def reset(head: Head) -> Head:
    """Begin again as if nothing had been processed: checkpoints, records and reservations of the old life no longer count."""
    return replace(
        head,
        generation=head.generation + 1,
        keyspace=head.generation + 1,
        settings=None,
        query_id=None,
        batch_id=None,
        gap_accepted=False,
        spent={},
        checkpoints={},
        floors={},
        passed={},
        incarnation_ids={},
    )


Amendment = Callable[[Head], Head]
