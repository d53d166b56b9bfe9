"""Folders for the rows of batches that do not come to the driver, one for each attempt."""

from __future__ import annotations

import logging
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pyspark.sql import SparkSession

from checkpoint.errors import ConfigError

log = logging.getLogger("dedup")

EVERY_FILE = {"ignoreCorruptFiles": False, "ignoreMissingFiles": False}
"""Options of a reader of our own files, whatever the session's settings: one that cannot be read is an error, and not fewer rows."""


@contextmanager
def scratch_folder(session: SparkSession, scratch: str | None) -> Iterator[str]:
    """A folder of one attempt, removed afterwards. Raises ConfigError where none can be shared.

    Crash: of a process that dies the folder stays.
    """
    require_shared(session, scratch)
    if scratch is None:
        with tempfile.TemporaryDirectory(prefix="dedup-") as folder:
            yield f"{folder}/rows"
        return
    mine = f"{scratch.rstrip('/')}/dedup-{uuid.uuid4().hex}"
    try:
        yield f"{mine}/rows"
    finally:
        _remove(session, mine)


def require_shared(session: SparkSession, scratch: str | None) -> None:
    """Raise ConfigError where executors are elsewhere and no folder is named."""
    if scratch is None and not str(session.conf.get("spark.master", "")).startswith("local"):
        raise ConfigError(
            "The batch is too large for the driver, or collect=False. Give Consumer(scratch=...) a folder that driver and executors share."
        )


def _remove(session: SparkSession, folder: str) -> None:
    """As a folder of this machine where it is one, else by Spark's own access to the storage, of which Spark Connect has none to offer."""
    try:
        here = Path(folder.removeprefix("file:"))
        if here.is_dir():
            return shutil.rmtree(here)
        path = session._jvm.org.apache.hadoop.fs.Path(folder)  # type: ignore[union-attr]
        path.getFileSystem(session._jsparkSession.sessionState().newHadoopConf()).delete(path, True)
    except Exception as error:  # noqa: BLE001 - whatever the storage or py4j raises: the batch has nothing to do with it
        log.warning("%s was not removed: %s", folder, type(error).__name__)
