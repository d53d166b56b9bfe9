"""Processes killed with SIGKILL at every single step of what happens to letters, and several of them at once."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from pyarrow.fs import FileSelector

from deadletter.crashes import MAX_DEATHS
from deadletter.letter import ERASED
from dedup.core.messages import Chosen
from dedup.delta.storage import filesystem
from fixtures.fix_places import of_stores
from kit.child_letters import SEQUENCES, Steps, do, is_flaky, made, orders_of, prepare_place
from kit.children import Nursery
from kit.forgetting import places_with
from kit.orders import assert_proven, batch, letters
from kit.places import DeltaPlace, Place, SparkPlace, wait_for_rollback

pytestmark = [pytest.mark.crash, pytest.mark.timeout(3600)]  # where Spark commits, each of some fifty deaths needs a JVM of its own

_DISCARD = ["discard change", "discard commit"]
_ON_DELTA = ["reprocess handler", "reprocess change", "reprocess commit", "reprocess decide", *_DISCARD, "discard decide"]
REACHED = {
    "postgres": ["reprocess handler", "reprocess write", "reprocess change", "reprocess commit", *_DISCARD],
    "delta": _ON_DELTA,
    "delta-spark": _ON_DELTA,
}
"""Store -> what is done to a letter, and the steps that it has."""

LAST = {"postgres": ["reprocess commit", "discard commit"], "delta": ["reprocess decide", "discard decide"]}
"""Right before the decision of whoever was first."""

EARLIER = {store: [at for at in steps if at not in LAST.get(store, [])] for store, steps in REACHED.items()}


FORGETTING_ON_POSTGRES = ["messages", "erase", "commit", "committed"]
_FIRST_ON_DELTA = ["messages", "failures", "noted", "contents", "erase", "commit", "decide", "read_back", "publish", "published"]
FORGETTING_ON_DELTA = [*_FIRST_ON_DELTA, "scrub", "expire"]
"""The steps of whoever forgets a key."""

HALF_WAY = ("contents", "erase", "scrub")
"""Between what it erases: the texts of messages, their rows, the letters, the files."""


def task_at(place: Place, **task: Any) -> dict[str, Any]:
    """A task of the consumer `shop` unless another one is named."""
    where = place.where
    return {
        "module": "kit.child_letters",
        "kind": place.kind,
        "place": where,
        "name": "shop",
        **task,
    }


def effects(place: Place, name: str = "shop") -> list[int]:
    """Numbers of the events of a consumer, in the order of their effects."""
    ids = _published(place) if isinstance(place, DeltaPlace) else _inserted(place)
    return [_number(i) for i in ids if i.startswith(f"{name}-")]


def _inserted(place: Any) -> list[str]:
    return [i for (i,) in place.execute("SELECT id FROM orders ORDER BY n")]


def _published(place: DeltaPlace) -> list[str]:
    """Spark, which reads large staged files first, gives the rows of one commit no order: what counts there is the order of the commits."""
    commits = [_ids_of(place, paths) for paths in _commits(place)]
    return [i for ids in commits for i in (sorted(ids, key=_number) if isinstance(place, SparkPlace) else ids)]


def _number(id: str) -> int:
    return int(id.rpartition("-")[2])


def _commits(place: DeltaPlace) -> list[list[str]]:
    """The files that each commit adds."""
    system = filesystem(place.path("orders"), None)
    entries = sorted(i.path for i in system.get_file_info(FileSelector("_delta_log")) if i.path.endswith(".json"))
    texts = [bytes(system.open_input_stream(entry).read()) for entry in entries]
    return [[action["add"]["path"] for action in map(json.loads, text.splitlines()) if "add" in action] for text in texts]


def _ids_of(place: DeltaPlace, paths: list[str]) -> list[str]:
    """Ids in the order of the files."""
    system = filesystem(place.path("orders"), None)
    return [i for path in paths for i in pq.read_table(path, columns=["id"], filesystem=system)["id"].to_pylist()]


def assert_in_order(done: list[int]) -> list[int]:
    """Each once, and within a sequence by position."""
    assert len(done) == len(set(done)), f"doubled: {sorted(n for n in set(done) if done.count(n) > 1)}"
    for sequence in range(SEQUENCES):
        mine = [n for n in done if n % SEQUENCES == sequence]
        assert mine == sorted(mine), f"overtaken in sequence {sequence}: {mine}"
    return done


def standing(place: Place, name: str) -> dict[int, str]:
    """Number -> status of the consumer's letters, which hold their keys while they are not settled."""
    found = letters(place.store(), consumer=name)
    assert all(x["holds_key"] == (x["status"] in ("OPEN", "BLOCKED", "DISCARDED")) for x in found)
    return {x["sequence_number"]: x["status"] for x in found}


