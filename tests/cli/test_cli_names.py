"""Names that nobody knows: a mistyped consumer, source, topic or number never reads as an empty result, or as a preview of a change."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from checkpoint.errors import ConfigError
from checkpoint.head import Checkpoint, Head
from checkpoint.position import Partition
from checkpoint.start import End, lags
from kit.people import failing
from kit.places import DeltaPlace

Run = Callable[..., tuple[int, str, str]]

FILTERING = ["list", "group", "discard --reason x", "reopen", "export {folder}/letters.jsonl"]

UNKNOWN = {
    "--consumer shoop": "There is no consumer 'shoop' in this store. It has: shop",
    "--topic ordes": "No checkpoint, dead letter or message is of topic 'ordes'. Known topics: 'orders' of 'broker'",
    "--source broke": "is of source 'broke'. Known topics: 'orders' of 'broker'",
    "--source broke --topic orders": "is of topic 'orders' of 'broke'",
}

LINES = {
    "outbox retry shop 99": "'shop' has no message 99. `dedup outbox list shop`",
    "outbox discard shop 99 98": "'shop' has no message 98, 99. `dedup outbox list shop`",
    "outbox show shop 99": "There is no message 99",
    "checkpoint set shop --topic ordes --partition 0 --to 99": "Name the --source of topic 'ordes'",
    "consumer accept-incarnation shop --source broker --topic ordes": "It has: broker/orders",
    "budget lift shoop --kind NO_KEY --events 9": "It has: shop",
    "outbox purge shoop --older-than 1d": "It has: shop",
}

PROGRAM = """
from pathlib import Path
from kit.orders import consumer as made
from kit.places import DeltaPlace
store = DeltaPlace(Path({folder!r})).store()
consumer, unknown = made(store), made(store, name="shoop")
"""


@pytest.fixture
def place(tmp_path: Path) -> DeltaPlace:
    """Where `shop` has parked three letters."""
    made = DeltaPlace(tmp_path)
    made.create_sink()
    failing(made.store())
    return made


@pytest.mark.full
@pytest.mark.delta
def test_a_name_that_the_store_does_not_know_is_refused(place: DeltaPlace, dedup: Run, tmp_path: Path) -> None:
    """Exit code 2, nothing on standard output, and the names that there are; with --yes as without it."""
    lines = {f"dead-letter {verb.format(folder=tmp_path)} {name}": words for verb in FILTERING for name, words in UNKNOWN.items()}
    for line, words in {**lines, **LINES}.items():
        changing = any(verb in line for verb in ("discard", "reopen", "retry", " set ", "accept", "lift", "purge"))
        for yes in ("", " --yes") if changing else ("",):
            code, out, err = dedup(line + yes, place)
            assert (code, out, words in err) == (2, "", True), (line, out, err)


@pytest.mark.delta
def test_reprocess_and_replay_know_their_names(place: DeltaPlace, dedup: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A consumer that has never run in its store, and a topic that it does not read."""
    name = f"shop_{uuid.uuid4().hex}"
    (tmp_path / f"{name}.py").write_text(PROGRAM.format(folder=str(place.folder)))
    monkeypatch.chdir(tmp_path)
    for line, words in {
        f"dead-letter reprocess {name}:unknown": "It has: shop",
        f"consumer replay {name}:unknown --topic orders": "It has: shop",
        f"dead-letter reprocess {name}:consumer --topic ordes": "Known topics: 'orders' of 'broker'",
        f"consumer replay {name}:consumer --topic ordes": "It has: broker/orders/0",
    }.items():
        code, out, err = dedup(line)
        assert (code, out, words in err) == (2, "", True), (line, out, err)


def test_a_lag_is_not_counted_from_a_source_that_is_not_read() -> None:
    """With a mistyped --source every event would count as not handled."""

    class Broker:
        def ends(self, topics: object) -> dict[tuple[str, int], End]:
            return {("t", 0): End(0, 9, None)}

    head = Head("shop", checkpoints={Partition("a", "t", 0): Checkpoint(3)})
    with pytest.raises(ConfigError, match=r"reads nothing from 'b'\. It reads from a\."):
        lags(head, Broker(), ["t"], "b")


def test_a_missing_kind_offers_only_kinds_that_have_a_budget(dedup: Run) -> None:
    """What `budget lift` would refuse is not proposed."""
    code, _, err = dedup("budget lift shop --events 5")
    assert (code, "--kind" in err, "TOO_LARGE" in err, "UNSENT" in err) == (2, True, False, False)
