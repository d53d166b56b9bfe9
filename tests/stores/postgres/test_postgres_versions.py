"""Two versions of the library on one schema: an upgrade of one team stops nobody else's consumer."""

from __future__ import annotations

import pytest

from checkpoint.errors import StateTooNew
from checkpoint.postgres import sql
from conftest import Run
from dedup.postgres import PostgresStore
from kit.orders import assert_proven, batch, consumer, event, orders
from kit.parts import run_contract
from kit.places import PostgresPlace
from kit.versions import next_library, upgrade


def test_an_instance_goes_on_while_another_version_migrates_and_takes_over(postgres: str) -> None:
    """The tables get columns and one more table under it; both versions find what the other one has decided."""
    place = PostgresPlace(postgres)
    place.create_sink()
    older = consumer(place.store())
    assert older(batch(*orders(range(3))), 0).processed == 3
    assert upgrade(postgres) == ["0014_wider"]
    assert older(batch(*orders(range(6)), event(10, "bad", -1)), 1).dead_lettered == 1
    with next_library():
        newer = consumer(place.store(), query="q2")
        assert newer(batch(*orders(range(8))), 0).processed == 2
    again = consumer(place.store(), query="q3")
    assert again(batch(*orders(range(9))), 0).processed == 1
    assert_proven(place.store())
    assert PostgresStore(postgres).migrate() == []


def test_a_newer_schema_that_does_not_say_so_is_refused(postgres: str) -> None:
    """By first use, by migrate and by its dry run; an instance that runs already is not looked after."""
    upgrade(postgres, compatible=False)
    for call in (PostgresStore(postgres).consumers, PostgresStore(postgres).migrate, lambda: PostgresStore(postgres).migrate(dry_run=True)):
        with pytest.raises(StateTooNew, match=f"version {sql.latest_version() + 1}.*Upgrade this installation"):
            call()


def test_this_version_works_on_the_older_schema_where_it_may_not_migrate(postgres: str, dedup: Run) -> None:
    """`dedup migrate --check` names what is missing; whoever may migrate, does so by first use."""
    place = PostgresPlace(postgres)
    place.create_sink()
    with next_library():
        store = PostgresStore(postgres, auto_migrate=False)
        assert consumer(store)(batch(*orders(range(3))), 0).processed == 3
        assert store.migrate(dry_run=True) == ["0014_wider"]
        code, out, _ = dedup("migrate --check", place)
        assert (code, out) == (1, "needs a migration: 0014_wider is not applied. Run `dedup migrate`.\n")
        assert PostgresStore(postgres).consumers() == ["shop"] and store.migrate(dry_run=True) == []


def test_the_oldest_schema_is_one_of_ours() -> None:
    """No statement of this version needs tables that OLDEST_SCHEMA does not have: while they are the same, that is plain."""
    assert sql.latest_version() == sql.OLDEST_SCHEMA, "from now on run the contract on tables of OLDEST_SCHEMA, too"


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_the_contract_holds_on_the_tables_of_a_newer_version() -> None:
    """Every promise of a store, for a library whose tables have got a column each."""
    done = run_contract("postgres and not spark", DEDUP_TEST_SCHEMA="newer")
    assert done.returncode == 0, done.stdout[-3000:]
