"""What fastavro does not check while it reads: numbers below zero, how deep a body nests, and in what it leaves out the end of it.

Schemas are those that `fastavro.parse_schema` returns: every name in them is full.
"""

from __future__ import annotations

import io
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from dedup.decode.values import WHOLE, Unreadable

MOST_LEVELS = 1_000
"""Records, unions, arrays and maps within each other. fastavro reads by recursion in C, and would end the process at ten times as many."""

_LONGEST = 10
"""Bytes of a number: what 64 bits take."""

_LARGEST = 2**63
"""One more than the largest number of 64 bits."""

_FIXED = {"boolean": 1, "float": 4, "double": 8}
"""Bytes of what always has as many."""


class _Choices(list[Any]):
    """The branches of a union or the symbols of an enum, of which the last one is not number -1.

    fastavro's compiled code adds the length to a number below zero, as a list does. A length beyond all numbers leads to an IndexError.
    A method in place of that would be called for each value, and slow every body down.
    """

    def __len__(self) -> int:
        return sys.maxsize // 2


def without_negatives(schema: Any) -> Any:
    """The schema, changed in place: reading by it raises IndexError for a number below zero of a union or an enum.

    It does not for a union that is the whole schema, which fastavro copies: see `begins_below_zero`.
    """
    if isinstance(schema, list):
        return _Choices([without_negatives(one) for one in schema])
    if isinstance(schema, dict):
        for node in (schema, *schema.get("fields", ())):
            node.update({key: without_negatives(node[key]) for key in ("type", "items", "values") if key in node})
        if "symbols" in schema:
            schema["symbols"] = _Choices(schema["symbols"])
    return schema


def begins_below_zero(body: bytes) -> bool:
    """Whether a body begins with a number below zero: the lowest bit is its sign."""
    return bool(body) and body[0] & 1 == 1


def contains_itself(schema: Any, inside: frozenset[str] = frozenset()) -> bool:
    """Whether a body may nest without end. A type is used behind its definition, or within it: then it contains itself."""
    if isinstance(schema, str):
        return schema in inside
    if isinstance(schema, list):
        return any(contains_itself(one, inside) for one in schema)
    inside |= {str(schema.get("name"))}
    children = [schema[key] for key in ("type", "items", "values") if key in schema] + [f["type"] for f in schema.get("fields", ())]
    return any(contains_itself(one, inside) for one in children)


def levels_per_byte(named: Mapping[str, Any]) -> float:
    """Most levels of which only the last takes bytes: a body of n bytes nests at most n + 1 times as deep.

    It is infinite where a record is a field of its own. A union, an array and a map take a byte before what is within them, a record none.

    Args:
        named: full name -> definition, of all types of a schema.
    """
    known: dict[str, float] = {}

    def records(node: Any) -> float:
        node = named.get(node) if isinstance(node, str) else node
        if not isinstance(node, dict) or node["type"] not in ("record", "error"):
            return 0
        if node["name"] not in known:
            known[node["name"]] = math.inf  # where it is met again below, it is within itself
            known[node["name"]] = 1 + max((records(field["type"]) for field in node["fields"]), default=0)
        return known[node["name"]]

    return 1 + max(map(records, named), default=0)


class WholeBytes(io.BytesIO):
    """Bytes of a body that raise Unreadable where some are missing. fastavro takes no notice of it in values that it leaves out."""

    def read(self, size: int | None = -1, /) -> bytes:
        """Exactly so many bytes."""
        if len(taken := super().read(size)) != size:
            raise Unreadable(WHOLE, f"does not end within its {self.getbuffer().nbytes} bytes")
        return taken


def skips_the_end(nodes: Iterator[Mapping[str, Any]], named: Mapping[str, Any]) -> bool:
    """Whether fastavro, where it leaves out an array, may go through items behind the end of the body: twelve bytes may claim 2^60 of them.

    Args:
        nodes: every definition of a schema.
        named: full name -> definition, of all its types.
    """
    return any(node.get("type") == "array" and _has_one_size(node["items"], named) for node in nodes)