def die_everywhere(
    whole: Place,
    nursery: Nursery,
    before: list[dict[str, Any]],
    victim: dict[str, Any],
    check: Callable[[Place, str], None],
    chosen: Callable[[list[str], int], bool] = lambda steps, number: True,
) -> list[str]:
    """Kill the victim right before its first step, its second one ... (`Steps`); after each death do it again, and check.

    Each time on a consumer of its own in a part of the place, made by the tasks `before`. Returns the names of all its steps, also of those
    that are not chosen to die before.
    """
    prepare_place(whole)
    seen = steps_of(_part(whole, "shop", before), victim)
    steps = seen.names
    for number in [number for number in seen.to_die_before() if chosen(steps, number)]:
        name = f"shop{number}x"
        place = _part(whole, name, before)
        dies(place, nursery, {**victim, "name": name}, number, steps[number - 1])
        do(place.store(), task_at(place, **victim, name=name))
        store = place.store()
        store.publish(name)
        try:
            check(place, name)
        except AssertionError as error:
            raise AssertionError(f"died before {steps[number - 1]}, the {number}. step: {error}") from error
        assert_proven(store, name)
    return steps


def steps_of(place: Place, task: dict[str, Any]) -> Steps:
    """Do the task; returns its steps."""
    steps = Steps(place)
    do(place.store(on_step=steps), task_at(place, **task))
    return steps


def dies(place: Place, nursery: Nursery, task: dict[str, Any], number: int, step: str) -> None:
    """Have a process do the task and die right before its step of this number, which has this name."""
    code, errors = nursery.start(task_at(place, **task, die_at=number)).wait()
    assert code == -signal.SIGKILL, errors
    assert errors.rpartition("died before ")[2].strip() == step
    wait_for_rollback(place)


def _part(whole: Place, name: str, before: list[dict[str, Any]]) -> Place:
    """Where these tasks of the consumer were done. Of Delta a place of its own: a look for letters goes through every consumer."""
    place = whole
    if isinstance(whole, DeltaPlace):
        place = whole.part(name)
        prepare_place(place)
    for task in before:
        do(place.store(), task_at(place, **task, name=name))
    return place


BROKEN = {"do": "stream", "batches": [[*range(9)]], "bad": [0, 4]}
"""Leaves 0 and 4 open, 3 and 6 blocked behind 0, 7 behind 4."""


@pytest.mark.full
def test_killed_anywhere_while_parking(place: Place, nursery: Nursery) -> None:
    """During retries, bisect and parking, in two batches: the same letters, each with its message, each other event once."""

    def check(place: Place, name: str) -> None:
        assert sorted(assert_in_order(effects(place, name))) == [1, 2]
        assert standing(place, name) == {0: "OPEN", 3: "BLOCKED", 6: "BLOCKED"}
        told = [entry.id for entry in place.store().outbox(name).entries(Chosen(limit=None))]
        assert sorted(told) == sorted(x["id"] for x in letters(place.store(), consumer=name))

    victim = {"do": "stream", "batches": [[0, 1, 2, 3], [6]], "bad": [0], "settings": {"letters_to": "dead"}}
    steps = die_everywhere(place, nursery, [], victim, check)
    assert {"handler", "park", "commit"} <= set(steps) and steps.count("handler") == 5


