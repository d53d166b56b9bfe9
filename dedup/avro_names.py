"""Names in Avro schemas: definitions that stand elsewhere are put where they are used first. Called by dedup/registry.py. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

_NAMED = ("record", "error", "enum", "fixed")


def inlined(schema: str, others: Mapping[str, str]) -> str:
    """The schema with the definitions of others that it refers to inside.

    Args:
        schema: JSON text of an Avro schema.
        others: full name -> JSON text of the schema that has this name.
    """
    left = {name: json.loads(text) for name, text in others.items()}
    return json.dumps(_with(json.loads(schema), "", left))


def _with(node: Any, space: str, left: dict[str, Any]) -> Any:
    """`left` are the definitions that have not been put anywhere yet."""
    if isinstance(node, str):
        found = next((name for name in (full(node, space), node) if name in left), None)
        return node if found is None else _with(_absolute(left.pop(found)), "", left)
    if isinstance(node, list):
        return [_with(one, space, left) for one in node]
    if not isinstance(node, dict):
        return node
    inner = _space(node, space) if node.get("type") in _NAMED else space
    left.pop(full(str(node.get("name")), inner), None) if node.get("type") in _NAMED else None
    fields = {"fields": [{**f, "type": _with(f["type"], inner, left)} for f in node["fields"]]} if "fields" in node else {}
    inside = {key: _with(node[key], inner, left) for key in ("type", "items", "values") if key in node}
    return {**node, **inside, **fields}


def full(name: str, space: str) -> str:
    """The full name of a name that is used in this namespace."""
    return name if "." in name or not space else f"{space}.{name}"


def _space(node: Mapping[str, Any], outer: str) -> str:
    name = str(node.get("name", ""))
    return name.rpartition(".")[0] if "." in name else str(node.get("namespace", outer))


def _absolute(node: Any) -> Any:
    """Where it says no namespace it has none, whatever stands around it."""
    return {**node, "namespace": _space(node, "")} if isinstance(node, dict) and node.get("type") in _NAMED else node


def definitions(nodes: Iterable[Any]) -> list[dict[str, Any]]:
    """All records, enums and fixed that are defined inside these schemas."""
    found: list[dict[str, Any]] = []
    for node in nodes:
        if isinstance(node, dict):
            inside = [f["type"] for f in node.get("fields", ())] + [node[key] for key in ("type", "items", "values") if key in node]
            found += [*([node] if node.get("type") in _NAMED else []), *definitions(inside)]
        elif isinstance(node, list):
            found += definitions(node)
    return found
