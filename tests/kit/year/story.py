"""The year itself: 365 days of batches five minutes apart, chores as people do them, deaths, and a day for each alarm's fault."""

from __future__ import annotations

import json
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kit.paths import environment
from kit.year import places
from kit.year.alarms import Day
from kit.year.clock import Clock
from kit.year.places import Place
from kit.year.topic import Topic

DAY = 86_400.0
MINUTE = 60.0
BEFORE = 30
"""Days from the end of the story until now: files that are written meanwhile are from its future."""

EVERY = 5
"""Minutes between two batches of a day."""

DEATHS = 100
"""One batch of so many is killed with its process."""

SLOW = 200
"""The handler of one batch of so many takes two seconds."""


class Process:
    """A child under the clock, and its lines."""

    def __init__(self, role: str, task: dict[str, Any], clock: Clock, said: Path) -> None:
        self._said = said
        with said.open("a") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "kit.year.child", role, json.dumps(task)],
                env=environment(**clock.environment),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        self.answer()

    def say(self, **line: Any) -> None:
        """Give it something to do."""
        assert self.process.stdin
        self.process.stdin.write(json.dumps(line) + "\n")
        self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """What it answers. Raises RuntimeError if it has died."""
        assert self.process.stdout
        text = self.process.stdout.readline()
        if not text:
            raise RuntimeError(f"a process ended with {self.process.wait()}")
        return dict(json.loads(text))

    def ask(self, **line: Any) -> dict[str, Any]:
        """Both. Raises RuntimeError if it has died, or what it did has failed."""
        self.say(**line)
        answer = self.answer()
        if "error" in answer:
            raise RuntimeError(f"{answer['error']}\n{self._said.read_text()[-4000:]}")
        return answer

    def kill(self) -> None:
        """As the kernel does it."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe
            with suppress(BrokenPipeError):
                pipe.close()


@dataclass
class Taken:
    """What batches took."""

    seconds: list[float] = field(default_factory=list)
    restarted: list[float] = field(default_factory=list)  # the first batch of a process

    def told(self) -> dict[str, float]:
        """In milliseconds, and how many took more than twice the median."""
        median = statistics.median(self.seconds)
        cuts = statistics.quantiles(self.seconds, n=1000)
        tenth = max(1, len(self.seconds) // 10)
        return {
            "batches": len(self.seconds) + len(self.restarted),
            "median": median * 1000,
            "median of the first tenth": statistics.median(self.seconds[:tenth]) * 1000,
            "median of the last tenth": statistics.median(self.seconds[-tenth:]) * 1000,
            "p99": cuts[989] * 1000,
            "p99.9": cuts[998] * 1000,
            "longest": max(self.seconds) * 1000,
            "above twice the median": sum(one > 2 * median for one in self.seconds),
            "first of a process, median": statistics.median(self.restarted or [0.0]) * 1000,
        }


@contextmanager
def begun(kind: str, folder: Path, *, days: int, batches: int, turn: float, seed: int = 1) -> Iterator[Story]:
    """A new story on a new place, whose time is that before its first day. Raises NoCompiler."""
    clock = Clock(time.time() - (days + BEFORE + 1) * DAY)
    with places.place(kind, folder, clock) as place:
        story = Story(place, clock, folder, days=days, batches=batches, seed=seed, turn=turn)
        try:
            yield story
        finally:
            story.close()


class Story:
    """One consumer through its year.

    Args:
        days: how many are played; the year has 365.
        batches: in a day.
    """

    def __init__(self, place: Place, clock: Clock, folder: Path, *, days: int, batches: int, seed: int, turn: float) -> None:
        self.place, self.clock, self.folder = place, clock, folder
        self.topic, self.dice = Topic(seed), random.Random(seed)
        self.batches, self.count, self.turn = batches, days, turn
        self.days: list[Day] = []
        self.sizes: dict[int, dict[str, int]] = {}
        self.taken = Taken()
        self.upkeep, self.sends, self._batch = True, True, 0
        self.received = folder / "received"
        self.received.touch()
        self._begin = float(int((time.time() - (days + BEFORE) * DAY) / DAY) * DAY)
        self.player: Process | None = None
        self.reader = self._process("reader")
        self.deaths = 0
        self.wrong_by = 0.0  # seconds by which the clock of our hosts is wrong; the broker's is right
        self.vacation = (0, 0)  # days on which nobody looks at letters
        self.on_failure: Callable[[], None] = lambda: None

    def _process(self, role: str, *, now: bool = False) -> Process:
        task = {
            **self.place.task,
            "received": str(self.received),
            "upkeep": self.upkeep,
            "sends": self.sends,
            "now": now,
            "turn": self.turn,
        }
        return Process(role, task, self.clock, self.folder / f"{role}.log")

    def restart(self, *, now: bool = False) -> None:
        """Kill the job, and start another one with the next batch. `now`: the old one goes on, and nobody waits for it."""
        if self.player is not None and not now:
            self.player.kill()
        self.player = self._process("player", now=now) if now else None

    def play(self, *, slow: float = 0.0, dies: bool = False, hide: Sequence[str] = (), fails: bool = False, **events: Any) -> None:
        """One batch. `dies`: its process is killed in it, and another one gets it again. `fails`: it has to."""
        line = {"do": "batch", "batch": self._batch, "events": self.topic.batch(self.clock.now() - self.wrong_by, **events)}
        line |= {"slow": slow, "hide": list(hide)}
        fresh = self.player is None
        self.player = self.player or self._process("player")
        if dies:
            self.deaths += 1
            self.player.say(**line)
            time.sleep(self.dice.random() * 0.2)
            self.player.kill()
            fresh, self.player = True, self._process("player")
        try:
            answer = self.player.ask(**line)
        except RuntimeError:
            if not fails:
                raise
            self.restart()
            answer = self._again(line)
        self._batch += 1
        (self.taken.restarted if fresh else self.taken.seconds).append(answer["seconds"])

    def _again(self, line: dict[str, Any]) -> dict[str, Any]:
        self.on_failure()
        self.player = self._process("player")
        return self.player.ask(**{**line, "hide": []})

    def minute(self, day: Day, number: int) -> None:
        """It is this minute of the day."""
        self.clock.set(day.begin + number * MINUTE + self.wrong_by)

    def read(self, day: Day, number: int, *, behind: int = 0) -> None:
        """What Prometheus gets in this minute. `behind`: events that the log has beyond those that were delivered."""
        end = {"first": self.topic.first, "end": self.topic.next + behind, "time": self.clock.now()}
        day.samples[number] = self.reader.ask(do="read", **end)

    def tell(self, *words: str) -> str:
        """One command of the command line, as somebody types it. Raises RuntimeError where it fails."""
        line = [sys.executable, "-m", "dedup", *words, "--store", self.place.task["url"]]
        done = subprocess.run(line, env=environment(**self.clock.environment), capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{' '.join(words)}: {done.stderr}{done.stdout}")
        return done.stdout

    def day(self, number: int, alarm: str = "", fault: Callable[[Story, Day, int], None] | None = None) -> None:
        """The batches of a day from eight o'clock on, then the fault that raises this alarm, then the chores."""
        day = Day(number, self._begin + number * DAY + 8 * 3600, alarm=alarm)
        self.days.append(day)
        for place in range(self.batches):
            self.minute(day, place * EVERY)
            dies, slow = self.dice.randrange(DEATHS) == 0, 2.0 * (self.dice.randrange(SLOW) == 0)
            self.play(dies=dies, slow=slow, rejected=int(place == 1))
            self.read(day, place * EVERY)
        if fault is not None:
            fault(self, day, self.batches * EVERY)
        self.minute(day, max(day.samples) + 60)
        if self.player is not None:
            self.player.ask(do="rest")
        self._chores(number)

    def _chores(self, number: int) -> None:
        """Letters are looked at every third day; Delta tables are tidied once a week."""
        if number % 3 == 2 and number not in range(*self.vacation):
            self.look_at_letters()
        if number % 7 == 6 and self.place.tables:
            self.reader.ask(do="tidy", tables=self.place.tables)
        self.place.age(self.clock)
        if number % 30 == 29 or number == self.count - 1:
            self.sizes[number + 1] = self.place.sizes()

    def look_at_letters(self) -> None:
        """All are given up."""
        self.tell("dead-letter", "discard", "--consumer", "shop", "--status", "OPEN", "--reason", "not worth it", "--yes")

    def end(self) -> list[str]:
        """What is wrong after the year: rows that are missing or too many, messages, contradictions of the tables."""
        wrong = [*self.reader.ask(do="prove")["contradictions"]]
        wrong += _differences("orders", self.topic.orders, self.place.read("orders", "id"))
        wrong += _differences("latest", self.topic.latest, self.place.read("latest", "account"))
        got = self.received.read_text().splitlines()
        missing = {mail for mail in self.topic.mails if not mail.endswith("!")} - set(got)
        wrong += [f"messages that never arrived: {sorted(missing)[:5]}"] if missing else []
        wrong += [f"messages of nobody: {sorted(set(got) - self.topic.mails)[:5]}"] if set(got) - self.topic.mails else []
        return wrong

    def close(self) -> None:
        """End the processes."""
        for one in (self.player, self.reader):
            if one is not None:
                one.kill()


def _differences(sink: str, expected: dict[str, int], found: list[tuple[str, int]]) -> list[str]:
    told = []
    if len(found) != len(dict(found)):
        told.append(f"{sink}: {len(found) - len(dict(found))} rows are doubled")
    if lost := expected.keys() - dict(found).keys():
        told.append(f"{sink}: {len(lost)} rows are lost, {sorted(lost)[:3]}")
    if more := dict(found).keys() - expected.keys():
        told.append(f"{sink}: {len(more)} rows of nobody, {sorted(more)[:3]}")
    if other := [key for key, amount in found if expected.get(key, amount) != amount]:
        told.append(f"{sink}: {len(other)} rows have another amount, {other[:3]}")
    return told
