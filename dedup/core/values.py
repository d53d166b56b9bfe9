"""Python values as values of a sink's column: each by itself, to the sink's own type, whatever its neighbours are. Pure.

Promises that a conversion keeps the value, or is refused with the reason: nothing is cut, wrapped or guessed. Rounding to FLOAT is the one
exception. Both stores convert by this module, so that a value is the same in both. The rules for one value are in value_rules.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from deadletter.redact import redact
from dedup.core.value_rules import NO_LIMITS, RULES, ValueLimits, Wrong, is_flat, plainly

_SHOWN = 80
"""Characters of a value that a message shows."""

_ARROW = (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError, OverflowError, UnicodeEncodeError, ValueError)
_NONE = frozenset({type(None)})


@dataclass(frozen=True)
class Target:
    """The type of a column, or of a part of one, without the words of a store."""

    kind: str  # a name of RULES, or one of list, struct, map
    arrow: pa.DataType  # of the result
    shown: str  # as the store writes it
    nullable: bool = True
    limits: ValueLimits = NO_LIMITS
    no_null: str = "the column is NOT NULL"  # why not, where `nullable` is False
    parts: Mapping[str, Target] | None = None  # a list's element, a map's key and value, a struct's fields


class Fault(NamedTuple):
    """Why one row's value does not go into its column."""

    path: str  # column, or the place in it: address.city, tags.element
    value: str  # as a message may show it
    type: str  # its Python type
    shown: str  # type of the column
    why: str
    wanted: pa.DataType | None  # what would take the value

    def __str__(self) -> str:
        return f"column {self.path!r} is {self.shown}, and {self.value} ({self.type}) does not go into it: {self.why}"

    @property
    def brief(self) -> str:
        """The same without the value, and without numbers and texts that are made of it."""
        return f"{self.path} ({self.shown}): {re.sub('[0-9]+', '?', self.why.partition(' (')[0])}"


Faults = dict[int, Fault]
"""By row."""


def convert(values: Sequence[Any], target: Target, path: str) -> tuple[pa.Array, Faults]:
    """The values of one column as an array of the target's type, and what is wrong, by row; such a row is null.

    Args:
        path: of the column, for messages.
    """
    array, faults = _NESTED.get(target.kind, _leaf)(values, target, path)
    if not target.nullable and array.null_count:
        for row in _nulls(array):
            faults.setdefault(row, _fault(None, target, path, Wrong(target.no_null)))
    return array, faults


def _nulls(array: pa.Array) -> list[int]:
    return [row for row, null in enumerate(array.is_null().to_pylist()) if null]


def _leaf(values: Sequence[Any], target: Target, path: str) -> tuple[pa.Array, Faults]:
    rule = RULES[target.kind]
    if set(map(type, values)) - _NONE <= rule.safe and rule.alike(values):
        try:
            array = pa.array(values, target.arrow)
        except _ARROW:
            pass  # one of them does not fit, or only value by value
        else:
            if rule.holds(array, target.limits):
                return array, {}
    made, faults = _each(values, target, path)
    array, unbuilt = _built(made, values, target, path)
    return array, {**unbuilt, **faults}


def _each(values: Sequence[Any], target: Target, path: str) -> tuple[list[Any], Faults]:
    """Value by value."""
    one, made, faults = RULES[target.kind].one, [], Faults()
    for row, value in enumerate(values):
        try:
            plain = plainly(value)
            made.append(None if plain is None else one(plain, target.arrow, target.limits))
        except Exception as error:  # noqa: BLE001 - values may be of any class, and run code of their own
            faults[row] = _fault(value, target, path, _wrong(error))
            made.append(None)
    return made, faults


def _built(made: list[Any], values: Sequence[Any], target: Target, path: str) -> tuple[pa.Array, Faults]:
    """What the rule makes of converted values; one that Arrow does not take after all is that row's fault."""
    build = RULES[target.kind].build
    try:
        return build(made, target.arrow), {}
    except _ARROW:
        faults = {row: _fault(values[row], target, path, wrong) for row in range(len(made)) if (wrong := _unbuilt(made[row], target))}
    return build([None if row in faults else one for row, one in enumerate(made)], target.arrow), faults


def _unbuilt(one: Any, target: Target) -> Wrong | None:
    try:
        RULES[target.kind].build([one], target.arrow)
    except _ARROW as error:
        return _wrong(error)
    return None


def _wrong(error: Exception) -> Wrong:
    if isinstance(error, Wrong):
        return error
    return Wrong(f"it cannot be converted ({type(error).__name__}: {redact(_said(error))[:_SHOWN]})")


def _said(error: Exception) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - it may be of a class of the value's
        return ""


def _list(values: Sequence[Any], target: Target, path: str) -> tuple[pa.Array, Faults]:
    lists, faults = _opened(values, _LISTS, _as_list, target, path)
    items, inner = convert(_joined(lists), (target.parts or {})["element"], f"{path}.element")
    _to_parents(inner, lists, faults)
    return pa.ListArray.from_arrays(_offsets(lists), items, type=target.arrow), faults