@pytest.mark.fast_on("postgres")
@pytest.mark.parametrize("first", [True, pytest.param(False, marks=pytest.mark.full)], ids=["the first of its name", "a later one"])
def test_killed_anywhere_while_reprocessing_and_releasing(place: Place, nursery: Nursery, first: bool) -> None:
    """One letter passes and releases its followers, one fails again: effects once and in order, chains whole."""

    def check(place: Place, name: str) -> None:
        assert sorted(assert_in_order(effects(place, name))) == [0, 1, 2, 3, 5, 6, 8]
        assert standing(place, name) == {0: "REPROCESSED", 3: "REPROCESSED", 4: "OPEN", 6: "REPROCESSED", 7: "BLOCKED"}

    def chosen(steps: list[str], number: int) -> bool:
        return (steps[number - 1] not in steps[: number - 1]) == first

    steps = die_everywhere(place, nursery, [BROKEN], {"do": "reprocess", "bad": [4]}, check, chosen)
    assert {"handler", "change", "commit"} <= set(steps)


@pytest.mark.full
def test_killed_anywhere_while_filling_from_the_log(place: Place, nursery: Nursery) -> None:
    """Absent positions run from the log, one of them fails: decided once."""
    unordered = {"settings": {"sequence_key": None}}
    before = [{"do": "stream", "batches": batches, **unordered} for batches in ([[0, 1]], [[0, 1], [6, 7]])]

    def check(place: Place, name: str) -> None:
        assert sorted(effects(place, name)) == [0, 1, 2, 4, 5, 6, 7]
        assert standing(place, name) == {3: "OPEN"}

    steps = die_everywhere(place, nursery, before, {"do": "from log", "bad": [3], **unordered}, check)
    assert {"handler", "park", "record", "commit"} <= set(steps)


@pytest.mark.full
def test_killed_anywhere_while_replaying(place: Place, nursery: Nursery) -> None:
    """Repeated through merge: one row per event, and still their reservations."""
    merging = {"merge": True, "settings": {"sequence_key": None}}
    before = [{"do": "stream", "batches": [[0, 1, 2]], **merging}]

    def check(place: Place, name: str) -> None:
        assert [r["id"] for r in place.read("balances") if r["id"].startswith(f"{name}-")] == [f"{name}-{n}" for n in range(3)]

    steps = die_everywhere(place, nursery, before, {"do": "replay", **merging}, check)
    assert {"handler", "change", "commit"} <= set(steps)


@pytest.mark.full
@pytest.mark.parametrize("release", [pytest.param(False, marks=pytest.mark.full), True])
def test_killed_anywhere_while_discarding(place: Place, nursery: Nursery, release: bool) -> None:
    """The blocker is given up: its followers are free, its key is held or free, never something between."""
    victim = {"do": "discard", "selection": {"first": 0, "last": 0}, "release": release}

    def check(place: Place, name: str) -> None:
        found = {x["sequence_number"]: x for x in letters(place.store(), consumer=name)}
        assert found[0]["status"] == "DISCARDED" and found[0]["holds_key"] != release
        assert (found[3]["status"], found[6]["status"], found[6]["blocked_by"]) == ("OPEN", "BLOCKED", found[3]["id"])

    steps = die_everywhere(place, nursery, [BROKEN], victim, check)
    assert {"change", "commit"} <= set(steps) and ("free" in steps) == release


@pytest.mark.full
def test_killed_anywhere_while_reopening(place: Place, nursery: Nursery) -> None:
    """The letter is back in front of its sequence, and holds its key again."""
    discarded = {"do": "discard", "selection": {"first": 0, "last": 0}, "release": True}
    reopened = {"do": "reopen", "selection": {"first": 0, "last": 0}}

    def check(place: Place, name: str) -> None:
        assert standing(place, name) == {0: "OPEN", 3: "BLOCKED", 4: "OPEN", 6: "BLOCKED", 7: "BLOCKED"}

    assert "change" in die_everywhere(place, nursery, [BROKEN, discarded], reopened, check)


