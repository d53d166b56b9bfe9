"""Where tables and files live: names, URIs, file systems, and which storage can decide between two writers.

Promises that a folder of a consumer is named reversibly, and that storage without put-if-absent is refused before anything is written.
Called by everything in this package that touches a file.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

import pyarrow as pa
import pyarrow.fs as pafs
from deltalake.fs import DeltaStorageHandler

from checkpoint.errors import ConfigError, StoreUnavailable
from deadletter.classify import classify
from deadletter.known import ErrorClass
from deadletter.redact import redact
from dedup.delta import objects
from dedup.delta.objects import Stat

log = logging.getLogger("dedup")

DELTA_RS, SPARK = "delta-rs", "spark"
"""Who commits to Delta tables."""

StorageOptions = Mapping[str, str] | None


AGAIN, SOON = 300.0, 30.0
"""Seconds after which a function of options is asked again; after which, where it raised that time."""


class OptionsOf(Mapping[str, str]):
    """Options that a function returns: each process asks it, and again every AGAIN seconds, because a token expires.

    No pickle carries what it returned. Where it raises later, what it returned last goes on: it may be valid for a while.

    Args:
        ask: the function.
    """

    def __init__(self, ask: Callable[[], Mapping[str, str]]) -> None:
        self._ask, self._known, self._until = ask, dict[str, str](), 0.0

    def __getitem__(self, name: str) -> str:
        return self._all()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())

    def __getstate__(self) -> dict[str, Any]:
        return {"_ask": self._ask, "_known": {}, "_until": 0.0}

    def __repr__(self) -> str:
        return "options of a function"

    def _all(self) -> dict[str, str]:
        """Raises StoreUnavailable where the function raises and never gave any, ConfigError where it returns something else."""
        if time.monotonic() >= self._until:
            self._known, self._until = self._asked()
        return self._known

    def _asked(self) -> tuple[dict[str, str], float]:
        try:
            found = self._ask()
        except Exception as error:
            told = f"The function of storage_options= raised {type(error).__name__}: {redact(str(error))[:500]}."
            if not self._until:
                raise StoreUnavailable(f"{told} Nothing was committed.") from error
            log.warning("%s What it returned last is used for %.0f seconds more.", told, SOON)
            return self._known, time.monotonic() + SOON
        if not isinstance(found, Mapping) or not all(isinstance(one, str) for pair in found.items() for one in pair):
            raise ConfigError("The function of storage_options= has to return a dict of texts.")
        return dict(found), time.monotonic() + AGAIN


def options_of(given: Mapping[str, str] | Callable[[], Mapping[str, str]] | None) -> StorageOptions:
    """What a store was given as `storage_options=`."""
    return OptionsOf(given) if callable(given) else dict(given) if given else None


_ATOMIC = frozenset({"file", "az", "azure", "abfs", "abfss", "adl", "gs"})
"""Schemes whose put-if-absent needs no setting.

Source: https://delta-io.github.io/delta-rs/usage/writing/ and docs.rs/object_store (PutMode::Create), read 2025-06.
"""

_AWAY = re.compile(r"Generic (?!DeltaTable\b)\w+ error|No space left on device")
"""How delta-rs tells of it. A "Generic DeltaTable error" is a computation's, unless it holds one of the others.