def _has_one_size(node: Any, named: Mapping[str, Any], inside: frozenset[str] = frozenset()) -> bool:
    """Whether no number says what a value consists of: fastavro finds the end of a body only in a number."""
    if isinstance(node, list):
        return False
    node = node if isinstance(node, dict) else named.get(node, {"type": node})
    if node["type"] not in ("record", "error"):
        return node["type"] in ("null", "fixed", *_FIXED)
    name = str(node["name"])
    return name not in inside and all(_has_one_size(field["type"], named, inside | {name}) for field in node["fields"])


def depth_guard(schema: Any, named: Mapping[str, Any]) -> Callable[[bytes], None]:
    """What raises Unreadable for a body that nests deeper than MOST_LEVELS, or is broken.

    It takes the bytes as fastavro does, so that fastavro never goes deeper in a body that passes. Enums and texts are not looked at.

    Args:
        named: full name -> definition, of all types of the schema.
    """

    def guard(body: bytes) -> None:
        stream = io.BytesIO(body)
        levels = [iter((schema,))]
        while levels:
            node = next(levels[-1], levels)
            if node is levels:
                levels.pop()
            elif len(levels) > MOST_LEVELS:
                raise Unreadable(WHOLE, f"nests deeper than {MOST_LEVELS:,} levels")
            else:
                levels.append(_parts(node, named, stream))

    return guard


def _parts(node: Any, named: Mapping[str, Any], stream: io.BytesIO) -> Iterator[Any]:
    """The schemas of the values within a value, each when its bytes are next; the bytes of a scalar are taken."""
    if isinstance(node, list):
        yield _branch(node, _number(stream))
        return
    node = node if isinstance(node, dict) else named.get(node, {"type": node})
    kind = node["type"]
    if kind in ("record", "error"):
        yield from (field["type"] for field in node["fields"])
    elif kind in ("array", "map"):
        yield from _items(kind, node["items" if kind == "array" else "values"], stream)
    elif not isinstance(kind, str) or kind in named:
        yield kind
    else:
        _take(stream, _FIXED[kind] if kind in _FIXED else _size(kind, node, stream))


def _branch(union: list[Any], number: int) -> Any:
    branches = list.__len__(union)
    if not 0 <= number < branches:
        raise Unreadable(WHOLE, "has a number that its union does not have")
    return union[number]


def _items(kind: str, item: Any, stream: io.BytesIO) -> Iterator[Any]:
    """The schema once for each item; before it the key of a map is taken."""
    while count := _number(stream):
        size = _number(stream) if count < 0 else None
        start = stream.tell()
        for _ in range(abs(count)):
            if kind == "map":
                _take(stream, _number(stream))
            yield item
        if size not in (None, stream.tell() - start) or count == -_LARGEST:
            # fastavro goes by this size where it skips, and in 64 bits that count has no absolute value.
            raise Unreadable(WHOLE, "has a number of bytes that its items do not have")


def _size(kind: str, node: Mapping[str, Any], stream: io.BytesIO) -> int:
    """Bytes that a scalar still has; a number is taken as a whole."""
    if kind == "fixed":
        return int(node["size"])
    number = 0 if kind == "null" else _number(stream)
    return number if kind in ("bytes", "string") else 0


def _take(stream: io.BytesIO, count: int) -> bytes:
    if count < 0 or len(taken := stream.read(count)) < count:
        raise Unreadable(WHOLE, f"does not end within its {stream.getbuffer().nbytes} bytes")
    return taken


def _number(stream: io.BytesIO) -> int:
    """A number as fastavro reads it. One of more bytes than 64 bits take is refused: what fastavro makes of it depends on the machine."""
    found = 0
    for place in range(_LONGEST):
        (byte,) = _take(stream, 1)
        found |= (byte & 0x7F) << (7 * place)
        if byte < 0x80:
            found %= 2 * _LARGEST
            return (found >> 1) ^ -(found & 1)
    raise Unreadable(WHOLE, f"has a number of more than {_LONGEST} bytes")
