"""Schema registries: where the schemas are that Avro bodies were written with, and how a body names its own.

`Confluent(url)` and `Azure(namespace, credential)` go into `decode.confluent_avro` and `decode.azure_avro`. They are descriptions:
picklable, without a connection, never shown with what they log in with. Schemas are kept for the life of the process.
Docs: docs/how-to/registries.md.

The vendors' own clients do not keep what the docs promise. That of Confluent (confluent_kafka 2.16) takes a bearer token only together with
the id of a cluster of Confluent's, which it sends along, does not remember ids that are not known, and needs four more packages. That of
Azure (azure-schemaregistry 1.3) cannot be asked for the latest version of a schema.
"""

from __future__ import annotations

import base64
import http.client
import json
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, TypeVar
from urllib.parse import quote, urlsplit

from checkpoint import given
from checkpoint.errors import ConfigError, RegistryUnavailable
from dedup.decode import schemas

NOT_AVRO = "null"
"""What stands for a schema that the registry has and that is not Avro's: nothing can be read by it."""

Framed = tuple[str, int]
"""The id of the schema, and where in the body the record begins."""


class Registry(Protocol):
    """What decoding needs of a registry. Hashable and picklable."""

    content_type: ClassVar[bool]  # whether `framed` looks at the content type
    unframed: ClassVar[str]  # what is wrong with a body that `framed` finds no schema of

    def framed(self, body: bytes, content_type: bytes | None) -> Framed | None:
        """Which schema a body was written with; None where it does not say so as this registry's producers do."""

    def written(self, ident: str) -> str | None:
        """JSON text of this schema, NOT_AVRO, or None where the registry has no such id. Raises RegistryUnavailable."""

    def latest(self, subject: str) -> str:
        """JSON text of a subject's latest schema. Raises ConfigError where there is none, RegistryUnavailable."""


_CONFLUENT: given.Settings = {
    "user": given.text("who", '"reader"').or_none,
    "password": given.text("a password", '"..."').or_none.hidden,
    "token": given.text("a bearer token", '"..."').or_none.hidden,
    "timeout": given.duration("10.0", above=0),
}
"""What `Confluent` takes beside its address."""

_AZURE: given.Settings = {
    "credential": given.function("that makes a token credential", "DefaultAzureCredential", 0),
    "timeout": given.duration("10.0", above=0),
}
"""What `Azure` takes beside its namespace."""


@dataclass(frozen=True)
class Confluent:
    """A registry with Confluent's interface: Confluent's own, Karapace, Redpanda, Apicurio under `/apis/ccompat/v7`.

    Raises:
        ConfigError: no http or https, or credentials in the address.
    """

    url: str
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    token: str | None = field(default=None, repr=False)
    """Bearer token, in place of user and password."""
    timeout: given.Duration = 10.0
    """Seconds for one answer."""
    content_type: ClassVar[bool] = False
    unframed: ClassVar[str] = "does not begin with a zero byte and the id of a schema in four bytes"

    def __post_init__(self) -> None:
        _check(self.url)
        given.check_fields(_CONFLUENT, self)

    def framed(self, body: bytes, content_type: bytes | None) -> Framed | None:
        """From the five bytes before the record: zero, and the id in big-endian order."""
        if len(body) < 5 or body[0] != 0 or body[1] > 127:  # ids are positive ints of Java
            return None
        return str(int.from_bytes(body[1:5], "big")), 5

    def written(self, ident: str) -> str | None:
        """As in Registry."""
        answer = self._get(f"/schemas/ids/{ident}")
        return None if answer.status == 404 and _code(answer) == 40403 else self._schema(answer)

    def latest(self, subject: str) -> str:
        """As in Registry."""
        answer = self._get(f"/subjects/{quote(subject, safe='')}/versions/latest")
        if answer.status == 404 and _code(answer) in (40401, 40402):
            raise ConfigError(f"The registry at {self.url} has no subject {subject!r}.")
        return self._schema(answer)

    def _get(self, path: str) -> _Answer:
        accept = "application/vnd.schemaregistry.v1+json, application/json"
        return _get(self.url.rstrip("/") + path, {"Accept": accept, **self._login()}, given.to_seconds(self.timeout))

    def _login(self) -> dict[str, str]:
        if self.token is not None:
            return {"Authorization": f"Bearer {self.token}"}
        if self.user is None:
            return {}
        return {"Authorization": "Basic " + base64.b64encode(f"{self.user}:{self.password or ''}".encode()).decode()}

    def _schema(self, answer: _Answer) -> str:
        told = _told(answer)
        if not isinstance(told.get("schema"), str):
            raise _nonsense(answer)
        if told.get("schemaType") not in (None, "AVRO"):
            return NOT_AVRO
        named = {str(one["name"]): self._version(one) for one in told.get("references") or ()}
        return _inlined(told["schema"], named) if named else told["schema"]

    def _version(self, reference: dict[str, Any]) -> str:
        subject, version = quote(str(reference["subject"]), safe=""), quote(str(reference["version"]), safe="")
        return self._schema(self._get(f"/subjects/{subject}/versions/{version}?deleted=true"))


