"""Spark's schema, as a StructType, its JSON form or DDL text, as the Arrow schema of the decoded `data`.

A StructType is read through its `jsonValue()`, so that pyspark is not imported. A field that is not nullable (NOT NULL in DDL) must be
there: without it the body does not decode. A type without a lossless counterpart is refused, naming its path.
Called by dedup/decode/__init__.py when a consumer is made. Pure: pyarrow only.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, runtime_checkable

import pyarrow as pa

from checkpoint.errors import ConfigError

Json: TypeAlias = Mapping[str, Any]

_SCALARS = {
    "boolean": pa.bool_(),
    "byte": pa.int8(),
    "short": pa.int16(),
    "integer": pa.int32(),
    "long": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "string": pa.string(),
    "binary": pa.binary(),
    "date": pa.date32(),
    "timestamp": pa.timestamp("us", tz="UTC"),
    "timestamp_ntz": pa.timestamp("us"),
}
"""Names in Spark's JSON form."""

_DDL_NAMES = {
    "tinyint": "byte",
    "smallint": "short",
    "int": "integer",
    "bigint": "long",
    "real": "float",
    "timestamp_ltz": "timestamp",
    "dec": "decimal",
    "numeric": "decimal",
}
"""Names in DDL that the JSON form does not have."""

_DECIMAL = re.compile(r"decimal(?:\(([0-9]+),(-?[0-9]+)\))?")
_OTHERS = re.compile(r"(var)?char(acter)?\(|interval|variant|void|null|time\b|string |geometry|geography|udt")
"""Types of Spark's that have no counterpart."""

_TYPES = (
    "STRING, BOOLEAN, TINYINT, SMALLINT, INT, BIGINT, FLOAT, DOUBLE, DECIMAL(p, s), DATE, TIMESTAMP, TIMESTAMP_NTZ, BINARY (Avro), "
    "ARRAY<...>, MAP<STRING, ...>, STRUCT<name: ...>"
)
_INSTEAD = "Use STRING, and convert the value in the handler."


@runtime_checkable
class SparkSchema(Protocol):
    """A `pyspark.sql.types.StructType`."""

    def jsonValue(self) -> Any:
        """Its JSON form."""


def is_spark(schema: Json) -> bool:
    """Whether a schema object is the JSON form of a Spark type rather than an Avro schema or a JSON Schema."""
    return schema.get("type") == "struct"


def from_struct(schema: SparkSchema) -> pa.Schema:
    """The Arrow schema of a StructType. Raises ConfigError for another type of Spark's, and for a field without a counterpart."""
    form = schema.jsonValue() if not isinstance(schema, type) else None
    if not isinstance(form, Mapping) or not is_spark(form):
        raise ConfigError(f"A Spark schema is a StructType, not {schema!r}. For example: StructType([StructField('id', StringType())]).")
    return from_json(form)


def from_json(form: Json) -> pa.Schema:
    """The Arrow schema of the JSON form of a StructType. Raises ConfigError for a field without a counterpart."""
    try:
        return pa.schema(list(_struct(form, "$")))
    except (KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"The schema has the type 'struct' and is not what StructType.json() writes: {error!r}.") from error


def _type(node: Any, path: str) -> pa.DataType:
    if isinstance(node, Mapping):
        made = _NESTED.get(str(node.get("type")))
        if made is None:
            raise _refused(f"the type {node.get('type')!r}", path)
        return made(node, path)
    if node in _SCALARS:
        return _SCALARS[node]
    if found := _DECIMAL.fullmatch(str(node)):
        return _decimal(int(found[1] or 10), int(found[2] or 0), path)
    if _OTHERS.match(str(node)):
        raise _refused(f"the type {str(node).upper()}", path)
    raise ConfigError(f"Spark schema at {path}: {node} is not a type. Types are {_TYPES}.")


def _refused(what: str, path: str) -> ConfigError:
    return ConfigError(f"Spark schema at {path}: {what} has no lossless counterpart in decoded data. {_INSTEAD}")


def _decimal(precision: int, scale: int, path: str) -> pa.DataType:
    if not (1 <= precision <= 38 and 0 <= scale <= precision):
        raise ConfigError(f"Spark schema at {path}: decimal({precision},{scale}) does not fit into 38 digits.")
    return pa.decimal128(precision, scale)


def _struct(node: Json, path: str) -> pa.DataType:
    return pa.struct([_field(one, path) for one in node["fields"]])


def _field(node: Json, parent: str) -> pa.Field:
    path = f"{parent}.{node['name']}"
    if (node.get("metadata") or {}).get("__COLLATIONS"):
        raise _refused("a string with a collation", path)
    return pa.field(node["name"], _type(node["type"], path), node.get("nullable", True))


def _array(node: Json, path: str) -> pa.DataType:
    return pa.list_(pa.field("item", _type(node["elementType"], path + "[]"), node.get("containsNull", True)))


def _map(node: Json, path: str) -> pa.DataType:
    if node["keyType"] != "string":
        raise ConfigError(f"Spark schema at {path}: the keys of a JSON object are strings. Use MAP<STRING, ...>.")
    return pa.map_(pa.string(), pa.field("value", _type(node["valueType"], path + ".*"), node.get("valueContainsNull", True)))


