"""One place with a consumer that lives through iteration after iteration: a fault, a restart to the end, a count of every row."""

from __future__ import annotations

import re
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from crash import child, log
from dedup.verify import verify
from kit.children import Child
from kit.orders import letters
from kit.places import Place, place_of


@dataclass
class Lane:
    """Where the processes of some iterations write, one after another or at once."""

    lives: ClassVar[int] = 25  # iterations of one lane: its tables grow, and what is old has to stay true
    kind: str  # "postgres" or "delta"
    place: Place
    folder: Path
    nursery: Any  # starts processes: a Nursery, or a Garage of Spark drivers
    seed: int
    batches: int = 0  # that the log has so far
    coin: float = 0.0
    life: float = 0.3  # seconds that a process takes from its start to the end of the log
    ended: list[str] = field(default_factory=list)  # how the processes of this iteration ended
    missed: bool = False  # whether the process was done before the fault came
    environ: ClassVar[dict[str, str]] = {}  # what its processes have in their environment besides

    @classmethod
    def new(cls, kind: str, where: str, nursery: Any, seed: int) -> Lane:
        """An empty place, with its sinks."""
        place = place_of(kind, where)
        child.create(place)
        folder = Path(tempfile.mkdtemp(prefix="lane-"))
        return cls(kind, place, folder, nursery, seed, coin=0.1 * (seed % 2))

    @property
    def steps(self) -> list[str]:
        """Where a process of this store can die."""
        return list(self.place.store().steps)

    def start(self, **task: Any) -> Child:
        """A process that works to the end of the log."""
        named = {"module": "crash.child", "kind": self.kind, "place": self.place.where, "progress": str(self.folder / "progress")}
        named["environ"] = self.environ
        return self.nursery.start({**named, "seed": self.seed, "until": self.batches, "coin": self.coin, **task})

    def wait(self, process: Child) -> None:
        """Note how it ended."""
        code, said = process.wait()
        lines = [line for line in said.splitlines() if re.match(r"[\w.]+(:|$)", line)]
        self.ended.append("finished" if code == 0 else f"signal {-code}" if code < 0 else lines[-1].split(":")[0] if lines else str(code))

    def finish(self) -> None:
        """A restart without any fault has to come to the end of the log."""
        begun, last = time.monotonic(), self.start(patience=30.0)
        last.finish()
        self.life = max(0.9 * self.life, time.monotonic() - begun)  # mostly there is little left to do

    def wrong(self) -> tuple[list[Any], list[Any], list[str]]:
        """What is lost, what is doubled, and what contradicts itself."""
        return wrong(self.place, self.seed, self.batches)


def wrong(place: Place, seed: int, batches: int) -> tuple[list[Any], list[Any], list[str]]:
    """What is lost, what is doubled, and what contradicts itself, after so many batches of the log."""
    store = place.store()
    parked = letters(store)
    coins = [x["idempotence_key"] for x in parked if x["reason"] == "coin"]
    have = _found(place, parked, child.SINKS[0])
    lost, doubled = log.expected(seed, batches, coins).difference(have)
    contradictions = [str(x) for x in verify(store, "shop").contradictions]
    if _found(place, parked, child.SINKS[1]).rows != have.rows:
        contradictions.append("the two sinks differ")
    points = {c.sequence_number for c in store.head("shop").checkpoints.values()}
    if points != {2 * (batches * log.BATCH - 1)}:
        contradictions.append(f"checkpoints {points}")
    store.close()  # type: ignore[attr-defined]
    return lost, doubled, contradictions


def _found(place: Place, parked: list[dict[str, Any]], sink: str) -> log.Outcome:
    rows = Counter((r["id"], r["amount"]) for r in place.read(sink))
    held = Counter(x["idempotence_key"] for x in parked if x["holds_key"])
    merged, latest = (Counter((r["id"], r["amount"]) for r in place.read(name)) for name in child.MERGED)
    return log.Outcome(rows, held, sum(not x["holds_key"] for x in parked), merged, latest)
