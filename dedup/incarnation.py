"""Which life of a topic its events belong to, told by the broker's own ids: a topic that was created again is another one.

Pure but for `ask`, which calls what the user gave as `Consumer(incarnation=...)`. Called by the consumer before anything is decided.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence

from checkpoint.advice import command
from checkpoint.errors import IncarnationChanged
from dedup.store import Head, Topic

log = logging.getLogger("dedup")

TopicIdentity = Callable[[str, Sequence[str]], Mapping[str, str]]
"""(source, topics) -> topic -> the broker's own id of its present life; topics that it does not have are left out.

It is asked after a batch was read and before any of it is decided: an id that is still the stored one then proves that the events are of
that life. Where it answers from a memory of its own, a re-creation within that time escapes. Picklable, as the consumer is."""


def ask(witness: TopicIdentity | None, topics: Iterable[Topic]) -> dict[Topic, str]:
    """What the broker says of these topics now; nothing where there is no witness.

    Raises:
        SourceUnavailable: the broker does not answer.
    """
    if witness is None:
        return {}
    by_source: dict[str, set[str]] = {}
    for source, topic in topics:
        by_source.setdefault(source, set()).add(topic)
    told = {(source, topic): id for source, names in by_source.items() for topic, id in witness(source, sorted(names)).items()}
    for source, names in by_source.items():
        if gone := sorted(name for name in names if (source, name) not in told):
            log.warning("the broker of %s has no topic %s any more: its last events cannot be checked", source, ", ".join(gone))
    return told


def refuse_others(head: Head, told: Mapping[Topic, str]) -> None:
    """Raise IncarnationChanged where a topic has another id than the one that its state was written with."""
    for (source, topic), now in sorted(told.items()):
        known = head.incarnation_ids.get((source, topic))
        if known is not None and known != now:
            raise IncarnationChanged(
                f"Consumer {head.consumer!r}: topic {topic!r} of {source!r} was deleted and created again: the broker calls it {now}, our "
                f"checkpoints are of {known}. What the old one still held is lost. To begin the new one at its first position: "
                f"{command('consumer', 'accept-incarnation', head.consumer, '--source', source, '--topic', topic)}."
            )


def news(head: Head, told: Mapping[Topic, str]) -> dict[Topic, str]:
    """The ids that are not stored yet."""
    return {topic: id for topic, id in told.items() if topic not in head.incarnation_ids}
