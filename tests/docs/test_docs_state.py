"""What the pages about keys, purges, upgrades, sources and stores show is what runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from dedup import Consumer, DeltaStore, PostgresStore
from dedup.pipeline.report import Report
from dedup.verify import verify
from kit.aged import turned
from kit.paths import ROOT
from kit.pg_run import run

KEYS, PURGE, UPGRADE = ((ROOT / "docs/how-to" / page).read_text() for page in ("keys.md", "purge.md", "upgrade.md"))
BODIES = ('{"order_id": "a", "version": 1}', '{"order_id": "a", "version": 2}', '{"order_id": "a", "version": 2}')


def blocks(language: str, page: str) -> list[str]:
    """The fenced code of one language."""
    return re.findall(rf"```{language}\n(.*?)```", page, re.DOTALL)


def orders(*bodies: str) -> pa.Table:
    """Events at consecutive positions."""
    place = {"source": "s", "topic": "orders", "partition": 0}
    return pa.Table.from_pylist([{**place, "sequence_number": number, "body": body.encode()} for number, body in enumerate(bodies)])


def handled(consumer: Consumer, *bodies: str) -> Report:
    """What becomes of them where the handler writes nothing."""
    consumer.foreach_batch(lambda rows, tx: None)
    report: Report = consumer(orders(*bodies), 0)
    return report


@pytest.mark.delta
def test_the_key_of_the_page_names_the_message(tmp_path: Path) -> None:
    """Two versions of one order are two messages, and the second delivery of a version is a duplicate; the order alone is a conflict."""
    names: dict[str, Any] = {}
    (snippet,) = blocks("python", KEYS)
    exec(snippet.replace("/lake", str(tmp_path)), names)
    report = handled(names["consumer"], *BODIES)
    assert (report.processed, report.duplicates) == (2, 1)
    entity = Consumer("other", DeltaStore(str(tmp_path)), idempotence_key="data.order_id", decode=names["consumer"].decode)
    report = handled(entity, BODIES[0], *BODIES[:2])
    assert (report.processed, report.duplicates, report.dead_lettered) == (1, 1, 1)


def test_each_key_of_the_table_is_a_setting(tmp_path: Path) -> None:
    """A consumer takes whatever the page recommends."""
    told = re.findall(r'`((?:idempotence_key=)?(?:"[\w.]+"|\[[^\]]+\]))`', KEYS.split("## What goes wrong")[0])
    assert len(told) >= 4
    for key in told:
        assert Consumer("orders", DeltaStore(str(tmp_path)), idempotence_key=eval(key)).keys.columns


@pytest.mark.delta
def test_the_purge_of_a_delta_store_drops_what_is_older(tmp_path: Path) -> None:
    """Thirty days ago nothing was reserved; the same lines with a day to come leave no reservation, and `verify` finds nothing wrong."""
    lake, (*_, snippet) = str(tmp_path), blocks("python", PURGE)
    handled(Consumer("orders", DeltaStore(f"{lake}/dedup")), *BODIES)
    for days, left in (("30", 3), ("-2", 0)):
        behind = snippet.replace(' days")', ' days", although_behind=True)') if left == 0 else snippet
        exec(behind.replace("/lake", lake).replace("days=30", f"days={days}"), {})
        fresh = DeltaStore(f"{lake}/dedup")
        assert fresh.reserved("orders") == left and verify(fresh, "orders").ok


@pytest.mark.postgres
def test_the_purge_of_a_postgres_store_drops_what_is_older(postgres: str) -> None:
    """As for Delta: the statements as they are shown keep the keys of today; with a time to come they drop them."""
    store, (statements,) = PostgresStore(postgres), blocks("sql", PURGE)
    handled(Consumer("orders", store), *BODIES)
    for age, left in (("30 days')", 3), ("-1 days', '{orders}')", 0)):
        for statement in re.sub("--.*", "", statements).replace("30 days')", age).split(";")[:-1]:
            run(postgres, statement)
        assert store.reserved("orders") == left and verify(store, "orders").ok


@pytest.mark.postgres
def test_the_purge_in_python_drops_the_tables(postgres: str) -> None:
    """The same in Python leaves nothing to do."""
    store, (_, snippet, _) = PostgresStore(postgres), blocks("python", PURGE)
    handled(Consumer("orders", store), *BODIES)
    for days, left in (("30))", 3), ("-2), although_behind=['orders'])", 0)):
        exec(snippet.replace("postgresql://localhost/shop", postgres).replace("days=30))", f"days={days}"), {})
        assert run(postgres, "select count(*) from dedup.reservation_key") == [(left,)] and verify(store, "orders").ok


@pytest.mark.postgres
def test_a_consumer_does_its_upkeep_as_shown(postgres: str) -> None:
    """The consumer of the page has a turn after its first batch, and tells its retention."""
    names: dict[str, Any] = {}
    exec(blocks("python", PURGE)[0].replace("postgresql://localhost/shop", postgres), names)
    made: Consumer = names["consumer"]
    handled(made, *BODIES)
    turned(made)
    assert run(postgres, "select extract(day from retention)::int, upkeep from dedup.consumer_retention") == [(30, True)]


@pytest.mark.delta
def test_the_upkeep_is_run_as_shown(tmp_path: Path, dedup: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands of the page pass as they stand; the one that goes on until it is stopped is among them."""
    handled(Consumer("orders", DeltaStore(f"{tmp_path}/dedup")), *BODIES)
    monkeypatch.setenv("DEDUP_STORE", f"{tmp_path}/dedup")
    look, act, forever = (line.split("#")[0].removeprefix("dedup ").strip() for line in blocks("console", PURGE)[0].splitlines())
    assert [dedup(line)[0] for line in (look, act)] == [0, 0] and "--every" in forever and "--yes" in forever
    assert dedup(forever.replace("--yes", ""))[0] == 2