Source: https://docs.rs/object_store/latest/object_store/enum.Error.html, read 2026-11.
"""

_AZURE = (
    "AZURE_STORAGE_ACCOUNT_NAME and one of AZURE_STORAGE_ACCOUNT_KEY, AZURE_STORAGE_SAS_KEY, or AZURE_STORAGE_CLIENT_ID with "
    "AZURE_STORAGE_CLIENT_SECRET and AZURE_STORAGE_TENANT_ID"
)
_CREDENTIALS = {
    **dict.fromkeys(("az", "azure", "abfs", "abfss", "adl"), _AZURE),
    **dict.fromkeys(("s3", "s3a"), "AWS_REGION, AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"),
    "gs": "GOOGLE_SERVICE_ACCOUNT (the path of a key file)",
}
"""Scheme -> what delta-rs reads of the environment. Source: docs.rs/object_store, AzureConfigKey, AmazonS3ConfigKey and GoogleConfigKey."""

_UNKNOWN_CALLER = re.compile(
    r"must be specified|token request|credential|\b40[13]\b|[Uu]nauthori[sz]ed|Forbidden|[Aa]uthenticat|[Pp]ermission"
)
"""That nobody said who asks, or that who asks may not."""

_S3 = frozenset({"s3", "s3a"})

_OBJECTS = (_ATOMIC | _S3) - {"file"}

_ENDPOINTS = ("aws_endpoint_url_s3", "aws_endpoint_url", "aws_endpoint", "endpoint_url", "endpoint")
"""Settings that lead to another service than AWS. Source: docs.rs/object_store, AmazonS3ConfigKey, read 2026-11."""

_ONE_SLASH = re.compile(r"(?!file:)[A-Za-z][A-Za-z0-9+.-]+:/(?!/)")
"""What Hadoop takes for a URI and everybody else for a relative path."""

_MOUNTS = frozenset({"dbfs", "Volumes", "lakehouse", "synfs"})
"""Folders in the root of Linux where Databricks, Fabric and Synapse mount object storage. macOS has its disks in /Volumes.

Source: https://docs.databricks.com/volumes/paths, https://learn.microsoft.com/fabric/data-engineering/notebookutils/notebookutils-mount,
https://learn.microsoft.com/azure/synapse-analytics/spark/synapse-file-mount-api, read 2026-11.
"""

SPARK_ON_S3 = "dedup_spark_on_s3"
"""Setting by which a person answers for Spark's commits on S3."""


def absolute(uri: str) -> str:
    """A URI that means the same in every process: schemes stay, `file:` and plain paths become absolute paths.

    Raises ConfigError for `dbfs:/x` and the like: as a path it would be a folder of this machine, which may not outlive the job.
    """
    parsed = urlparse(uri)
    if _ONE_SLASH.match(uri):
        raise ConfigError(
            f"{uri} is not the address of a storage that dedup can use. Give its URI, such as "
            "abfss://CONTAINER@ACCOUNT.dfs.core.windows.net/..., s3://BUCKET/... or gs://BUCKET/...; for a folder of that name on this "
            f"machine, ./{uri}."
        )
    if parsed.scheme == "file":
        return os.path.abspath(unquote(parsed.path))
    return uri.rstrip("/") if "://" in uri else os.path.abspath(os.path.expanduser(uri))


def is_local(uri: str) -> bool:
    """Whether the (absolute) URI is a path on this machine."""
    return "://" not in uri


def by_objects(uri: str, options: StorageOptions) -> bool:
    """Whether files below the (absolute) URI are read and written whole, by one request each."""
    return not is_local(uri) and urlparse(uri).scheme in _OBJECTS and objects.usable(uri, options)


def join(uri: str, *parts: str) -> str:
    """A path below a URI."""
    return "/".join((uri.rstrip("/"), *parts))


def filesystem(uri: str, options: StorageOptions) -> pafs.FileSystem:
    """A file system whose root is the (absolute) URI; credentials come from the same options that the tables use.

    Raises:
        StoreUnavailable: nothing says which account, or which credentials; the message says what to set.
    """
    if is_local(uri):
        return pafs.SubTreeFileSystem(uri, pafs.LocalFileSystem())
    with answering(uri):
        return pafs.PyFileSystem(_Handler(uri, options=dict(options or {})))


@contextmanager
def answering(uri: str) -> Iterator[None]:
    """Raises StoreUnavailable in place of an OSError; the message has no secrets, and says what to set where credentials are missing."""
    try:
        yield
    except OSError as error:
        advice = "" if "Set these" in (said := explained(uri, error)) else " Check the address, the network and the login; then try again."
        raise StoreUnavailable(f"{uri} cannot be reached: {said.rstrip('.')}.{advice}") from error


def explained(uri: str, error: BaseException) -> str:
    """What the storage says, without secrets, and what to set where it is about credentials."""
    said = redact(" ".join(str(error).split()))
    variables = _CREDENTIALS.get(urlparse(uri).scheme)
    if variables is None or not _UNKNOWN_CALLER.search(said):
        return said
    return (
        f"{said.rstrip('.')}. Set these environment variables: {variables}. Or give the same settings in lower case: "
        "storage_options={...} in Python, --storage-option KEY=VALUE on the command line."
    )


