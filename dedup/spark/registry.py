"""Decoding by a schema registry in Spark's tasks: the same function as on the driver, batch of Arrow by batch.

Called by dedup/spark/prepare.py; dedup/spark/feed.py tells an unreachable registry from what tasks raise.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import pyarrow as pa
from pyspark.sql import Column
from pyspark.sql import types as T
from pyspark.sql.pandas.functions import arrow_udf
from pyspark.sql.pandas.types import from_arrow_type

from checkpoint.errors import RegistryUnavailable
from deadletter.letter import PROPERTIES
from dedup import arrow_registry
from dedup.decode import Decoder

_RAISED = re.compile(rf"{RegistryUnavailable.__name__}: (.*)")


def decoded(body: Column, properties: Column, decoder: Decoder) -> Column:
    """A struct for each body: `data`, and whether the body is there and does not decode as `wrong`."""
    kind = T.StructType([T.StructField("data", from_arrow_type(decoder.type)), T.StructField("wrong", T.BooleanType())])

    def decode(bodies: pa.Array, pairs: pa.Array) -> pa.Array:
        data, wrong = arrow_registry.decode(bodies.cast(pa.binary()), pairs.cast(PROPERTIES), decoder)
        return pa.StructArray.from_arrays([data, wrong], ["data", "wrong"])

    # What a registry says may change, so Spark must not compute it twice for one row.
    function = arrow_udf(decode, kind)  # type: ignore[call-overload]
    column: Column = function.asNondeterministic()(body, properties)
    return column


@contextmanager
def answers() -> Iterator[None]:
    """Raise RegistryUnavailable where tasks have: Spark brings only their text."""
    try:
        yield
    except RegistryUnavailable:
        raise
    except Exception as error:
        found = _RAISED.search(str(error))
        if found is None:
            raise
        raise RegistryUnavailable(found[1].strip()) from error
