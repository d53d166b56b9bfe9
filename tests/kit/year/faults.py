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


def silent(story: Story, day: Day, now: int) -> None:
    """The job stands for forty minutes."""
    story.restart()
    _watch(story, day, now, 45)


def lag(story: Story, day: Day, now: int) -> None:
    """More comes than the job can do, for forty minutes."""
    _batches(story, day, now, 40, behind=lambda minute: 11_000 + 1_000 * minute)


def letters_grow(story: Story, day: Day, now: int) -> None:
    """A producer sends what the handler rejects."""
    for minute in range(now, now + 60, 5):
        _batches(story, day, minute, 1)
    story.minute(day, now + 60)
    story.play(rejected=150)
    _watch(story, day, now + 60, 10)
    story.look_at_letters()


def letter_is_old(story: Story, day: Day, now: int) -> None:
    """Nobody has looked for more than a week."""
    _watch(story, day, now, 2)
    story.look_at_letters()


def messages_dead(story: Story, day: Day, now: int) -> None:
    """A message cannot be taken by its receiver. It is given up."""
    story.minute(day, now)
    story.play(marked=True)
    _watch(story, day, now, 3)
    dead = json.loads(story.tell("outbox", "list", "shop", "--state", "DEAD", "--json"))
    story.tell("outbox", "discard", "shop", *(str(one["number"]) for one in dead), "--reason", "nobody wants it", "--yes")
    _watch(story, day, now + 3, 2)


def messages_late(story: Story, day: Day, now: int) -> None:
    """The job has lost its destination for half an hour."""
    story.sends = False
    story.restart()
    _batches(story, day, now, 30)
    story.sends = True
    story.restart()
    _batches(story, day, now + 30, 1)


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


def went_back(story: Story, day: Day, now: int) -> None:
    """Somebody deletes the topic and creates it again."""
    story.restart()
    story.minute(day, now)
    story.topic.begin_again()
    story.tell("consumer", "accept-incarnation", "shop", "--source", "broker", "--topic", "orders", "--reason", "re-created", "--yes")
    _batches(story, day, now, 5)


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


def damaged(story: Story, day: Day, now: int) -> None:
    """The log loses positions before the job reads them. Somebody accepts that."""
    story.restart()
    story.minute(day, now)
    story.topic.lose(50)
    _watch(story, day, now, 10)
    story.tell("consumer", "accept-gap", "shop", "--reason", "too late", "--yes")
    _batches(story, day, now + 10, 2)


def purge_behind(story: Story, day: Day, now: int) -> None:
    """Nobody has purged for a week. The upkeep, once it is back, does it."""
    _watch(story, day, now, 10)
    story.upkeep = True
    story.restart()
    _batches(story, day, now + 10, 5)


FAULTS: Mapping[str, tuple[int, Fault]] = {
    "DedupUnreadable": (4, unreadable),
    "DedupSilent": (6, silent),
    "DedupLagDoesNotFall": (8, lag),
    "DedupLettersGrow": (10, letters_grow),
    "DedupMessagesDead": (12, messages_dead),
    "DedupMessagesLate": (14, messages_late),
    "DedupPublicationLate": (16, publication_late),
    "DedupInstancesFight": (18, fight),
    "DedupCheckpointWentBack": (20, went_back),
    "DedupDamaged": (22, damaged),
    "DedupLetterIsOld": (33, letter_is_old),
    "DedupPurgeBehind": (42, purge_behind),
}
"""Alarm -> its day of 45, which is later in a longer time, and what raises it at the end of that day."""


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