class _Handler(DeltaStorageHandler):
    """delta-rs's file system, whose streams refuse the buffers that pyarrow hands them."""

    def open_output_stream(self, path: str, metadata: dict[str, str] | None = None) -> pa.PythonFile:
        return pa.PythonFile(_PlainBytes(self._handler.open_output_stream(path, metadata)), mode="w")


class _PlainBytes:
    """A stream that takes anything with bytes in it."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    @property
    def closed(self) -> bool:
        return bool(self._stream.closed)

    def write(self, data: Any) -> int:
        self._stream.write(bytes(data))
        return len(data)

    def flush(self) -> None:
        self._stream.flush()

    def close(self) -> None:
        self._stream.close()


def put(uri: str, options: StorageOptions, path: str, content: pa.Buffer) -> None:
    """Write a whole file below a URI, making the folders it needs. Raises StoreUnavailable where the storage does not take it.

    Crash: half of it may be there on a local disk.
    """
    try:
        if by_objects(uri, options):
            objects.put(uri, options, path, content)
            return
        if is_local(uri):
            os.makedirs(os.path.dirname(join(uri, path)), exist_ok=True)
        with filesystem(uri, options).open_output_stream(path) as stream:
            stream.write(content)
    except OSError as error:
        raise StoreUnavailable(f"The file {path} could not be written to {uri}; no decision refers to it: {error}") from error


def read(uri: str, options: StorageOptions, path: str) -> pa.Buffer | None:
    """The content of a file below a URI; None where there is none. Raises OSError."""
    if by_objects(uri, options):
        return objects.get(uri, options, path)
    try:
        with filesystem(uri, options).open_input_stream(path) as stream:
            return pa.py_buffer(stream.read())
    except FileNotFoundError:
        return None


def stats(uri: str, options: StorageOptions, paths: Sequence[str]) -> list[Stat | None]:
    """Of each of these files below a URI; None for one that is not there. Raises OSError."""
    if by_objects(uri, options):
        return objects.stats(uri, options, paths)
    found = filesystem(uri, options).get_file_info(list(paths))
    return [Stat(i.size, (i.mtime_ns or 0) / 1e9, str(i.mtime_ns)) if i.type == pafs.FileType.File else None for i in found]


def is_away(error: BaseException | None) -> bool:
    """Whether the storage failed, and not the table: the error may pass, and nobody has to repair anything."""
    if isinstance(error, StoreUnavailable) and (cause := error.__cause__) is not None:
        # Spark's refusal of rows is passed on as this, too; of Spark's own errors those count that may pass.
        return is_away(cause) or (isinstance(cause, Exception) and classify(cause) == ErrorClass.TRANSIENT)
    return isinstance(error, OSError | StoreUnavailable) or bool(_AWAY.search(str(error)))


def missing(uri: str, options: StorageOptions, paths: Sequence[str]) -> list[str]:
    """Those of these files below a URI that are not there. Raises StoreUnavailable where that cannot be told."""
    try:
        found = stats(uri, options, paths)
    except OSError as error:
        raise StoreUnavailable(f"Whether {len(paths)} files below {uri} exist could not be checked: {error}") from error
    return [path for path, stat in zip(paths, found, strict=True) if stat is None]


def remove(uri: str, options: StorageOptions, paths: Iterable[str]) -> None:
    """Delete files below a URI that nobody needs any more; those that are gone already, or cannot be deleted now, are no error."""
    if by_objects(uri, options):
        try:
            objects.delete(uri, options, list(paths))
        except OSError as error:
            log.debug("Not all old files of %s were deleted: %s", uri, error)
        return
    system = filesystem(uri, options)
    for path in paths:
        try:
            system.delete_file(path)
        except OSError as error:
            log.debug("%s of %s was not deleted: %s", path, uri, error)


def require_put_if_absent(uri: str, options: StorageOptions) -> None:
    """Raise ConfigError where two writers could both believe that they wrote the same commit."""
    scheme = urlparse(uri).scheme if "://" in uri else "file"
    if is_local(uri) and sys.platform == "linux" and _MOUNTS.intersection(Path(uri).parts[1:2]):
        raise ConfigError(
            f"{uri} is a FUSE mount of object storage and cannot create a file only if it is absent: two instances could both commit. "
            "Give the storage URI itself (abfss://, gs://, s3:// with conditional put)."
        )
    if scheme in _S3:
        _require_conditional_put(uri, options)
    elif scheme not in _ATOMIC:
        raise ConfigError(
            f"Storage {scheme}:// of {uri} is not known to create a file only if it is absent. "
            f"Use {', '.join(sorted(_ATOMIC))} or s3; for a store in PostgreSQL, postgresql://USER@HOST/DATABASE."
        )


def _require_conditional_put(uri: str, options: StorageOptions) -> None:
    """AWS has it, and delta-rs uses it unless it is told not to; of other services a person has to say so.

    A lock in DynamoDB protects nothing: deltalake 1.6 logs an error and commits without it. Sources, read 2026-11:
    https://docs.aws.amazon.com/AmazonS3/latest/userguide/conditional-writes.html, https://github.com/delta-io/delta-rs/discussions/4482.
    """
    unsafe = _setting(options, "aws_s3_allow_unsafe_rename", "allow_unsafe_rename")
    conditional = _setting(options, "aws_conditional_put", "conditional_put")
    elsewhere = _setting(options, *_ENDPOINTS)
    if unsafe != "true" and (conditional == "etag" or (conditional is None and elsewhere is None)):
        return
    raise ConfigError(
        f"{uri}: two instances could both commit, because nothing says that this S3 storage creates a file only if it is absent. "
        "Where it honours the header If-None-Match (AWS does), add storage_options={'aws_conditional_put': 'etag'}, on the command line "
        "--storage-option aws_conditional_put=etag; and do not allow unsafe renames. "
        "AWS_S3_LOCKING_PROVIDER does not help: delta-rs no longer locks through DynamoDB."
    )


def require_spark_may_commit(uri: str, options: StorageOptions) -> None:
    """Raise ConfigError where commits of Spark and of delta-rs, or of two drivers, could replace each other.

    Source: https://docs.delta.io/delta-storage/#amazon-s3, read 2026-11: by default concurrent writes to S3 from several drivers lose data.
    """
    if urlparse(uri).scheme in _S3 and _setting(options, SPARK_ON_S3) != "true":
        raise ConfigError(
            f"{uri} could only be written by Spark, and on S3 Spark's commits may replace those of others: its writer asks first and "
            "writes then. Give the sink properties that delta-rs can write, or use a table elsewhere. If one driver alone ever writes this "
            f"table, allow it with storage_options={{'{SPARK_ON_S3}': 'true'}}."
        )


def _setting(options: StorageOptions, *names: str) -> str | None:
    """The value of the first of these settings that is given, in lower case; options come before the environment."""
    for source in (options or {}, os.environ):
        given = {name.lower(): str(value).strip().lower() for name, value in source.items()}
        if found := next((given[name] for name in names if given.get(name)), None):
            return found
    return None


def safe_name(consumer: str) -> str:
    """A folder name for a consumer: letters, digits and inner - or _ stay, any other byte becomes ~XX."""
    encoded = "".join(c if re.fullmatch(r"[A-Za-z0-9-]", c) else _escape(c, i) for i, c in enumerate(consumer))
    if len(encoded) > 200:
        raise ConfigError(
            f"The consumer name {consumer[:40]!r}... would be a folder name of {len(encoded)} bytes; at most 200 are possible. Shorten the "
            "name, or use plain letters, digits, - and _: every other byte of it takes three."
        )
    return encoded


def _escape(character: str, index: int) -> str:
    if character == "_" and index:
        return character  # a leading one would make the folder hidden to Spark
    return "".join(f"~{byte:02X}" for byte in character.encode("utf-8", "surrogatepass"))


def consumer_name(folder: str) -> str:
    """The inverse of `safe_name`."""
    return unquote(folder.replace("~", "%"), errors="surrogatepass")
