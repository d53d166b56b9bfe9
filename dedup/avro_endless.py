"""Avro arrays of what takes no bytes: a body of twelve bytes may say that 2^60 nulls follow, and reading it would never end.

Any other array ends with its bytes. Pure; called where a schema of bodies becomes known.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_INSIDE = ("type", "items", "values")


def refuse(schema: Any) -> None:
    """Raise ValueError where the schema (parsed JSON) has such an array, naming its items."""
    nodes = list(_nodes(schema))
    named = {name: node for node in nodes for name in _names(node)}
    for node in nodes:
        if node.get("type") == "array" and _empty(node["items"], named, frozenset()):
            raise ValueError(f"an array of {_shown(node['items'])}, which takes no bytes: a short body could claim any number of them")


def _nodes(node: Any) -> Iterator[Mapping[str, Any]]:
    """Every definition in a schema."""
    if isinstance(node, list):
        for one in node:
            yield from _nodes(one)
    elif isinstance(node, dict):
        yield node
        for child in (*(node[key] for key in _INSIDE if key in node), *(field["type"] for field in node.get("fields", ()))):
            yield from _nodes(child)


def _names(node: Mapping[str, Any]) -> tuple[str, ...]:
    return (str(node["name"]), f"{node.get('namespace')}.{node['name']}") if "name" in node else ()


def _empty(node: Any, named: Mapping[str, Any], inside: frozenset[str]) -> bool:
    """Whether a value takes no bytes; a union has at least its number, a record that holds itself never ends anyway."""
    if isinstance(node, str):
        return node == "null" or (node in named and node not in inside and _empty(named[node], named, inside | {node}))
    if not isinstance(node, dict):
        return False
    if node["type"] in ("record", "error"):
        return all(_empty(field["type"], named, inside | set(_names(node))) for field in node["fields"])
    if node["type"] == "fixed":
        return bool(node["size"] == 0)
    return node["type"] not in ("array", "map", "enum") and _empty(node["type"], named, inside)


def _shown(node: Any) -> str:
    return node if isinstance(node, str) else str(node.get("name", node["type"]))
