"""Delta tables on object storage: what the contract suite, which runs there too, cannot see."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from deltalake.exceptions import CommitFailedError
from obstore.store import from_url
from pyarrow.fs import FileSelector

from checkpoint.changes import reset
from checkpoint.errors import ConfigError
from dedup.delta import key_objects, objects, tables
from dedup.delta.files import Add, FileWriter
from dedup.delta.snapshot import Snapshot
from dedup.delta.storage import by_objects, filesystem
from fixtures.variants import of_which
from kit import delta_features, http_proxy, object_storage
from kit.http_proxy import HttpProxy
from kit.key_kit import noted_reads
from kit.object_child import Steered
from kit.orders import assert_proven, batch, consumer, event, flatten, orders
from kit.paths import environment
from kit.places import SINK, S3Place

pytestmark = pytest.mark.objects


@pytest.fixture
def place(s3_folder: str) -> S3Place:
    """An empty place with the sink `orders`."""
    made = S3Place(s3_folder)
    made.create_sink()
    return made


@pytest.fixture
def proxy(s3: str) -> Iterator[HttpProxy]:
    """Before the server, for other processes."""
    with http_proxy.proxied(s3) as made:
        yield made


def test_a_sink_on_s3_that_only_spark_may_write_is_refused(place: S3Place) -> None:
    """Before anything is decided, for appends and for merges: Spark's commits there may replace those of others."""
    DeltaTable(place.path("orders")).alter.add_constraint({"positive": "amount > 0"})
    for write in (lambda tx, rows: tx.write(rows, "orders"), lambda tx, rows: tx.merge(rows, "orders", keys=["id"])):
        made = consumer(place.store())
        made._handler = lambda rows, tx, write=write: write(tx, flatten(rows))
        with pytest.raises(ConfigError, match="dedup_spark_on_s3"):
            made(batch(*orders(range(3))), 0)
    assert place.read() == [] and place.store().head("shop").checkpoints == {}


def adds(place: S3Place, *ids: str) -> list[Add]:
    """A file of the sink `orders` that no commit names yet."""
    rows = pa.table({"id": list(ids), "amount": [1] * len(ids)}, schema=SINK)
    return FileWriter(place.path("orders"), None, SINK, "orders").write(rows)


def opened(place: S3Place) -> Snapshot:
    """The sink `orders` as of now."""
    found = tables.open_table(place.path("orders"), None)
    assert isinstance(found, Snapshot)
    return found


def test_tables_with_features_that_delta_rs_does_not_commit_to(place: S3Place) -> None:
    """Row ids, times and checkpoints there as on a disk: two processes in turns, and the second goes on from the first."""
    uri = place.path("late")
    delta_features.create(uri, SINK)
    for number in range(3):
        for table in (tables.open_table(uri, None) for _ in range(2)):
            assert table is not None
            rows = pa.table({"id": ["a", "b"], "amount": [1, number]}, schema=SINK)
            files = FileWriter(uri, None, SINK, "late").write(rows)
            tables.commit(table, files, {"app": table.version()}, exact=True)
    assert delta_features.row_ids(uri) == [(2 * n, 2 * n + 1) for n in range(6)]
    with pytest.raises(CommitFailedError):
        tables.commit(cast(DeltaTable, tables.open_version(uri, 4, None)), [], {"app": 9}, exact=False)
    assert DeltaTable(uri).to_pyarrow_table().num_rows == 12
    assert any("checkpoint" in i.path for i in filesystem(uri, None).get_file_info(FileSelector("_delta_log")))


def test_of_two_commits_of_one_version_one_is_refused(place: S3Place) -> None:
    """Two processes saw the same version: the second one is told that it came too late, and its rows are not there."""
    one, two = opened(place), opened(place)
    assert one.put(adds(place, "a"), {"app": 1}, 0) and not two.put(adds(place, "b"), {"app": 1}, 0)
    assert (one.version(), two.version()) == (1, 0)
    with pytest.raises(CommitFailedError):
        tables.commit(cast(DeltaTable, two), adds(place, "b"), {"other": 1}, exact=True)
    assert [row["id"] for row in place.read()] == ["a"]


def test_a_process_that_resets_knows_which_sequences_are_blocked(place: S3Place) -> None:
    """It goes on from its own commits without a look at the log; letters of the old life keep their order, as a new process knows it."""
    store = place.store()
    run = consumer(store, sequence_key="data.id", budget=None)
    run(batch(event(0, "o1", -1)), 0)
    store.amend("shop", reset, by="me", reason="again")
    assert store._states.blocked() == place.store()._states.blocked() and store._states.blocked().num_rows == 1
    assert store.problems("shop") == []


