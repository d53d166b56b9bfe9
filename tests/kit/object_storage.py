"""What a process has in its environment to reach the object storage of tests, and the buckets there."""

from __future__ import annotations

import contextlib
import uuid
from urllib.parse import urlsplit

from kit import s3_server

BUCKET = "lake"


def azure(connection_string: str) -> dict[str, str]:
    """Variable -> value, for the account of a connection string; its container BUCKET is made where it is missing."""
    from azure.core.exceptions import ResourceExistsError
    from azure.storage.blob import ContainerClient

    with ContainerClient.from_connection_string(connection_string, BUCKET) as container, contextlib.suppress(ResourceExistsError):
        container.create_container()
    said = dict(part.split("=", 1) for part in connection_string.rstrip(";").split(";"))
    return {
        "AZURE_STORAGE_ACCOUNT_NAME": said["AccountName"],
        "AZURE_STORAGE_ACCOUNT_KEY": said["AccountKey"],
        "AZURE_STORAGE_ENDPOINT": said["BlobEndpoint"],
        "AZURE_ALLOW_HTTP": "true",
    }


def s3(address: str) -> dict[str, str]:
    """Variable -> value, for the emulator at this address; its bucket BUCKET is made where it is missing."""
    s3_server.put(address, BUCKET)
    return {
        "AWS_ENDPOINT_URL": address,
        "AWS_ALLOW_HTTP": "true",
        "AWS_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_CONDITIONAL_PUT": "etag",
    }


def prefix(scheme: str) -> str:
    """A place of the bucket that nobody has used."""
    return f"{scheme}://{BUCKET}/{uuid.uuid4().hex[:12]}"


def endpoint_name(settings: dict[str, str]) -> str:
    """The variable that leads to the server."""
    return next(name for name in settings if "ENDPOINT" in name)


def server(settings: dict[str, str]) -> str:
    """The address of the server, without the account that Azure's has behind it."""
    parts = urlsplit(settings[endpoint_name(settings)])
    return f"{parts.scheme}://{parts.netloc}"


def through(settings: dict[str, str], proxy: str) -> dict[str, str]:
    """The same settings, by way of the proxy at this address."""
    name = endpoint_name(settings)
    return {**settings, name: urlsplit(settings[name])._replace(netloc=urlsplit(proxy).netloc).geturl()}