@dataclass(frozen=True)
class Azure:
    """The schema registry of an Event Hubs namespace.

    Args:
        namespace: its host name, `shop.servicebus.windows.net`.
        credential: makes what logs in, where it is needed: `DefaultAzureCredential` itself, or a function of a module.

    Raises:
        ConfigError: the name is none, or the credential cannot be called.
    """

    namespace: str
    credential: Callable[[], Any] = field(repr=False)
    timeout: given.Duration = 10.0
    """Seconds for one answer."""
    content_type: ClassVar[bool] = True
    unframed: ClassVar[str] = "has no content type avro/binary+<id of a schema>, and does not begin with such an id"

    def __post_init__(self) -> None:
        _check(self._url)
        given.check_fields(_AZURE, self)

    @property
    def _url(self) -> str:
        return self.namespace if "://" in self.namespace else f"https://{self.namespace}"

    def framed(self, body: bytes, content_type: bytes | None) -> Framed | None:
        """From the content type or, as the first clients did, from four zero bytes and the id before the record."""
        if content_type is not None and (found := _CONTENT_TYPE.fullmatch(content_type)):
            return found[1].decode().lower(), 0
        found = _PREFIX.match(body)
        return None if found is None else (found[1].decode().lower(), found.end())

    def written(self, ident: str) -> str | None:
        """As in Registry."""
        answer = self._get(f"/$schemaGroups/$schemas/{ident}")
        return None if answer.status == 404 and _code(answer) == "ItemNotFound" else self._schema(answer)

    def latest(self, subject: str) -> str:
        """As in Registry; the subject is `group/name`."""
        group, _, name = subject.partition("/")
        versions = f"/$schemaGroups/{quote(group, safe='')}/schemas/{quote(name, safe='')}/versions"
        answer = self._get(versions)
        if answer.status == 404 and _code(answer) == "ItemNotFound":
            raise ConfigError(f"The registry of {self.namespace} has no schema {subject!r}; it is named as group/name.")
        told = {key.lower(): value for key, value in _told(answer).items()}
        numbers = told.get("value") or told.get("schemaversions")
        if not isinstance(numbers, list):
            raise _nonsense(answer)
        return self._schema(self._get(f"{versions}/{max(map(int, numbers))}"))

    def _get(self, path: str) -> _Answer:
        url = f"{self._url.rstrip('/')}{path}?api-version={_VERSION}"
        return _get(url, {"Authorization": f"Bearer {self._token()}"}, given.to_seconds(self.timeout))

    def _token(self) -> str:
        try:
            made = _credentials.get(self) or _credentials.setdefault(self, self.credential())
            return str(made.get_token(_SCOPE).token)
        except Exception as error:
            raise RegistryUnavailable(
                f"The credential gives no token for the registry of {self.namespace}: {type(error).__name__}. Check it."
            ) from error

    def _schema(self, answer: _Answer) -> str:
        kind = answer.content_type.lower().replace(" ", "")
        if answer.status == 200 and "serialization=avro" in kind and _is_schema(answer.body):
            return answer.body.decode()
        other = "serialization=" in kind and "serialization=avro" not in kind
        if answer.status == 200 and (other or answer.of_schema):
            return NOT_AVRO
        raise _nonsense(answer)  # a gateway's page may come with 200, too


_VERSION, _SCOPE = "2022-10", "https://eventhubs.azure.net/.default"
_CONTENT_TYPE = re.compile(rb"avro/binary\+([0-9a-fA-F]{32})")
_PREFIX = re.compile(rb"\x00{4}([0-9a-fA-F]{32})")
_credentials: dict[Azure, Any] = {}  # of this process: they keep their tokens


def _check(url: str) -> None:
    parts = urlsplit(url)
    if parts.username is not None or parts.password is not None:
        raise ConfigError("The address of a registry must not hold credentials; give them as user= and password=.")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"The address of a registry begins with http:// or https:// and a host, not as {url!r}.")


def _told(answer: _Answer) -> dict[str, Any]:
    """The JSON object of a good answer. Raises RegistryUnavailable."""
    try:
        told = json.loads(answer.body) if answer.status == 200 else None
    except ValueError:
        told = None
    if not isinstance(told, dict):
        raise _nonsense(answer)
    return told


def _is_schema(body: bytes) -> bool:
    """Whether it is the JSON of something that may be an Avro schema."""
    try:
        return isinstance(json.loads(body.decode()), dict | list | str)
    except (ValueError, RecursionError):
        return False


def _code(answer: _Answer) -> object:
    """The registry's own code of what is wrong. A 404 without one may come from anybody, as where the address is wrong."""
    try:
        told = json.loads(answer.body)
        return told["error_code"] if "error_code" in told else told["error"]["code"]
    except (ValueError, LookupError, TypeError):
        return None


