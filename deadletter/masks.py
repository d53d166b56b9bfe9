"""What a mask is given of an event, and the ready-made mask: fields of a JSON body, headers and other columns become `***`. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from checkpoint import given

HIDDEN = "***"
"""What stands where something is hidden."""


@dataclass(frozen=True)
class Contents:
    """What a letter would keep of its event. A function as `redact=` is given one, and returns another one."""

    body: bytes | None
    """Exact bytes; the first 64 KiB of a body above `max_body`."""
    headers: tuple[tuple[str, bytes | None], ...] = ()
    """Pairs of name and value, in their order."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """The input's other columns."""

    def hidden(self) -> Contents:
        """The same with everything hidden but names."""
        body = None if self.body is None else HIDDEN.encode()
        return Contents(body, tuple((name, _star(value)) for name, value in self.headers), dict.fromkeys(self.columns))


@dataclass(frozen=True, init=False)
class Mask:
    """Hide parts of an event for good: the letter keeps `***` in their place, and a digest of the body.

    The event of such a letter is read from the log again when it is reprocessed: `consumer.register_log_reader`. A letter of an event that
    has none of these parts is an ordinary one. A body that is no JSON object or list is hidden as a whole, so a body above `max_body` is.

    Args:
        fields: of a JSON body: "card", "customer.email"; in a list each element is meant. Without fields, headers and columns everything
            is hidden.
        headers: names of headers, in any case.
        columns: names of the input's other columns.
        texts: "hide": letters tell of an error its type, its place and its fingerprint. "keep": also its text and stack, which may quote
            the event.

    Raises:
        ConfigError: a name is blank, or an argument has another type than it takes.
    """

    fields: tuple[str, ...]
    headers: tuple[str, ...]
    columns: tuple[str, ...]
    texts: Literal["hide", "keep"]

    def __init__(
        self, *fields: str, headers: Sequence[str] = (), columns: Sequence[str] = (), texts: Literal["hide", "keep"] = "hide"
    ) -> None:
        given.check(MASK, {"fields": fields, "headers": headers, "columns": columns, "texts": texts}, "Mask")
        own = {"fields": fields, "headers": tuple(name.lower() for name in headers), "columns": tuple(columns), "texts": texts}
        for name, value in own.items():
            object.__setattr__(self, name, value)

    def __call__(self, contents: Contents) -> Contents:
        """The contents without what is named."""
        if not (self.fields or self.headers or self.columns):
            return contents.hidden()
        headers = tuple((name, _star(value) if name.lower() in self.headers else value) for name, value in contents.headers)
        columns = {name: None if name in self.columns else value for name, value in contents.columns.items()}
        return replace(contents, body=self._body(contents.body), headers=headers, columns=columns)

    def _body(self, body: bytes | None) -> bytes | None:
        if body is None or not self.fields:
            return body
        try:
            value = json.loads(body, object_pairs_hook=_once)
        except (ValueError, RecursionError):
            return HIDDEN.encode()
        if not isinstance(value, dict | list):
            return HIDDEN.encode()
        found = [_hide(value, tuple(name.split("."))) for name in self.fields]
        return json.dumps(value).encode() if any(found) else body


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Raises ValueError for a name that an object has twice: what hides the one would leave the other."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name twice")
    return found


def _hide(value: Any, path: tuple[str, ...]) -> bool:
    """Hide what the path leads to, in place; whether there was something. A name of a field may hold dots."""
    if isinstance(value, list):
        hidden = [_hide(one, path) for one in value]  # each of them, also behind one that was found
        return any(hidden)
    if not isinstance(value, dict):
        return False
    found = False
    for count in range(1, len(path) + 1):
        name, rest = ".".join(path[:count]), path[count:]
        if rest and name in value:
            found = _hide(value[name], rest) or found
        elif value.get(name) is not None:
            value[name], found = HIDDEN, True
    return found


def _star(value: bytes | None) -> bytes | None:
    return None if value is None else HIDDEN.encode()


MASK: given.Settings = {
    "fields": given.several("names of fields", '("card",)'),
    "headers": given.several("names of headers", '("x-user",)'),
    "columns": given.several("names of columns", '("ip",)'),
    "texts": given.word("hide", "keep"),
}
"""What `Mask` takes."""
