"""Whole objects of object storage, one request each and several at once: what delta-rs's file system needs two or three for.

Promises that the same settings lead to the same place as delta-rs's: both stand on the crate object_store. A client is kept, with its
connections, for as long as the settings stay. No call holds the GIL while it waits. Called by `storage`, for URIs that are not local; and
by `snapshot`, which creates log entries on a local disk, too: there as well one of several writers of one name wins.

Source of the settings: docs.rs/object_store (AmazonS3ConfigKey, AzureConfigKey, GoogleConfigKey, ClientConfigKey), read 2026-11.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlparse

import obstore
import pyarrow as pa
from obstore.exceptions import AlreadyExistsError, BaseError, UnknownConfigurationKeyError
from obstore.store import LocalStore, from_url

T = TypeVar("T")
R = TypeVar("R")

AT_ONCE = 16
"""Requests at the same time."""

_CLIENT = frozenset(
    {
        *("allow_http", "allow_invalid_certificates", "connect_timeout", "http1_only", "http2_only", "pool_idle_timeout"),
        *("pool_max_idle_per_host", "proxy_url", "proxy_ca_certificate", "proxy_excludes", "timeout", "user_agent"),
    }
)
"""Settings of the connection, with or without the prefix of a cloud."""

_PAUSES = {"retry_timeout": "retry_timeout", "backoff_config.init_backoff": "init_backoff", "backoff_config.max_backoff": "max_backoff"}
_RETRY = frozenset({"max_retries", "backoff_config.base", *_PAUSES})
"""Settings of further tries, as delta-rs names them."""

_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|secs?|seconds?|m|mins?|minutes?)")
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0}

_PREFIX = re.compile(r"^(aws|azure|google)_")
_PREFIXES = ("AWS_", "AZURE_", "GOOGLE_")
_KEY = re.compile(r"Configuration key: '([^']+)'")

_PROFILES = {"AWS_SHARED_CREDENTIALS_FILE": "~/.aws/credentials", "AWS_CONFIG_FILE": "~/.aws/config"}
"""Variable -> where profiles are without it."""

_IDENTITY = ("aws_access_key_id", "access_key_id", "aws_web_identity_token_file", "aws_container_credentials_relative_uri")
"""What says who asks on AWS, where no profile does."""


class Stat(NamedTuple):
    """What the storage says of an object. One that was written again has another tag, or another time."""

    size: int  # bytes
    modified: float  # seconds since 1970, by the clock of the storage
    tag: str | None

    def same(self, other: Stat | None) -> bool:
        """Whether both are of the very same object."""
        if other is None or self.size != other.size:
            return False
        return self.tag == other.tag if self.tag and other.tag else self.modified == other.modified


def usable(uri: str, options: Mapping[str, str] | None) -> bool:
    """Whether this client knows who asks: delta-rs alone reads the profiles of the AWS command line."""
    if urlparse(uri).scheme not in ("s3", "s3a"):
        return True
    given = {name.lower() for name in (*(options or {}), *os.environ)}
    files = (os.environ.get(variable, usual) for variable, usual in _PROFILES.items())
    profiles = "aws_profile" in given or any(Path(file).expanduser().exists() for file in files)
    return not profiles or not given.isdisjoint(_IDENTITY)


def put(uri: str, options: Mapping[str, str] | None, path: str, content: pa.Buffer) -> None:
    """Write an object, a large one in parts. Raises OSError.

    Crash: the object is there, whole, or not.
    """
    with _told():
        obstore.put(_client(uri, options), path, memoryview(content).cast("B") if content.size else b"")


def create(uri: str, options: Mapping[str, str] | None, path: str, content: bytes) -> str | None:
    """Write an object where there is none, and return its tag; None where there is one. Raises OSError.

    Crash: the object is there, whole, or not. Where the answer is lost it may be there, and a second try of the client finds it.
    """
    with _told():
        try:
            made = obstore.put(_client(uri, options), path, content, mode="create", use_multipart=False)
        except AlreadyExistsError:
            return None
    return made["e_tag"] or ""


def get(uri: str, options: Mapping[str, str] | None, path: str) -> pa.Buffer | None:
    """The content of an object; None where there is none. Raises OSError."""
    with _told():
        try:
            return pa.py_buffer(obstore.get(_client(uri, options), path).bytes())
        except FileNotFoundError:
            return None


def stats(uri: str, options: Mapping[str, str] | None, paths: Sequence[str]) -> list[Stat | None]:
    """Of each of these objects; None for one that is not there. One request each, all at once. Raises OSError."""
    client = _client(uri, options)
    return at_once(lambda path: _stat(client, path), paths)


def listed(uri: str, options: Mapping[str, str] | None, below: str | None = None) -> dict[str, Stat]:
    """Path -> what the storage says of it, of all objects, or of those below a folder; one request for each thousand. Raises OSError."""
    with _told():
        return {str(one["path"]): _of(one) for one in obstore.list(_client(uri, options), below).collect()}


def gets(uri: str, options: Mapping[str, str] | None, paths: Sequence[str]) -> list[pa.Buffer | None]:
    """`get` of each of these, all at once. Raises OSError."""
    return at_once(lambda path: get(uri, options, path), paths)


def delete(uri: str, options: Mapping[str, str] | None, paths: Sequence[str]) -> None:
    """Delete objects; those that are not there are no error. Raises OSError."""
    with _told(), contextlib.suppress(FileNotFoundError):
        obstore.delete(_client(uri, options), paths[0] if len(paths) == 1 else list(paths))


def _stat(client: Any, path: str) -> Stat | None:
    with _told():
        try:
            found = obstore.head(client, path)
        except FileNotFoundError:
            return None
    return _of(found)


def _of(found: Any) -> Stat:
    return Stat(int(found["size"]), found["last_modified"].timestamp(), found["e_tag"])


def at_once(do: Callable[[T], R], each: Sequence[T]) -> list[R]:
    """What a function gives for each of these, in their order: calls that wait for requests, AT_ONCE of them at the same time."""
    if len(each) < 2:
        return [do(one) for one in each]
    with ThreadPoolExecutor(min(len(each), AT_ONCE)) as pool:
        return list(pool.map(do, each))


@contextlib.contextmanager
def _told() -> Iterator[None]:
    """Raises OSError in place of what the library raises, without what only its authors can read."""
    try:
        yield
    except BaseError as error:
        raise OSError(str(error).partition("\n\nDebug source")[0]) from error


def _client(uri: str, options: Mapping[str, str] | None) -> Any:
    around = tuple(sorted((name, value) for name, value in os.environ.items() if name.startswith(_PREFIXES)))
    with _told():
        try:
            return _made(uri, tuple(sorted((options or {}).items())), around)
        except ValueError as error:
            raise OSError(f"A setting of the storage is wrong: {error}") from error


@lru_cache(maxsize=64)
def _made(uri: str, options: tuple[tuple[str, str], ...], around: tuple[tuple[str, str], ...]) -> Any:
    """The client of a place: like delta-rs, it passes over settings that it does not know."""
    if uri.startswith("/"):
        return LocalStore(uri)
    given = {name.lower(): str(value) for name, value in options}
    client: Any = _of_connection(around) | _of_connection(options)  # the library takes those of the environment only if none is given
    config: Any = {name: value for name, value in given.items() if _PREFIX.sub("", name) not in _CLIENT | _RETRY}
    while True:
        try:
            return from_url(uri, config=config, client_options=client or None, retry_config=_retry(given))
        except UnknownConfigurationKeyError as error:
            unknown = _KEY.search(str(error))
            if unknown is None or config.pop(unknown[1], None) is None:
                raise


def _of_connection(settings: Iterable[tuple[str, str]]) -> dict[str, str]:
    plain = ((_PREFIX.sub("", name.lower()), str(value)) for name, value in settings)
    return {name: value for name, value in plain if name in _CLIENT}


def _retry(given: Mapping[str, str]) -> Any:
    """How often a request is tried again; None for the library's own way, which delta-rs has, too."""
    pauses = {to: _duration(given[name]) for name, to in _PAUSES.items() if name in given}
    backoff: dict[str, Any] = {name: pauses.pop(name) for name in ("init_backoff", "max_backoff") if name in pauses}
    if "backoff_config.base" in given:
        backoff["base"] = float(given["backoff_config.base"])
    tries = {"max_retries": int(given["max_retries"])} if "max_retries" in given else {}
    return {**tries, **pauses, **({"backoff": backoff} if backoff else {})} or None


def _duration(text: str) -> dt.timedelta:
    found = _DURATION.fullmatch(text.strip().lower())
    if found is None:
        raise OSError(f"{text!r} is no duration. Write a number and its unit: 500ms, 30s or 5m.")
    return dt.timedelta(seconds=float(found[1]) * _UNITS["ms" if found[2] == "ms" else found[2][0]])