@pytest.mark.full
def test_killed_anywhere_while_editing(place: Place, nursery: Nursery) -> None:
    """The letter has its new body and its history the original; reprocessed, the new key has the effect, and the old one stays taken."""

    def check(place: Place, name: str) -> None:
        (letter,) = letters(place.store(), consumer=name, first=0, last=0)
        past = [x for x in place.store().history(letter["id"]).to_pylist() if x["action"] == "EDITED"]
        assert b"-21" in letter["body"] and b"-0" in past[0]["body"]
        do(place.store(), task_at(place, do="reprocess", name=name, bad=[4]))
        do(place.store(), task_at(place, do="stream", name=name, batches=[[0], [21]]))
        assert sorted(effects(place, name)) == [1, 2, 3, 5, 6, 8, 21]

    edited = {"do": "edit", "selection": {"first": 0, "last": 0}, "becomes": 21}
    assert "change" in die_everywhere(place, nursery, [BROKEN], edited, check)


@pytest.mark.fast_on("delta")
@pytest.mark.parametrize("half_way", [True, pytest.param(False, marks=pytest.mark.full)], ids=["half way", "elsewhere"])
def test_killed_anywhere_while_forgetting(place: Place, nursery: Nursery, half_way: bool) -> None:
    """Called again, nothing of the key can be read; the record of who erased it is there once; letters and messages of others are whole."""
    told = {"settings": {"letters_to": "dead", "sequence_key": None}}
    before = [{"do": "stream", "batches": [[*range(3)]], "bad": [0, 1], **told}, {"do": "dispatch", **told}, {"do": "discard"}]

    def check(place: Place, name: str) -> None:
        assert places_with(place, f"{name}-0") == []
        store = place.store()
        mine, other = letters(store, consumer=name)
        assert (mine["reason"], mine["status"], mine["holds_key"]) == (ERASED, "DISCARDED", True)
        assert [x["by"] for x in store.history(mine["id"]).to_pylist() if x["action"] == "FORGOTTEN"] == ["test"]
        assert (other["idempotence_key"], other["body"]) == (f"{name}-1", orders_of(name, [1])[0]["body"])
        outbox = store.outbox(name)
        entries = {entry.id: entry for entry in outbox.entries(Chosen(limit=None))}
        assert {i: e.state.name for i, e in entries.items()} == {mine["id"]: "SENT", other["id"]: "SENT"}
        assert entries[mine["id"]].is_erased and entries[mine["id"]].set_by == "test"
        kept = outbox.message(entries[other["id"]].number)
        assert kept is not None and kept.body == other["body"]

    def chosen(steps: list[str], number: int) -> bool:
        return (steps[number - 1] in HALF_WAY) == half_way

    steps = die_everywhere(place, nursery, before, {"do": "forget", "number": 0}, check, chosen)
    assert steps == (FORGETTING_ON_DELTA if isinstance(place, DeltaPlace) else FORGETTING_ON_POSTGRES)


@pytest.mark.parametrize(
    "more",
    [{}, pytest.param({"max_events_per_transaction": 4, "query": None}, marks=pytest.mark.full)],
    ids=["one chunk", "a later chunk, no query id"],
)
def test_an_event_that_kills_its_process_is_parked_as_crashed(place: Place, nursery: Nursery, more: dict[str, Any]) -> None:
    """After three deaths parts are tried, and log2 n deaths later the killer is a letter; the rest is written, the stream goes on."""
    prepare_place(place)
    task = task_at(place, do="stream", batches=[[*range(8)], [8, 9]], deadly=[5], settings={"sequence_key": None, **more})
    deaths = [nursery.start(task).wait()]
    while deaths[-1][0] != 0 and len(deaths) < 20:
        assert deaths[-1][0] == -signal.SIGKILL, deaths[-1][1]
        deaths.append(nursery.start(task).wait())
    assert len(deaths) - 1 <= MAX_DEATHS + 3
    assert sorted(effects(place)) == [0, 1, 2, 3, 4, 6, 7, 8, 9]
    (letter,) = letters(place.store())
    assert (letter["sequence_number"], letter["kind"], letter["status"]) == (5, "CRASHED", "OPEN")
    assert place.store().crash_marker("shop") is None or '"running": null' in (place.store().crash_marker("shop") or "")
    do(place.store(), {**task, "do": "reprocess", "deadly": []})
    assert sorted(effects(place)) == [*range(10)]
    assert_proven(place.store())