def _nonsense(answer: _Answer) -> RegistryUnavailable:
    hint = {401: " Check the credentials.", 403: " Check its rights.", 404: " Is the address right?"}.get(answer.status, "")
    return RegistryUnavailable(f"The schema registry answers {answer.status} to {answer.url}, not a schema.{hint} Nothing was decided.")


# What a registry has said, kept for the life of the process: ids are immutable, so a schema is asked for once. An id that is not known is
# asked for again after a while: its schema may still be on the way.

UNKNOWN_SECONDS = 30.0
"""How long an id counts as unknown."""

MOST_IDS = 10_000
"""Ids that are kept, known ones and unknown ones each: bodies that are noise may name any number."""

Key = tuple[Registry, str]
T = TypeVar("T")

_known: dict[Key, str] = {}
_unknown: dict[Key, float] = {}  # until when


def schema_of(registry: Registry, ident: str) -> str | None:
    """As `registry.written`, from what is kept where it can. Raises RegistryUnavailable, and then keeps nothing."""
    key = (registry, ident)
    if key in _known:
        return _known[key]
    if _unknown.get(key, 0.0) > time.monotonic():
        return None
    _unknown.pop(key, None)
    found = registry.written(ident)
    if found is not None:
        return _put(_known, key, found)
    _put(_unknown, key, time.monotonic() + UNKNOWN_SECONDS)
    return None


def _put(kept: dict[Key, T], key: Key, value: T) -> T:
    if len(kept) >= MOST_IDS:
        kept.clear()
    return kept.setdefault(key, value)


def forget() -> None:
    """Ask anew for everything."""
    _known.clear()
    _unknown.clear()


# Asking: one GET, by the standard library.

MOST_BYTES = 16 * 1024 * 1024
"""Bytes of an answer that are read at most."""


@dataclass(frozen=True)
class _Answer:
    """What a server said."""

    url: str
    status: int
    body: bytes = field(repr=False)
    content_type: str = ""
    of_schema: bool = False
    """Whether it has the header by which Azure's registry names the schema, as it does for custom and Protobuf ones as well."""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect is an answer like any other: following it would hand the credentials to whomever it names."""

    def redirect_request(self, *_: Any) -> None:
        """Never."""


def _get(url: str, headers: dict[str, str], timeout: float) -> _Answer:
    """Ask once. Proxies and certificates are those of the environment (`HTTPS_PROXY`, `SSL_CERT_FILE`).

    Args:
        timeout: seconds for each part of the answer to come.

    Raises:
        RegistryUnavailable: no answer or not all of it, or one that says to come back later (5xx, 408, 429). Never tells the headers.
    """
    try:
        with _open(urllib.request.Request(url, headers=headers), timeout) as response:
            told = response.headers
            found = _Answer(url, response.status, _whole(response), told.get("Content-Type", ""), "Schema-Id" in told)
    except (OSError, http.client.HTTPException, ValueError) as error:
        said = getattr(error, "reason", None) or error
        raise RegistryUnavailable(
            f"The schema registry cannot be reached at {url}: {type(error).__name__}: {said}. Nothing was decided."
        ) from error
    if found.status >= 500 or found.status in (408, 429):
        raise RegistryUnavailable(f"The schema registry answers {found.status} to {url}. Nothing was decided.")
    return found


def _whole(response: Any) -> bytes:
    """The body. Raises HTTPException where the connection ended within it, and where it is larger than MOST_BYTES."""
    body: bytes = response.read(MOST_BYTES + 1)
    if len(body) > MOST_BYTES:
        raise http.client.HTTPException(f"the answer has more than {MOST_BYTES:,} bytes")
    if response.length:  # bytes that were announced and did not come: `read` of a number of bytes does not raise for them
        raise http.client.IncompleteRead(body, response.length)
    return body


def _open(request: urllib.request.Request, timeout: float) -> Any:
    try:
        return urllib.request.build_opener(_NoRedirect).open(request, timeout=timeout)
    except urllib.error.HTTPError as answer:  # is the response of a status that is not 200
        return answer


# References: definitions that stand elsewhere are put where they are used first. fastavro takes them as `named_schemas`, but looks for a
# name in the namespace it is used in alone; the producers' own library then looks for it without one. And `written` has to be one text.


def _inlined(schema: str, others: Mapping[str, str]) -> str:
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
        found = next((name for name in (schemas.full_name(node, space), node) if name in left and name not in done), None)
        return node if found is None else _with(left.pop(found), "", left, done)
    if isinstance(node, list):
        return [_with(one, space, left, done) for one in node]
    if not isinstance(node, dict):
        return node
    if node.get("type") in schemas.NAMED:
        space = schemas.space_of(node, space)
        if (name := schemas.full_name(str(node["name"]).rpartition(".")[2], space)) in done:
            return name
        done.add(name)
    fields = {"fields": [{**f, "type": _with(f["type"], space, left, done)} for f in node["fields"]]} if "fields" in node else {}
    inside = {key: _with(node[key], space, left, done) for key in ("type", "items", "values") if key in node}
    return {**node, **inside, **fields}
