"""Names in Avro schemas: definitions that stand elsewhere are put where they are used first. Called by dedup/registry.py. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

_NAMED = ("record", "error", "enum", "fixed")


def inlined(schema: str, others: Mapping[str, str]) -> str:
    """The schema with the definitions of others that it refers to inside.

    Args:
        schema: JSON text of an Avro schema.
        others: full name -> JSON text of the schema that has this name.
    """
    left = {name: json.loads(text) for name, text in others.items()}
    return json.dumps(_with(json.loads(schema), "", left, set()))


def _with(node: Any, space: str, left: dict[str, Any], done: set[str]) -> Any:
    """`left` are definitions that have not been put anywhere, `done` the names of those that stand somewhere: none may stand twice."""
    if isinstance(node, str):
        found = next((name for name in (_full(node, space), node) if name in left and name not in done), None)
        return node if found is None else _with(left.pop(found), "", left, done)
    if isinstance(node, list):
        return [_with(one, space, left, done) for one in node]
    if not isinstance(node, dict):
        return node
    if node.get("type") in _NAMED:
        space = _space(node, space)
        if (name := _full(str(node["name"]).rpartition(".")[2], space)) in done:
            return name
        done.add(name)
    fields = {"fields": [{**f, "type": _with(f["type"], space, left, done)} for f in node["fields"]]} if "fields" in node else {}
    inside = {key: _with(node[key], space, left, done) for key in ("type", "items", "values") if key in node}
    return {**node, **inside, **fields}


def _full(name: str, space: str) -> str:
    return name if "." in name or not space else f"{space}.{name}"


def _space(node: Mapping[str, Any], outer: str) -> str:
    name = str(node.get("name", ""))
    return name.rpartition(".")[0] if "." in name else str(node.get("namespace", outer))