@pytest.mark.full
def test_a_killer_makes_nobody_suspicious_in_the_next_batch(place: Place, nursery: Nursery) -> None:
    """Without positions batches of one size look alike: what killed in one of them is not looked for in the next, at the same row."""
    prepare_place(place)
    settings = {"sequence_key": None, "positions": None}
    task = task_at(place, do="stream", batches=[[*range(8)], [*range(8, 16)]], deadly=[5], settings=settings)
    for _ in range(MAX_DEATHS + 5):
        code, errors = nursery.start(task).wait()
        assert code in (0, -signal.SIGKILL), errors
    assert code == 0
    assert sorted(effects(place)) == [n for n in range(16) if n != 5]
    assert [(x["idempotence_key"][-1], x["kind"]) for x in letters(place.store())] == [("5", "CRASHED")]


@pytest.mark.fast_on("postgres")
def test_a_handler_that_hangs_ends_its_process_with_its_stacks(place: Place, nursery: Nursery) -> None:
    """A thread cannot be stopped, so the process ends; what hangs is found like what kills, and the stream goes on."""
    prepare_place(place)
    limit = 20.0 if isinstance(place, SparkPlace) else 1.0  # there what a run writes goes through Spark, within the limit
    task = task_at(place, do="stream", batches=[[0, 1], [2]], hanging=[1], settings={"handler_timeout": limit, "sequence_key": None})
    codes, said = [], ""
    for _ in range(MAX_DEATHS + 2):
        code, errors = nursery.start(task).wait()
        codes.append(code)
        said = said or errors
    assert codes == [1] * (len(codes) - 1) + [0]
    assert "Timeout" in said and "in handler" in said
    assert sorted(effects(place)) == [0, 2] and [x["kind"] for x in letters(place.store())] == ["CRASHED"]
    assert_proven(place.store())


@pytest.mark.full
@pytest.mark.parametrize(
    "how",
    [{"deadly": [2]}, pytest.param({"hanging": [2], "settings": {"handler_timeout": 2.0}}, marks=pytest.mark.full)],
    ids=["killed", "hangs"],
)
def test_of_two_queries_in_one_process_only_the_guilty_one_parks(place: Place, nursery: Nursery, how: dict[str, Any]) -> None:
    """What kills or hangs is found and parked as CRASHED, with a slow chunk beside it that dies each time, and is blamed for nothing."""
    if isinstance(place, SparkPlace):
        pytest.skip("two sessions of Spark in one process: the same code decides")
    prepare_place(place)
    settings = {"sequence_key": None, **how.get("settings", {})}
    task = task_at(place, **{**how, "do": "two streams", "batches": [[0, 1, 2, 3]], "settings": settings})
    codes = []
    for _ in range(2 * MAX_DEATHS + 4):
        code, errors = nursery.start(task).wait()
        codes.append(code)
        if code == 0:
            break
    assert codes[-1] == 0 and len(codes) > MAX_DEATHS, errors
    assert letters(place.store(), consumer="slow") == [] and effects(place, "slow") == [0]
    assert [(x["sequence_number"], x["kind"]) for x in letters(place.store(), consumer="guilty")] == [(2, "CRASHED")]
    assert effects(place, "guilty") == [0, 1, 3]


