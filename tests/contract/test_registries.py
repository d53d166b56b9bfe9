"""A stream whose bodies name their schemas in a registry, on every store."""

from __future__ import annotations

from typing import Any

import pytest

from checkpoint.errors import RegistryUnavailable
from deadletter.policy import FailurePolicy
from deadletter.selection import Selection
from dedup import decode
from dedup.decode.registry import Azure, Confluent
from dedup.reprocessing.letters import reprocess
from kit.orders import assert_proven, batch, consumer, event, ids, letters
from kit.places import Place
from kit.registry_kit import avro, confluent, content_type, record
from kit.registry_server import RegistryServer

ORDER = record(("id", "string"), ("amount", "long"))


class NoLogin:
    """A credential of a registry that asks for none."""

    def get_token(self, *_: str) -> Any:
        """Any."""
        return type("Token", (), {"token": "t"})


def order(number: int, ident: int, id: str) -> dict[str, Any]:
    """An event in Confluent's framing."""
    return event(number, body=confluent(ident, ORDER, {"id": id, "amount": number}))


def test_an_unknown_schema_is_a_letter_until_it_is_known(place: Place, registry: RegistryServer) -> None:
    """Its event is parked as UNDECODABLE with its exact bytes, the others are written; once the schema is there, reprocess writes it."""
    ident = registry.register("orders-value", ORDER)
    run = consumer(place.store(), decode=decode.confluent_avro(registry.url, schema=ORDER))
    late = order(1, ident + 1, "b")
    report = run(batch(order(0, ident, "a"), late, order(2, ident, "c")), 0)
    assert (report.processed, report.dead_lettered) == (2, 1)
    (letter,) = letters(place.store())
    assert (letter["kind"], letter["status"], letter["body"]) == ("UNDECODABLE", "OPEN", late["body"])
    assert sorted(ids(place.read())) == ["a", "c"]
    assert registry.register("orders-value", ORDER) == ident + 1
    fixture_forgets()
    assert reprocess(Selection(), run).reprocessed == 1
    assert sorted(ids(place.read())) == ["a", "b", "c"]
    assert_proven(place.store())


def fixture_forgets() -> None:
    """As if the time were over for which an id counts as unknown."""
    from dedup.decode import registry as registries

    registries.forget()


def test_while_the_registry_is_away_nothing_is_parked(place: Place, registry: RegistryServer) -> None:
    """The batch fails as a whole and leaves nothing behind; when the registry is back, the same batch passes."""
    ident = registry.register("orders-value", ORDER)
    run = consumer(place.store(), decode=decode.confluent_avro(Confluent(registry.url), schema=ORDER))
    events = batch(event(0, body=b"junk"), order(1, ident, "a"))
    registry.stop()
    with pytest.raises(RegistryUnavailable):
        run(events, 0)
    registry.start()
    registry.status = 503
    with pytest.raises(RegistryUnavailable):
        run(events, 0)
    assert letters(place.store()) == [] and place.read() == []
    registry.status = None
    report = run(events, 0)
    assert (report.processed, report.dead_lettered) == (1, 1)
    assert_proven(place.store())


def test_a_batch_waits_for_the_registry(place: Place, registry: RegistryServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within `max_outage` the consumer tries again by itself, and passes when the registry is back."""
    ident = registry.register("orders-value", ORDER)
    run = consumer(place.store(), decode=decode.confluent_avro(registry.url, schema=ORDER), max_outage=60.0)
    registry.stop()
    assert isinstance(run.on_failure, FailurePolicy)
    object.__setattr__(run.on_failure, "sleep", lambda _: registry.start() if registry._server is None else None)
    assert run(batch(order(0, ident, "a")), 0).processed == 1
    assert letters(place.store()) == []


def test_the_content_type_is_kept_for_a_letter(place: Place, registry: RegistryServer) -> None:
    """The schema's id in a property, as Azure's clients send it, is there when the letter is sent again."""
    ident = registry.register_azure("shop/Order", ORDER)
    decoder = decode.azure_avro(Azure(registry.url, NoLogin), schema=ORDER)
    run = consumer(place.store(), decode=decoder)
    unknown = f"{9:032x}"
    bodies = [avro(ORDER, {"id": i, "amount": 1}) for i in "ab"]
    events = [
        event(n, body=body, properties=content_type(name)) for n, (body, name) in enumerate(zip(bodies, (ident, unknown), strict=True))
    ]
    assert run(batch(*events), 0).dead_lettered == 1
    registry.ids[unknown] = registry.ids[ident]
    fixture_forgets()
    assert reprocess(Selection(), run).reprocessed == 1
    assert sorted(ids(place.read())) == ["a", "b"]
    assert_proven(place.store())
