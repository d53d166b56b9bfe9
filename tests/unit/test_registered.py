"""The decorators of a consumer: each of them registers what it is put on, with parentheses and without, or says why not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from checkpoint.errors import ConfigError
from dedup import Consumer, PostgresStore

STORE = PostgresStore("host=nowhere")


def handler(rows: Any, tx: Any) -> None:
    """Of a batch, a table or an event; or what takes effects back."""


def read(source: str, topic: str, partition: int, first: int, last: int) -> None:
    """The log again."""


async def coroutine(event: Any, tx: Any) -> None:
    """Of an event."""


def generator(*given: Any) -> Any:
    """Runs nothing."""
    yield given


DECORATORS: dict[str, tuple[Callable[..., Any], str]] = {
    "foreach_batch": (handler, "_handler"),
    "foreach": (handler, "_handler"),
    "foreach_arrow": (handler, "_handler"),
    "register_log_reader": (read, "read_log"),
    "compensate": (handler, "take_back"),
}
"""Decorator -> what it takes, and where the consumer keeps that."""


@pytest.mark.parametrize("parentheses", [False, True])
@pytest.mark.parametrize("name", DECORATORS)
def test_a_decorator_registers_with_parentheses_and_without(name: str, parentheses: bool) -> None:
    """Forgotten or superfluous parentheses must not leave a consumer without what its user has written."""
    function, kept = DECORATORS[name]
    consumer = Consumer("a", STORE)
    decorate = getattr(consumer, name)
    assert (decorate() if parentheses else decorate)(function) is function
    assert getattr(consumer, kept) is not None


def test_an_async_handler_of_events_registers_without_parentheses() -> None:
    """As one that is none."""
    consumer = Consumer("a", STORE)
    consumer.foreach(coroutine)
    assert consumer._handler is not None


@pytest.mark.parametrize("name", DECORATORS)
@pytest.mark.parametrize("wrong", [generator, lambda: None, "orders", 5])
def test_what_cannot_be_called_is_refused_at_once(name: str, wrong: Any) -> None:
    """A generator, too few arguments, and what is no function: nothing is registered, and the error says what is expected."""
    consumer = Consumer("a", STORE)
    decorate = getattr(consumer, name)
    with pytest.raises(ConfigError, match=r"argument|generator|function|has to be|it takes"):
        (decorate() if isinstance(wrong, str) else decorate)(wrong)
    assert (consumer._handler, consumer.read_log, consumer.take_back) == (None, None, None)


@pytest.mark.parametrize("name", ["foreach_batch", "foreach_arrow", "compensate", "register_log_reader"])
def test_a_coroutine_is_refused_where_nobody_would_await_it(name: str) -> None:
    """Only handlers of single events may be an `async def`."""

    async def five(source: str, topic: str, partition: int = 0, first: int = 0, last: int = 0) -> None: ...

    with pytest.raises(ConfigError, match=r"async def|plain function"):
        getattr(Consumer("a", STORE), name)(five)


@pytest.mark.parametrize("wrong", ["orders", {"into": "orders"}, ["orders"], 3, True], ids=str)
@pytest.mark.parametrize("name", ["foreach_batch", "foreach", "foreach_arrow", "register_log_reader", "compensate"])
def test_a_decorator_with_a_value_in_place_of_a_function_says_how_it_is_used(name: str, wrong: Any) -> None:
    """A text is the sink for handlers of events; then what is decorated must be a function. An unused decorator registers nothing."""
    consumer = Consumer("c", STORE)
    decorate = getattr(consumer, name)
    if wrong == "orders" and name in ("foreach", "foreach_arrow"):
        decorate = decorate(wrong)
    usage = rf"foreach(_arrow)?\(into=|Write (it without arguments|@consumer\.{name}.*) above `def"
    with pytest.raises(ConfigError, match=usage):
        decorate(wrong)
    with pytest.raises(ConfigError, match=r"has no handler. Write @consumer\.foreach_batch, .* above a function"):
        consumer.job()