def _map(values: Sequence[Any], target: Target, path: str) -> tuple[pa.Array, Faults]:
    maps, faults = _opened(values, _NO_TYPE, _as_pairs, target, path)
    parts, pairs = target.parts or {}, _joined(maps)
    keys, wrong_keys = convert([key for key, _ in pairs], parts["key"], f"{path}.key")
    items, wrong_items = convert([item for _, item in pairs], parts["value"], f"{path}.value")
    _to_parents(wrong_keys, maps, faults)
    _to_parents(wrong_items, maps, faults)
    if faults:
        return pa.nulls(len(values), target.arrow), faults
    for row, own in enumerate(_split(keys.to_pylist(), maps)):  # two keys may become one: 1.0 and Decimal(1) of a column of numbers
        if len(own) > 1 and len(set(map(repr, own))) < len(own):
            faults[row] = _fault(values[row], target, path, Wrong("a key comes twice"))
    return pa.MapArray.from_arrays(_offsets(maps), keys, items, type=target.arrow), faults


def _struct(values: Sequence[Any], target: Target, path: str) -> tuple[pa.Array, Faults]:
    parts = target.parts or {}
    if set(map(type, values)) <= _DICT and all(map(frozenset(parts).issuperset, values)):
        dicts, faults = list(values), Faults()
    else:
        dicts, faults = _opened(values, _NO_TYPE, lambda value: _as_dict(value, parts), target, path)
    there = [row for row, one in enumerate(dicts) if one is not None]
    given = dicts if len(there) == len(dicts) else [dicts[row] for row in there]
    place = None if given is dicts else _places(dicts)
    arrays = []
    for name, part in parts.items():
        array, inner = convert([one.get(name) for one in given], part, f"{path}.{name}")
        faults |= {there[row]: fault for row, fault in inner.items() if there[row] not in faults}
        arrays.append(array if place is None else array.take(place))
    mask = None if place is None else pa.array([one is None for one in dicts])
    return pa.StructArray.from_arrays(arrays, fields=list(target.arrow), mask=mask), faults


_NO_TYPE: frozenset[type] = frozenset()
_LISTS: frozenset[type] = frozenset({list, tuple})
_DICT: frozenset[type] = frozenset({dict})

_NESTED = {"list": _list, "map": _map, "struct": _struct}


def _opened(values: Sequence[Any], known: frozenset[type], opener: Any, target: Target, path: str) -> tuple[list[Any], Faults]:
    """Lists, pairs or dicts, without what is none; null where the value is.

    Args:
        known: types of which all values are right.
    """
    if set(map(type, values)) - _NONE <= known:
        return list(values), Faults()
    made, faults = [], Faults()
    for row, value in enumerate(values):
        try:
            made.append(None if value is None or (plain := plainly(value)) is None else opener(plain))
        except Exception as error:  # noqa: BLE001 - as above
            faults[row] = _fault(value, target, path, _wrong(error))
            made.append(None)
    return made, faults


def _as_list(value: Any) -> Sequence[Any]:
    if isinstance(value, list | tuple):
        return value
    raise Wrong("a list or a tuple is needed")


def _as_pairs(value: Any) -> list[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, list | tuple) and all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in value):
        return [(key, item) for key, item in value]
    raise Wrong("a dict or a list of pairs is needed")


def _as_dict(value: Any, parts: Mapping[str, Target]) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise Wrong("a dict is needed")
    if unknown := [str(name) for name in value if name not in parts]:
        raise Wrong(f"it has no field {', '.join(unknown)}")
    return value


def _joined(lists: Sequence[Any]) -> list[Any]:
    return list(chain.from_iterable(one for one in lists if one is not None))


def _offsets(lists: Sequence[Any]) -> pa.Array:
    """Where each list begins, null for one that is null; and the end of the last one."""
    sizes = np.fromiter((0 if one is None else len(one) for one in lists), np.int64, len(lists))
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
    return pa.array(offsets, mask=np.array([*(one is None for one in lists), False]))


def _places(dicts: Sequence[Any]) -> pa.Array:
    places, at = [], 0
    for one in dicts:
        places.append(None if one is None else at)
        at += one is not None
    return pa.array(places, pa.int64())


def _to_parents(inner: Faults, lists: Sequence[Any], faults: Faults) -> None:
    """What is wrong with items is wrong with the row that holds them."""
    if not inner:
        return
    rows = [row for row, one in enumerate(lists) if one is not None for _ in one]
    for item, fault in inner.items():
        faults.setdefault(rows[item], fault)


def _split(items: Sequence[Any], lists: Sequence[Any]) -> Iterator[Sequence[Any]]:
    at = 0
    for one in lists:
        size = 0 if one is None else len(one)
        yield items[at : at + size]
        at += size


def _fault(value: Any, target: Target, path: str, wrong: Wrong) -> Fault:
    return Fault(path, shown(value), type(value).__name__, target.shown, str(wrong), wrong.wanted or _inferred(value))


def shown(value: Any) -> str:
    """A value as a message may show it: short, and without secrets."""
    try:
        text = redact(repr(value)[: 10 * _SHOWN])
    except Exception:  # noqa: BLE001 - whatever the value's own code does
        return "a value that cannot be shown"
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."


def _inferred(value: Any) -> pa.DataType | None:
    """The Arrow type of one value."""
    try:
        return pa.array([value]).type if value is not None and is_flat(value) else None
    except Exception:  # noqa: BLE001 - Arrow asks the value, which may be of any class
        return None
