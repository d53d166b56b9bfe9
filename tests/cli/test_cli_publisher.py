"""`dedup publisher`: copies that restore, decisions that fence, and nothing without --yes."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from checkpoint.errors import Fenced, NotConfirmed, StoreUnavailable
from dedup.publishing import OutgoingEvent, Published
from dedup.publishing.postgres import Publishers, Row
from kit.pg_run import run
from kit.publish_kit import Broker, consumed, events, kept, publisher, waiting

pytestmark = pytest.mark.postgres

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def broker() -> Broker:
    """A broker with one hub of two partitions, `hub-0`."""
    made = Broker()
    made.new(2)
    return made


@pytest.fixture
def command(postgres: str, dedup: Run) -> Callable[[str], Any]:
    """Runs `dedup publisher ...` with --json and gives the document; an error is raised with its sentence."""

    def one(line: str) -> Any:
        code, out, err = dedup(f"publisher {line} --store {shlex.quote(postgres)} --json")
        if code:
            raise RuntimeError(err)
        return json.loads(out) if out.startswith(("{", "[")) else out

    return one


def leave(postgres: str, broker: Broker, count: int = 5) -> None:
    """Publish ten events with ids, and leave some more that are stored and not confirmed."""
    one = publisher(postgres, broker, "hub-0", max_outage=0.0)
    one.publish([OutgoingEvent(b"%d" % n, key=f"k{n % 5}", id=f"id-{n}") for n in range(10)])
    broker.order("drop_sends", count=100)
    with pytest.raises(NotConfirmed):
        one.publish(events(10, 10 + count, properties={"share": 0.1, "text": "ä\0"}))
    broker.order("calm")
    one.close()


def test_a_copy_restores_all_of_the_state(postgres: str, broker: Broker, command: Any, tmp_path: Path) -> None:
    """Numbers, events that wait, ids: in an empty database the publisher goes on as if nothing had happened."""
    leave(postgres, broker)
    before = command("show shop")
    command(f"export shop {tmp_path}/copy")
    stored = run(postgres, "select partition, sequence, message_id, event_key, properties, body from dedup.publisher_event order by 1, 2")
    run(postgres, "truncate dedup.publish_destination cascade")
    assert command(f"import {tmp_path}/copy")["events"] == 5 and command("list") == []
    assert command(f"import {tmp_path}/copy --yes --by ann --reason lost")["done"]
    after = command("show shop")
    assert [after[n] for n in ("lanes", "oldest", "partitions")] == [before[n] for n in ("lanes", "oldest", "partitions")]
    assert after["owner_level"] > before["owner_level"] and (after["set_by"], after["set_reason"]) == ("ann", "lost")
    again = run(postgres, "select partition, sequence, message_id, event_key, properties, body from dedup.publisher_event order by 1, 2")
    assert again == stored
    with publisher(postgres, broker, "hub-0") as one:
        assert one.publish_once("id-3", OutgoingEvent(b"3")) == Published(known=1)
    assert sorted(map(int, consumed(postgres, broker, "hub-0")[0])) == list(range(15))


def test_an_export_that_fails_leaves_the_copy_before(
    postgres: str, broker: Broker, command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The only backup stays as it is, and nothing half lies beside it, if the group is mistyped or the database goes away in the middle."""
    leave(postgres, broker)
    command(f"export shop {tmp_path}/copy")
    before = (tmp_path / "copy").read_bytes()
    with pytest.raises(RuntimeError, match="There are"):
        command(f"export shoop {tmp_path}/copy")
    copy = Publishers.copy

    def breaking(self: Publishers, group: Row) -> Iterator[str]:
        yield from islice(copy(self, group), 3)
        raise StoreUnavailable("gone")

    monkeypatch.setattr(Publishers, "copy", breaking)
    with pytest.raises(RuntimeError, match="gone"):
        command(f"export shop {tmp_path}/copy")
    assert [(file.name, file.read_bytes()) for file in tmp_path.iterdir()] == [("copy", before)]
    with pytest.raises(RuntimeError, match="none/copy cannot be written: No such file"):
        command(f"export shop {tmp_path}/none/copy")


def test_a_copy_that_is_not_whole_is_not_imported(postgres: str, broker: Broker, command: Any, tmp_path: Path) -> None:
    """A copy that was cut, at a line's end or within a line, is refused with and without --yes, and the state stays as it is."""
    leave(postgres, broker)
    command(f"export shop {tmp_path}/copy")
    whole, before = (tmp_path / "copy").read_bytes(), command("show shop")
    lines = whole.splitlines(keepends=True)
    assert json.loads(lines[-1]) == {"end": {"lane": 2, "event": 5, "id": 10}}
    for damaged, said in (
        (b"".join(lines[:-1]), "its last line is missing"),
        (b"".join(lines[:4]), "its last line is missing"),
        (lines[0], "its last line is missing"),
        (b"".join([*lines[:-2], lines[-1]]), "its last line says"),
        (b"".join([*lines[:4], lines[4][:9]]), "damaged at line 5"),
        (b"".join([*lines[:4], b"\xff\n", *lines[5:]]), "damaged at line 5"),
        (b"".join([*lines[:4], b'{"lane": 5}\n', *lines[5:]]), "damaged at line 5"),
        (whole + lines[4], f"damaged at line {len(lines) + 1}"),
    ):
        (tmp_path / "copy").write_bytes(damaged)
        for line in (f"import {tmp_path}/copy", f"import {tmp_path}/copy --yes"):
            with pytest.raises(RuntimeError, match=said):
                command(line)
    assert command("show shop") == before