def test_a_commit_behind_those_of_others_is_put_there(place: S3Place) -> None:
    """Where others were first and nothing forbids it, delta-rs puts it behind them; with the same transaction id it refuses."""
    late, again = opened(place), opened(place)
    write_deltalake(place.path("orders"), pa.table({"id": ["x"], "amount": [1]}, schema=SINK), mode="append")
    tables.commit(cast(DeltaTable, late), adds(place, "a"), {"app": 1}, exact=False)
    with pytest.raises(CommitFailedError):
        tables.commit(cast(DeltaTable, again), adds(place, "b"), {"app": 1}, exact=False)
    assert [row["id"] for row in place.read()] == ["a", "x"]


def test_a_put_commit_is_known_without_reading_and_the_same_when_read(place: S3Place) -> None:
    """Version, transaction ids and files: what the process that put it says, delta-rs says, too."""
    table = opened(place)
    assert table.transaction_version("app") is None
    for number in range(3):
        assert table.put(adds(place, str(number)), {"app": number, f"app {number}": 1}, 0)
    known = (table.version(), table.transaction_version("app"), len(table.ahead))
    assert known == (3, 2, 3)
    fresh = opened(place)
    assert (fresh.version(), fresh.transaction_version("app"), fresh.transaction_version("app 1")) == (3, 2, 1)
    assert set(pa.table(table.get_add_actions())["path"].to_pylist()) == set(pa.table(fresh.get_add_actions())["path"].to_pylist())
    assert (table.version(), table.ahead, table.transaction_version("app 0")) == (3, [], 1)


def test_a_question_does_not_move_a_snapshot_to_what_others_have_committed(place: S3Place) -> None:
    """What it needs to read is what this process has put: a change of the table behind that is met by the commit, as a conflict."""
    table = opened(place)
    assert table.put(adds(place, "a"), {"app": 1}, 0)
    DeltaTable(place.path("orders")).alter.set_table_properties({"delta.appendOnly": "true"})
    assert table.transaction_version("other") is None and table.version() == 1 and table.ahead == []
    with pytest.raises(CommitFailedError):
        tables.commit(cast(DeltaTable, table), adds(place, "b"), {"app": 2}, exact=False)
    assert [row["id"] for row in place.read()] == ["a"]


def test_a_table_that_was_created_again_is_not_taken_for_the_old_one(place: S3Place) -> None:
    """Dropped, created, and as many commits later: the next look opens it anew, also behind a commit of this process."""
    handle = tables.Handle(place.path("orders"), None)
    table = cast(Snapshot, handle.look())
    assert table.put(adds(place, "a"), {"app": 1}, 0)
    assert handle.look() is table
    place.drop_sink()
    place.create_sink()
    assert opened(place).put(adds(place, "b"), {"ppa": 1}, 0)
    now = handle.look()
    assert now is not None and now is not table and now.metadata().id != table.metadata().id


@pytest.mark.full
def test_a_store_works_with_a_profile(s3_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Credentials that only delta-rs reads: each file goes through its file system, and commits are its own."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_FORCE_CREDENTIAL_LOAD", "true")  # the server is not AWS, where delta-rs looks for profiles unasked
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws/credentials").write_text("[default]\naws_access_key_id = me\naws_secret_access_key = secret\n")
    place = S3Place(s3_folder)
    place.create_sink()
    for number in range(2):
        consumer(place.store())(batch(*orders(range(2 * number, 2 * number + 2))), number)
    assert [row["amount"] for row in place.read()] == [0, 1, 2, 3]
    assert_proven(place.store())