_NESTED: dict[str, Callable[[Json, str], pa.DataType]] = {"struct": _struct, "array": _array, "map": _map}


# DDL text, to the JSON form. Spark's own parser needs a running session.

_TOKEN = re.compile(r"\s*(?:(?P<quoted>`(?:[^`]|``)*`)|(?P<text>'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\")|(?P<word>\w+)|(?P<sign>[<>(),:-]))")

_WORDS_OF_TYPES = ("collate", "year", "month", "day", "hour", "minute", "second", "to")


@dataclass(frozen=True)
class _Token:
    kind: str
    text: str


def from_ddl(text: str) -> pa.Schema:
    """The Arrow schema of DDL text, as `StructType.fromDDL` and `simpleString()` have it: `id STRING NOT NULL, at TIMESTAMP`.

    Raises:
        ConfigError: this is no DDL; or a field has no counterpart.
    """
    return from_json(_Ddl(text).schema())


class _Ddl:
    """Reads one DDL text from its start to its end."""

    def __init__(self, text: str) -> None:
        self.text, self.at = text, 0
        self.token = self._next()

    def schema(self) -> dict[str, Any]:
        whole = re.match(r"\s*struct\s*<", self.text, re.IGNORECASE)
        form: dict[str, Any] = self.type("$") if whole else {"type": "struct", "fields": self.fields("$", "")}
        if self.token.kind != "end":
            raise self.wrong("a comma or the end")
        return form

    def fields(self, path: str, end: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        while self.token.text != end or not end:
            found.append(self.field(path))
            if not self.take(","):
                break
        return found

    def field(self, parent: str) -> dict[str, Any]:
        name = self.name()
        self.take(":")
        kind, nullable = self.type(f"{parent}.{name}"), not self.take("not")
        if not nullable and not self.take("null"):
            raise self.wrong("NULL behind NOT")
        if self.take("comment"):
            self.one("text", "a comment in quotation marks")
        return {"name": name, "type": kind, "nullable": nullable}

    def name(self) -> str:
        if self.token.kind == "quoted":
            return self.one("quoted", "")[1:-1].replace("``", "`")
        return self.one("word", "the name of a field")

    def type(self, path: str) -> Any:
        word = self.one("word", "a type").lower()
        if word == "struct" and self.take("<"):
            return self.closed({"type": "struct", "fields": self.fields(path, ">")})
        if word == "array" and self.take("<"):
            return self.closed({"type": "array", "elementType": self.type(path + "[]")})
        if word == "map" and self.take("<"):
            return self.closed(self.map(path))
        numbers = self.numbers() if self.take("(") else ""
        kind = _DDL_NAMES.get(word, word)
        if kind == "decimal" and numbers and "," not in numbers:
            numbers = f"{numbers[:-1]},0)"
        found = " ".join([f"{kind}{numbers}", *self.words_of_type()])
        return (
            found if found in _SCALARS or _DECIMAL.fullmatch(found) or _OTHERS.match(found) else f"{word}{found.removeprefix(kind)}".upper()
        )

    def map(self, path: str) -> dict[str, Any]:
        key = self.type(path)
        if not self.take(","):
            raise self.wrong("a comma and the type of the values")
        return {"type": "map", "keyType": key, "valueType": self.type(path + ".*")}

    def closed(self, form: dict[str, Any]) -> dict[str, Any]:
        if not self.take(">"):
            raise self.wrong("'>'")
        return form

    def numbers(self) -> str:
        found = ""
        while not self.take(")"):
            if self.token.kind == "end":
                raise self.wrong("')'")
            found += self.advance()
        return f"({found})"

    def words_of_type(self) -> list[str]:
        """What belongs to a type behind its name: DAY TO SECOND of an interval, COLLATE and the collation's name."""
        found: list[str] = []
        while self.token.text.lower() in _WORDS_OF_TYPES or found == ["collate"]:
            found.append(self.advance().lower())
        return found

    def one(self, kind: str, what: str) -> str:
        if self.token.kind != kind:
            raise self.wrong(what)
        return self.advance()

    def take(self, text: str) -> bool:
        """Go past this sign or word, where it comes next."""
        if self.token.kind not in ("word", "sign") or self.token.text.lower() != text:
            return False
        self.advance()
        return True

    def advance(self) -> str:
        text = self.token.text
        self.token = self._next()
        return text

    def _next(self) -> _Token:
        if not self.text[self.at :].strip():
            return _Token("end", "the end")
        found = _TOKEN.match(self.text, self.at)
        if found is None:
            return _Token("unknown", self.text[self.at :].strip()[:20])
        self.at = found.end()
        return _Token(str(found.lastgroup), str(found[str(found.lastgroup)]))

    def wrong(self, what: str) -> ConfigError:
        return ConfigError(
            f"The schema is neither JSON nor DDL: {what} is expected where {self.token.text!r} stands, at character {self.at} of "
            f"{self.text[:200]!r}. For example: 'id STRING NOT NULL, amount DECIMAL(10, 2), items ARRAY<STRUCT<sku: STRING>>'."
        )