@pytest.mark.postgres
def test_the_commands_of_an_upgrade_tell_and_do(empty_postgres: str, dedup: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--check` says by its exit code that a migration is missing; after `migrate` there is none."""
    monkeypatch.setenv("DEDUP_STORE", empty_postgres)
    check, migrate = (line.split("#")[0].removeprefix("dedup ").strip() for line in blocks("console", UPGRADE)[0].splitlines())
    assert [dedup(command)[0] for command in (check, migrate, check)] == [1, 0, 0]


def test_both_stores_are_made_as_shown(tmp_path: Path) -> None:
    """The page about stores names the arguments that they have; making one connects to nothing."""
    names: dict[str, Any] = {}
    (snippet,) = blocks("python", (ROOT / "docs/how-to/stores.md").read_text())
    exec(snippet.replace("/lake", str(tmp_path)), names)
    assert isinstance(names["store"], DeltaStore) and names["store"].tables == {"orders": f"{tmp_path}/orders"}


@pytest.mark.delta
def test_a_frame_of_any_columns_is_mapped_as_shown(tmp_path: Path) -> None:
    """The page about sources: columns of any name give positions and bodies, and a repeated reading is a duplicate."""
    names: dict[str, Any] = {}
    (snippet,) = blocks("python", (ROOT / "docs/how-to/sources.md").read_text())
    exec(snippet.replace("/lake", str(tmp_path)), names)
    names["consumer"].foreach_batch(lambda rows, tx: None)
    rows = [{"file": "a", "shard": 0, "line": line, "text": '{"id": "m", "value": 1.5}'} for line in range(2)]
    report = names["consumer"](pa.Table.from_pylist(rows), 0)
    assert (report.processed, report.duplicates) == (1, 1)


@pytest.mark.delta
def test_the_first_code_of_the_delta_page_runs(tmp_path: Path) -> None:
    """A repeated order is one row of the table that the page creates."""
    from deltalake import DeltaTable

    names: dict[str, Any] = {}
    (snippet,) = blocks("python", (ROOT / "docs/how-to/delta.md").read_text())
    exec(snippet.replace("/lake", str(tmp_path)), names)
    names["consumer"](orders(*['{"message_id": "m-1", "customer": "ann", "amount": 5}'] * 2), 0)
    assert DeltaTable(f"{tmp_path}/orders").to_pyarrow_table().num_rows == 1


@pytest.mark.postgres
def test_the_first_code_of_the_postgres_page_runs(postgres: str) -> None:
    """As for Delta: a repeated order is one row."""
    names: dict[str, Any] = {}
    run(postgres, "create table orders (message_id text, customer text, amount bigint)")
    snippet = blocks("python", (ROOT / "docs/how-to/postgres.md").read_text())[0]
    exec(snippet.replace("postgresql://localhost/shop", postgres), names)
    names["consumer"](orders(*['{"message_id": "m-1", "customer": "ann", "amount": 5}'] * 2), 0)
    assert run(postgres, "select * from orders") == [("m-1", "ann", 5)]
