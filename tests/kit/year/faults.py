"""One fault for each alarm, as it happens to people, and what they do about it. The day's alarm is the fault's, and no other one."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

from kit.year.alarms import Day
from kit.year.story import Story

Fault = Callable[[Story, Day, int], None]


def unreadable(story: Story, day: Day, now: int) -> None:
    """The store cannot be reached for ten minutes."""
    story.restart()
    with story.place.away():
        _watch(story, day, now, 10)
    _watch(story, day, now + 10, 2)
    day.faults = {"DedupUnreadable"}


def silent(story: Story, day: Day, now: int) -> None:
    """The job stands for forty minutes."""
    story.restart()
    _watch(story, day, now, 45)
    day.faults = {"DedupSilent"}


def lag(story: Story, day: Day, now: int) -> None:
    """More comes than the job can do, for forty minutes."""
    _batches(story, day, now, 40, behind=lambda minute: 11_000 + 1_000 * minute)
    day.faults = {"DedupLagDoesNotFall"}


def letters_grow(story: Story, day: Day, now: int) -> None:
    """A producer sends what the handler rejects."""
    for minute in range(now, now + 60, 5):
        _batches(story, day, minute, 1)
    story.minute(day, now + 60)
    story.play(rejected=150)
    _watch(story, day, now + 60, 10)
    story.look_at_letters()
    day.faults = {"DedupLettersGrow"}


def letter_is_old(story: Story, day: Day, now: int) -> None:
    """Nobody has looked for more than a week."""
    _watch(story, day, now, 2)
    story.look_at_letters()
    day.faults = {"DedupLetterIsOld"}


def messages_dead(story: Story, day: Day, now: int) -> None:
    """A message cannot be taken by its receiver. It is given up."""
    story.minute(day, now)
    story.play(marked=True)
    _watch(story, day, now, 3)
    dead = json.loads(story.tell("outbox", "list", "shop", "--state", "DEAD", "--json"))
    story.tell("outbox", "discard", "shop", *(str(one["number"]) for one in dead), "--reason", "nobody wants it", "--yes")
    _watch(story, day, now + 3, 2)
    day.faults = {"DedupMessagesDead"}


def messages_late(story: Story, day: Day, now: int) -> None:
    """The job has lost its destination for half an hour."""
    story.sends = False
    story.restart()
    _batches(story, day, now, 30)
    story.sends = True
    story.restart()
    _batches(story, day, now + 30, 1)
    day.faults = {"DedupMessagesLate"}


def publication_late(story: Story, day: Day, now: int) -> None:
    """A sink is gone when it should show what was decided, and comes back after half an hour."""
    (sink,) = (path for path in story.place.tables if path.endswith("orders"))

    def later() -> None:
        _watch(story, day, now, 25)
        story.place.show(sink)  # type: ignore[attr-defined]

    story.minute(day, now)
    story.on_failure = later
    story.play(hide=[sink], fails=True)
    _watch(story, day, now + 25, 2)
    day.faults = {"DedupPublicationLate"}


def went_back(story: Story, day: Day, now: int) -> None:
    """Somebody deletes the topic and creates it again."""
    story.restart()
    story.minute(day, now)
    story.topic.begin_again()
    story.tell("consumer", "accept-incarnation", "shop", "--source", "broker", "--topic", "orders", "--reason", "re-created", "--yes")
    _batches(story, day, now, 5)
    day.faults = {"DedupCheckpointWentBack"}


def fight(story: Story, day: Day, now: int) -> None:
    """Two schedulers start the job again and again."""
    for minute in range(now, now + 6):
        story.minute(day, minute)
        old = story.player
        story.restart(now=True)
        story.play()
        story.read(day, minute)
        if old is not None:
            old.kill()
    day.faults = {"DedupInstancesFight"}


def damaged(story: Story, day: Day, now: int) -> None:
    """The log loses positions before the job reads them. Somebody accepts that."""
    story.restart()
    story.minute(day, now)
    story.topic.lose(50)
    _watch(story, day, now, 10)
    story.tell("consumer", "accept-gap", "shop", "--reason", "too late", "--yes")
    _batches(story, day, now + 10, 2)
    day.faults = {"DedupDamaged"}


def purge_behind(story: Story, day: Day, now: int) -> None:
    """Nobody has purged for a week. The upkeep, once it is back, does it."""
    _watch(story, day, now, 10)
    story.upkeep = True
    story.restart()
    _batches(story, day, now + 10, 5)
    day.faults = {"DedupPurgeBehind"}


FAULTS: Mapping[str, Fault] = {
    "DedupUnreadable": unreadable,
    "DedupSilent": silent,
    "DedupLagDoesNotFall": lag,
    "DedupLettersGrow": letters_grow,
    "DedupLetterIsOld": letter_is_old,
    "DedupMessagesDead": messages_dead,
    "DedupMessagesLate": messages_late,
    "DedupPublicationLate": publication_late,
    "DedupPurgeBehind": purge_behind,
    "DedupCheckpointWentBack": went_back,
    "DedupInstancesFight": fight,
    "DedupDamaged": damaged,
}
"""Alarm -> what raises it, at the end of a day."""


def _watch(story: Story, day: Day, now: int, minutes: int) -> None:
    """Nothing but time passes."""
    for minute in range(now, now + minutes):
        story.minute(day, minute)
        story.read(day, minute)


def _batches(story: Story, day: Day, now: int, minutes: int, behind: Callable[[int], int] = lambda minute: 0) -> None:
    """A batch a minute."""
    for minute in range(now, now + minutes):
        story.minute(day, minute)
        story.play()
        story.read(day, minute, behind=behind(minute - now))