@pytest.mark.full
@pytest.mark.parametrize("name", of_which(2, ["Größe a+b&c", "x%20y", "my data", "Größe", "50%", "a+b&c"]))
def test_a_folder_may_have_any_name(s3_folder: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """delta-rs and single requests mean the same object by it: what one writes, the other one reads, also in a new process's store."""
    place = S3Place(f"{s3_folder}/{name}")
    place.create_sink()
    for number in range(2):
        consumer(place.store())(batch(*orders(range(2 * number, 2 * number + 2))), number)
    assert [row["amount"] for row in place.read()] == [0, 1, 2, 3] and place.store().reserved("shop") == 4
    assert_proven(place.store())
    key_objects.finish()
    reads = noted_reads(monkeypatch)
    assert place.store().reserved("shop") == 4 and reads == [], "copies of keys are found there, too"


@pytest.mark.full
def test_a_checkpoint_is_written_where_one_is_due(place: S3Place) -> None:
    """One commit in so many is made by delta-rs, which writes it; a process that starts reads the rows before and behind it."""
    DeltaTable(place.path("orders")).alter.set_table_properties({"delta.checkpointInterval": "5"})
    run = consumer(place.store())
    for number in range(12):
        run(batch(*orders(range(3 * number, 3 * number + 3))), number)
    system = filesystem(place.path("orders"), None)
    names = [info.base_name for info in system.get_file_info(FileSelector("_delta_log"))]
    assert "_last_checkpoint" in names and any(name.endswith(".checkpoint.parquet") for name in names)
    assert sorted(row["amount"] for row in place.read()) == list(range(36))
    assert place.store().reserved("shop") == 36
    assert_proven(place.store())


def test_a_small_batch_takes_few_requests_and_an_idle_consumer_none(
    place: S3Place, proxy: HttpProxy, s3_settings: dict[str, str], tmp_path: Path
) -> None:
    """At most 25, also after many batches; a consumer that waits for its next batch asks nothing. Of copies of keys only the start asks."""
    child = Steered(place.kind, place.where, tmp_path / "next", object_storage.through(s3_settings, proxy.address))
    try:
        assert [child.do(step) for step in ("start", "many", *["batch"] * 3)] == ["ok"] * 5
        assert [request.method for request in proxy.taken() if "keys" in request.path] == ["GET"]
        for _ in range(8):
            assert child.do("batch") == "ok"
            taken = proxy.taken()
            assert 0 < len(taken) <= 25 and not any("keys" in request.path for request in taken)
        assert proxy.taken() == []
    finally:
        child.close()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"AWS_ALLOW_HTTP": "true"}, {"client_options": {"allow_http": "true"}, "retry_config": None}),
        ({"timeout": "5s", "AWS_S3_LOCKING_PROVIDER": "dynamodb"}, {"client_options": {"allow_http": "true", "timeout": "5s"}}),
        ({"max_retries": "0", "retry_timeout": "500ms"}, {"retry_config": {"max_retries": 0, "retry_timeout": timedelta(seconds=0.5)}}),
        (
            {"backoff_config.init_backoff": "2 seconds", "backoff_config.base": "3"},
            {"retry_config": {"backoff": {"init_backoff": timedelta(seconds=2), "base": 3.0}}},
        ),
    ],
)
def test_settings_mean_what_they_mean_to_delta_rs(
    settings: dict[str, str], said: dict[str, Any], s3_folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the connection, which the environment gives as well, and those of further tries; what nobody knows is passed over."""
    given: dict[str, Any] = {}

    def noted(uri: str, **options: Any) -> Any:
        given.update(options)
        return from_url(uri, **options)

    monkeypatch.setattr(objects, "from_url", noted)
    objects.put(s3_folder, settings, "x", pa.py_buffer(b"y"))
    assert {name: given[name] for name in said} == said
    objects.put(s3_folder, settings, "empty", pa.py_buffer(b""))
    contents = objects.gets(s3_folder, settings, ["x", "empty", "none"])
    assert [content and content.to_pybytes() for content in contents] == [b"y", b"", None]


def test_a_pause_without_a_unit_is_refused(s3_folder: str) -> None:
    """It could be seconds or milliseconds."""
    with pytest.raises(OSError, match="Write a number and its unit"):
        objects.get(s3_folder, {"retry_timeout": "30"}, "x")
    with pytest.raises(OSError, match=r"A setting of the storage is wrong: .*'many'"):
        objects.get(s3_folder, {"max_retries": "many"}, "x")


def test_profiles_of_the_aws_command_line_are_left_to_delta_rs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only it reads them: where a profile may say who asks, files go through its file system."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_PROFILE", "AWS_CONFIG_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert by_objects("s3://lake/x", None)
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws/config").write_text("[default]\nsso_session = shop\n")
    assert not by_objects("s3://lake/x", None)
    (tmp_path / ".aws/config").unlink()
    monkeypatch.setenv("AWS_PROFILE", "shop")
    assert not by_objects("s3://lake/x", None) and by_objects("s3://lake/x", {"AWS_ACCESS_KEY_ID": "me"})
    assert by_objects("az://lake/x", None) and not by_objects("/lake/x", None)


RACER = """
import sys
from deltalake import write_deltalake
import pyarrow as pa
for n in range(20):
    while True:
        try:
            write_deltalake(sys.argv[1], pa.table({"id": [f"{sys.argv[2]}-{n}"], "amount": [n]}), mode="append")
            break
        except Exception as error:
            if "oncurrent" not in str(error) and "Failed to commit" not in str(error):
                raise
"""


@pytest.mark.full
@pytest.mark.parametrize("way", ["", http_proxy.PLAIN])
def test_writers_at_once_lose_nothing_and_would_without_the_condition(
    place: S3Place, proxy: HttpProxy, s3_settings: dict[str, str], tmp_path: Path, way: str
) -> None:
    """Four processes append to one table: each row once. A proxy that makes a plain put of put-if-absent loses rows, and this sees it."""
    proxy.rule = lambda method, path: way
    script = tmp_path / "racer.py"
    script.write_text(RACER)
    line = [sys.executable, str(script), place.path("orders")]
    around = environment(**object_storage.through(s3_settings, proxy.address))
    racers = [subprocess.Popen([*line, str(n)], env=around) for n in range(4)]
    assert [racer.wait() for racer in racers] == [0] * 4
    rows = Counter(row["id"] for row in place.read())
    whole = rows == Counter(f"{racer}-{n}" for racer in range(4) for n in range(20))
    assert whole == (way != http_proxy.PLAIN)