@pytest.mark.full
def test_two_reprocessors_and_a_live_stream(place: Place, nursery: Nursery, tmp_path: Path) -> None:
    """While the stream parks and waits, two processes reprocess, one of them killed again and again: nothing twice, nothing overtaken."""
    prepare_place(place)
    stop, ended, count = tmp_path / "stop", tmp_path / "ended", 216
    batches = [[*range(n, n + 9)] for n in range(0, count, 9)]
    streaming = task_at(place, do="stream", flaky=True, ended=str(ended))
    do(place.store(), {**streaming, "batches": batches[:1]})
    other = task_at(place, do="reprocess for ever", stop=str(stop))
    steady, victim = nursery.start(other), nursery.start(other)
    stream, kills = nursery.start({**streaming, "batches": batches}), 0
    while not ended.exists():
        time.sleep(0.4)
        victim.send(signal.SIGKILL)
        victim.wait()
        victim, kills = nursery.start(other), kills + 1
    assert "REPROCESSED" in standing(place, "shop").values(), "nothing was reprocessed while the stream ran"
    assert kills > 1
    stream.finish()
    stop.touch()
    steady.finish()
    victim.finish()
    do(place.store(), task_at(place, do="reprocess"))
    place.store().publish("shop")
    assert sorted(assert_in_order(effects(place))) == [*range(count)]
    flaky = {n for n in range(count) if is_flaky(f"shop-{n}")}
    found = standing(place, "shop")
    assert flaky <= set(found) and set(found.values()) == {"REPROCESSED"}
    assert_proven(place.store())


@pytest.mark.parametrize("release", [pytest.param(False, marks=pytest.mark.full), True])
@pytest.mark.parametrize(("place", "at"), [*of_stores(LAST), *of_stores(EARLIER, full=True)], indirect=["place"])
def test_discard_and_reprocess_of_one_letter_have_one_winner(place: Place, at: str, release: bool) -> None:
    """One of them is at a step while the other one runs: the event has its effect, or it is given up, and one of them says so."""
    prepare_place(place)
    do(place.store(), task_at(place, do="stream", batches=[[0, 1]], bad=[0]))
    first, step = at.split(" ")
    second = {"reprocess": "discard", "discard": "reprocess"}[first]
    begun = [False]

    def on_step(name: str) -> None:
        if name == step and not begun[0]:
            begun[0] = True
            do(place.store(), task_at(place, do=second, release=release))

    do(place.store(on_step=on_step), task_at(place, do=first, release=release))
    assert begun[0], "it has no such step"
    place.store().publish("shop")
    (letter,) = letters(place.store())
    assert (letter["status"], sorted(effects(place))) in (("REPROCESSED", [0, 1]), ("DISCARDED", [1]))
    assert letter["holds_key"] == (letter["status"] == "DISCARDED" and not release)
    ended = [a for a in place.store().history(letter["id"])["action"].to_pylist() if a in ("REPROCESSED", "DISCARDED", "RELEASED")]
    assert set(ended) - {"RELEASED"} == {letter["status"]} and ended.count(letter["status"]) == 1
    assert_proven(place.store())


@pytest.mark.fast_on("postgres")
def test_duplicates_of_a_key_that_was_let_go_are_redeliveries(place: Place) -> None:
    """Discarded with its key: the log read again from its beginning is recognised, and not taken for a topic that was re-created."""
    prepare_place(place)
    first, duplicate = orders_of("shop", [0])[0], {**orders_of("shop", [0])[0], "sequence_number": 1}
    run = made(place.store(), task_at(place, bad=[0]))
    assert (run(batch(first, duplicate), 0).duplicates, run(batch(first, duplicate), 0).redelivered) == (1, 2)
    do(place.store(), task_at(place, do="discard", release=True))
    run = made(place.store(), task_at(place, settings={"query": "another"}))
    assert run(batch(first, duplicate), 0).redelivered == 2
    assert run(batch({**first, "sequence_number": 2}), 1).processed == 1
    assert_proven(place.store())
