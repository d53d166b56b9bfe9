"""Schema registries: where the schemas are that Avro bodies were written with, and how a body names its own.

`Confluent(url)` and `Azure(namespace, credential)` go into `decode.confluent_avro` and `decode.azure_avro`. They are descriptions:
picklable, without a connection, never shown with what they log in with. Schemas are kept for the life of the process
(dedup/schema_cache.py). Docs: docs/registries.md.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol
from urllib.parse import quote, urlsplit

from checkpoint import given
from checkpoint.errors import ConfigError, RegistryUnavailable
from dedup import avro_names
from dedup.http_get import Answer, get

NOT_AVRO = "null"
"""What stands for a schema that the registry has and that is not Avro's: nothing can be read by it."""

Framed = tuple[str, int]
"""The id of the schema, and where in the body the record begins."""


class Registry(Protocol):
    """What decoding needs of a registry. Hashable and picklable."""

    content_type: ClassVar[bool]  # whether `framed` looks at the content type

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
    "timeout": given.seconds("10.0", above=0),
}
"""What `registry.Confluent` takes beside its address."""

_AZURE: given.Settings = {
    "credential": given.function("that makes a token credential", "DefaultAzureCredential", 0),
    "timeout": given.seconds("10.0", above=0),
}
"""What `registry.Azure` takes beside its namespace."""


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
    timeout: float = 10.0
    """Seconds for one answer."""
    content_type: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _check(self.url)
        given.settle(_CONFLUENT, self)

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

    def _get(self, path: str) -> Answer:
        accept = "application/vnd.schemaregistry.v1+json, application/json"
        return get(self.url.rstrip("/") + path, {"Accept": accept, **self._login()}, self.timeout)

    def _login(self) -> dict[str, str]:
        if self.token is not None:
            return {"Authorization": f"Bearer {self.token}"}
        if self.user is None:
            return {}
        return {"Authorization": "Basic " + base64.b64encode(f"{self.user}:{self.password or ''}".encode()).decode()}

    def _schema(self, answer: Answer) -> str:
        told = _told(answer)
        if not isinstance(told.get("schema"), str):
            raise _nonsense(answer)
        if told.get("schemaType") not in (None, "AVRO"):
            return NOT_AVRO
        named = {str(one["name"]): self._version(one) for one in told.get("references") or ()}
        return avro_names.inlined(told["schema"], named) if named else told["schema"]

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
    timeout: float = 10.0
    """Seconds for one answer."""
    content_type: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _check(self._url)
        given.settle(_AZURE, self)

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

    def _get(self, path: str) -> Answer:
        return get(f"{self._url.rstrip('/')}{path}?api-version={_VERSION}", {"Authorization": f"Bearer {self._token()}"}, self.timeout)

    def _token(self) -> str:
        try:
            made = _credentials.get(self) or _credentials.setdefault(self, self.credential())
            return str(made.get_token(_SCOPE).token)
        except Exception as error:
            raise RegistryUnavailable(f"No token for the registry of {self.namespace}: {type(error).__name__}.") from error

    def _schema(self, answer: Answer) -> str:
        if answer.status != 200:
            raise _nonsense(answer)
        if "serialization=avro" not in answer.content_type.lower().replace(" ", ""):
            return NOT_AVRO
        return answer.body.decode("utf-8", "replace")


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


def _told(answer: Answer) -> dict[str, Any]:
    """The JSON object of a good answer. Raises RegistryUnavailable."""
    try:
        told = json.loads(answer.body) if answer.status == 200 else None
    except ValueError:
        told = None
    if not isinstance(told, dict):
        raise _nonsense(answer)
    return told


def _code(answer: Answer) -> object:
    """The registry's own code of what is wrong. A 404 without one may come from anybody, as where the address is wrong."""
    try:
        told = json.loads(answer.body)
        return told["error_code"] if "error_code" in told else told["error"]["code"]
    except (ValueError, LookupError, TypeError):
        return None


def _nonsense(answer: Answer) -> RegistryUnavailable:
    hint = {401: " Check the credentials.", 403: " Check its rights.", 404: " Is the address right?"}.get(answer.status, "")
    return RegistryUnavailable(f"The schema registry answers {answer.status} to {answer.url}, not a schema.{hint} Nothing was decided.")
