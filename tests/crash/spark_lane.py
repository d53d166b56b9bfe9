"""Lanes whose processes are Spark drivers, and what can die of one: driver, JVM, Python workers; and the broker it reads from."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
import uuid
from collections.abc import Callable
from typing import Any, ClassVar

import pyarrow.parquet as pq

from crash import log
from crash.drivers import Driver
from crash.lane import Lane
from kit import kafka_server
from kit.kafka_kit import PATIENCE, Topic, flush


class SparkLane(Lane):
    """Its log is a folder of files, one for each batch; its progress is Spark's own."""

    lives = 10  # two for each fault; the next lane has the other kind of handler
    query: str = "spark"  # the Spark checkpoint that a restart goes on with

    def start(self, **task: Any) -> Driver:  # type: ignore[override]
        """A driver that reads to the end of the log."""
        source = self.prepare_log()
        told = {"kind": self.kind, "place": self.place.where, "patience": 0.0, "started": str(self.folder / "mark")}
        told |= {"query": str(self.folder / self.query), "takeover": False}
        told["in_tasks"] = log.apart(self.seed)
        driver: Driver = self.nursery.start({**told, **source, **task})  # type: ignore[assignment]
        return driver

    def prepare_log(self) -> dict[str, str]:
        """Write what is missing of it; returns what a driver has to know of where it is."""
        landing = self.folder / "landing"
        landing.mkdir(exist_ok=True)
        for number in range(self.batches):
            file = landing / f"{number:06d}.parquet"
            if not file.exists():
                pq.write_table(log.planned(self.seed, number), file)
                os.utime(file, (1_000_000_000 + number,) * 2)
        return {"landing": str(landing)}

    @classmethod
    def new(cls, kind: str, where: str, nursery: Any, seed: int) -> SparkLane:
        """Rejections at random are the plain loops'. Of two lanes one has a handler of events, in tasks, and no key in two partitions."""
        made = super().new(kind, where, nursery, 2 * (seed // cls.lives))
        assert isinstance(made, SparkLane)
        return made


class KafkaLane(SparkLane):
    """Its log is a topic. Each event is a transaction, whose marker takes every second offset: positions are those of the files."""

    broker: ClassVar[kafka_server.Broker]
    written = 0

    def prepare_log(self) -> dict[str, str]:
        """Send what is missing."""
        topic = Topic(self.broker.servers, self.folder.name.replace("_", "-"))
        if not self.written:
            topic.create(log.PARTITIONS)
        if self.written < self.batches:
            producer = topic.producer(**{"transactional.id": f"{topic.name}-{uuid.uuid4().hex}"})
            producer.init_transactions(PATIENCE)
            for number in range(self.written, self.batches):
                for one in log.facts(self.seed, number):
                    producer.begin_transaction()
                    producer.produce(topic.name, one.delivered()["body"], partition=one.partition)
                    flush(producer)
                    producer.commit_transaction(PATIENCE)
            self.written = self.batches
        return {"servers": self.broker.servers, "topic": topic.name}

    def kill_broker(self, seconds: float) -> None:
        """SIGKILL; it is there again after so many seconds and those that it takes to start."""
        self.broker.kill()
        time.sleep(seconds)
        self.broker.start()


def at_work(lane: Lane, **task: Any) -> Any:
    """A driver in the middle of a batch."""
    mark = lane.folder / f"mark-{uuid.uuid4().hex[:8]}"
    driver: Any = lane.start(started=str(mark), **task)
    while not mark.exists() and not driver.ended:
        time.sleep(0.01)
    return driver


def moment_of(dice: random.Random) -> str:
    """Wait for it; says which it was."""
    seconds = dice.random() ** 2 * 3
    time.sleep(seconds)
    return f"after {seconds:.3f} s"


def _killed(word: str | None) -> Callable[[Lane, random.Random], str]:
    def fault(lane: Lane, dice: random.Random) -> str:
        """SIGKILL of the driver, or of one of the processes below it, in the middle of a batch."""
        driver = at_work(lane)
        while word is not None and not driver.below(word) and not driver.ended:
            time.sleep(0.01)  # Python workers come when a task wants one
        moment = moment_of(dice)
        found = [driver.pid] if word is None else driver.below(word)
        lane.missed = driver.ended or not found
        if found and not driver.ended:
            with contextlib.suppress(ProcessLookupError):
                os.kill(dice.choice(found), signal.SIGKILL)
        lane.wait(driver)
        return f"{moment}, {len(found)} of them"

    return fault


def stop_and_take_over(lane: Lane, dice: random.Random) -> str:
    """SIGSTOP of a driver with its JVM and workers; another driver takes over and finishes; SIGCONT: two drivers with one checkpoint."""
    zombie = at_work(lane)
    moment = moment_of(dice)
    lane.missed = zombie.ended
    zombie.send(signal.SIGSTOP)
    try:
        lane.wait(lane.start(patience=30.0))
    finally:
        zombie.send(signal.SIGCONT)
    lane.wait(zombie)
    return moment


def two_at_once(lane: Lane, dice: random.Random) -> str:
    """Another query of the same consumer, with a Spark checkpoint of its own, takes over in mid-batch; then the first one does, again.

    Whichever went on is what the state knows, so a third query reads all of it again.
    """
    assert isinstance(lane, SparkLane)
    first = at_work(lane)
    moment, lane.missed = moment_of(dice), first.ended
    second = at_work(lane, query=str(lane.folder / uuid.uuid4().hex), takeover=True)
    lane.wait(first)
    lane.wait(at_work(lane, takeover=True))
    lane.wait(second)
    lane.query = uuid.uuid4().hex
    return moment


def kill_broker(lane: Lane, dice: random.Random) -> str:
    """SIGKILL of the broker while a query reads; the query lives through it, or ends and is started again."""
    driver = at_work(lane)
    moment, seconds = moment_of(dice), dice.choice([0.0, 0.0, 2.0])
    lane.missed = driver.ended
    assert isinstance(lane, KafkaLane)
    lane.kill_broker(seconds)
    lane.wait(driver)
    return f"{moment}, away for {seconds} s"


def kill_broker_and_driver(lane: Lane, dice: random.Random) -> str:
    """Both at once; the broker comes back first."""
    driver = at_work(lane)
    moment = moment_of(dice)
    lane.missed = driver.ended
    driver.send(signal.SIGKILL)
    assert isinstance(lane, KafkaLane)
    lane.kill_broker(0.0)
    lane.wait(driver)
    return moment


FAULTS = {
    "Spark: kill -9 of the driver": _killed(None),
    "Spark: kill -9 of the JVM": _killed("java"),
    "Spark: kill -9 of a Python worker": _killed("pyspark.daemon"),
    "Spark: driver stopped, taken over, continued": stop_and_take_over,
    "Spark: two drivers at once, each takes over": two_at_once,
}
"""Of every store."""

KAFKA_FAULTS = {
    "Kafka: kill -9 of the broker": kill_broker,
    "Kafka: kill -9 of the broker and of the driver": kill_broker_and_driver,
    "Kafka: kill -9 of the JVM that reads": FAULTS["Spark: kill -9 of the JVM"],
}
"""Where the stream comes from a broker."""