def test_an_older_copy_over_newer_state_is_once_at_the_consumer(postgres: str, broker: Broker, command: Any, tmp_path: Path) -> None:
    """The publisher that runs is fenced; what the copy has as waiting is sent again; ids published again are duplicates."""
    leave(postgres, broker)
    command(f"export shop {tmp_path}/copy")
    living = publisher(postgres, broker, "hub-0")
    living.publish([OutgoingEvent(b"20", key="k0", id="id-20")])
    command(f"import {tmp_path}/copy --yes")
    with pytest.raises(Fenced):
        living.publish([b"no"])
    with publisher(postgres, broker, "hub-0") as one:
        assert one.publish([OutgoingEvent(b"20", key="k0", id="id-20"), OutgoingEvent(b"21", key="k0", id="id-21")]) == Published(new=2)
    assert sorted(map(int, consumed(postgres, broker, "hub-0")[0])) == [*range(15), 20, 21]


def test_what_is_discarded_is_not_sent(postgres: str, broker: Broker, command: Any) -> None:
    """Only what was chosen, only with --yes; the others go out in order, and the id is free again."""
    one = publisher(postgres, broker, "hub-0", max_outage=0.0)
    broker.order("drop_sends", count=100)
    with pytest.raises(NotConfirmed):
        one.publish([OutgoingEvent(b"%d" % n, partition=0, id=f"id-{n}") for n in range(3)])
    broker.order("calm")
    assert not command("discard shop --partition 0 --sequence 2")["done"] and waiting(postgres) == 3
    assert command("discard shop --partition 0 --sequence 2 --reason bad --yes")["discarded"] == 1
    with pytest.raises(Fenced):
        one.resend()
    with publisher(postgres, broker, "hub-0") as two:
        assert kept(broker, "hub-0") == [b"0", b"2"]
        assert two.publish_once("id-1", OutgoingEvent(b"new", partition=0)) == Published(new=1)


@pytest.mark.full
def test_a_discard_of_what_does_not_wait_is_refused(postgres: str, broker: Broker, command: Any, dedup: Run) -> None:
    """Exit code 2 with the command that shows what waits, also without --yes; nothing is given up, and nobody is fenced."""
    leave(postgres, broker)
    before = command("show shop")
    for chosen in ("--partition 0 --sequence 999", "--partition 7", "--sequence 0"):
        for line in (f"publisher discard shop {chosen}", f"publisher discard shop {chosen} --yes"):
            code, out, err = dedup(f"{line} --store {shlex.quote(postgres)}")
            assert (code, out) == (2, "")
            assert err == "dedup: No such event waits. `dedup publisher show shop` shows those that wait.\n"
    assert command("show shop") == before
    assert command("discard shop --yes")["discarded"] == len(before["oldest"])
    empty = command("show shop")
    assert (command("discard shop --yes")["discarded"], command("show shop")) == (0, empty)


def test_keys_are_spread_anew_only_on_request(postgres: str, broker: Broker, command: Any) -> None:
    """After set-partitions keys use all partitions; events that wait in a partition that is gone have to be decided first."""
    leave(postgres, broker)
    broker.logs["hub-0"] += [[], []]
    assert command("set-partitions shop 4")["done"] is False
    assert command("set-partitions shop 4 --yes")["then"] == 4
    with publisher(postgres, broker, "hub-0") as one:
        one.publish([OutgoingEvent(b"x", key=f"k{n}") for n in range(20)])
    assert all(broker.logs["hub-0"])
    run(postgres, "update dedup.publisher_event set partition = 3")
    broker.order("drop_sends", count=100)
    with pytest.raises(NotConfirmed):
        publisher(postgres, broker, "hub-0", max_outage=0.0).publish([OutgoingEvent(b"x", partition=3)])
    with pytest.raises(RuntimeError, match="discard shop"):
        command("set-partitions shop 2 --yes")


def test_purge_forgets_only_what_is_confirmed_and_old(postgres: str, broker: Broker, command: Any) -> None:
    """Ids that wait, and younger ones, stay."""
    leave(postgres, broker)
    run(postgres, "update dedup.published_id set stored_at = stored_at - interval '3 days' where message_id < 'id-5'")
    assert command("purge --older-than 2d")["ids"] == 5
    assert command("purge --older-than 2d --yes")["ids"] == 5
    assert run(postgres, "select count(*) from dedup.published_id") == [(5,)]
    run(postgres, "update dedup.published_id set sequence = 1000, stored_at = stored_at - interval '3 days'")
    assert command("purge --older-than 2d --yes")["ids"] == 0


def test_what_cannot_be_is_one_sentence(postgres: str, broker: Broker, command: Any, tmp_path: Path) -> None:
    """No such group, a file that is no copy, an age that is none, a store without publishers."""
    leave(postgres, broker)
    (tmp_path / "junk").write_text("junk\n")
    for line, said in (
        ("show nobody", "There are: none"),
        ("show shop --topic other", "--topic hub-0"),
        (f"import {tmp_path}/junk", "not an export"),
        (f"import {tmp_path}/none", "no file"),
        ("purge --older-than soon", "14d"),
    ):
        with pytest.raises(RuntimeError, match=said):
            command(line)


def test_a_store_that_is_not_postgresql_is_refused(dedup: Run, tmp_path: Path) -> None:
    """Publishers keep their state in PostgreSQL, whatever the consumers use."""
    code, _, err = dedup(f"publisher list --store {tmp_path}")
    assert code == 2 and "PostgreSQL" in err
