"""The lengths that CHAR and VARCHAR allow, as conditions in Spark's SQL, also within arrays, maps and structs.

Delta keeps such a column as text, and its type in the metadata of the column, as `varchar(5)` or `array<char(3)>`. Promises the condition
that Delta's own writer checks: a longer text is refused, even if only by spaces at its end (tried with Delta 4.4). Pure. Called by `sinks`.
"""

from __future__ import annotations

import re

_NESTED = re.compile(r"(array|map|struct)<", re.IGNORECASE)
_LEAF = re.compile(r"(?:var)?char\((?P<length>\d+)\)|[a-z_]+(?:\([\d, ]+\))?(?: [a-z0-9_ ]+)?", re.IGNORECASE)
_NAME = re.compile(r"(?:`((?:[^`]|``)+)`|([^`:<>,]+)):\s*")
"""Of a part of a struct, as it is or in backticks."""
_PADDED = re.compile(r"char\(\d+\)", re.IGNORECASE)


def is_padded(kind: str) -> bool:
    """Whether Spark fills up the column's texts with spaces."""
    return _PADDED.fullmatch(kind) is not None


def length_rule(column: str, kind: str) -> str:
    """The condition on a column of this type, true for NULL; empty where it has no limit. Raises ValueError for a type it cannot read."""
    rule, rest = _rule(_quoted(column), kind, 0)
    if rest:
        raise ValueError(f"unknown type {kind}")
    return rule


def _rule(value: str, kind: str, depth: int) -> tuple[str, str]:
    """(the condition on a value, what follows behind its type)."""
    if nested := _NESTED.match(kind):
        rule, rest = _READERS[nested[1].lower()](value, kind[nested.end() :], depth)
    elif leaf := _LEAF.match(kind):
        rule, rest = f"length({value}) <= {leaf['length']}" if leaf["length"] else "", kind[leaf.end() :]
    else:
        raise ValueError(f"unknown type {kind}")
    return f"({value} IS NULL OR {rule})" if rule else "", rest


def _array(value: str, kind: str, depth: int) -> tuple[str, str]:
    rule, rest = _rule(f"e{depth}", kind, depth + 1)
    return _each(value, depth, rule), _behind(rest, ">")


def _map(value: str, kind: str, depth: int) -> tuple[str, str]:
    of_keys, rest = _rule(f"e{depth}", kind, depth + 1)
    of_values, rest = _rule(f"e{depth}", _behind(rest, ","), depth + 1)
    return _both(_each(f"map_keys({value})", depth, of_keys), _each(f"map_values({value})", depth, of_values)), _behind(rest, ">")


def _struct(value: str, kind: str, depth: int) -> tuple[str, str]:
    found, rest = "", kind
    while (name := _NAME.match(rest)) is not None:
        part = name[2] or name[1].replace("``", "`")
        rule, rest = _rule(f"{value}.{_quoted(part)}", rest[name.end() :], depth)
        found = _both(found, rule)
        if rest.startswith(">"):
            return found, rest[1:]
        rest = _behind(rest, ",")
    raise ValueError(f"no name before {rest!r}")


_READERS = {"array": _array, "map": _map, "struct": _struct}


def _each(values: str, depth: int, rule: str) -> str:
    return f"forall({values}, e{depth} -> {rule})" if rule else ""


def _both(one: str, other: str) -> str:
    return " AND ".join(filter(None, (one, other)))


def _behind(text: str, mark: str) -> str:
    if not text.startswith(mark):
        raise ValueError(f"{mark} is missing before {text!r}")
    return text[1:].lstrip()


def _quoted(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"
