"""A Spark driver whose workers have another interpreter: `PYSPARK_PYTHON=... python -m kit.workers_child FOLDER`.

Prints JSON: what `check` and the first batch said with that interpreter, and then with the driver's own one.
"""

from __future__ import annotations

import json
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from dedup.core.rows import frame_of
from dedup.spark import workers


def said(call: Callable[..., Any], *arguments: Any) -> str:
    """What it raises, or what it returns."""
    try:
        return str(call(*arguments))
    except Exception as error:  # noqa: BLE001 - the test looks at it
        return f"{type(error).__name__}: {error}"


def ask(spark: Any, path: str) -> None:
    """A worker with another interpreter, for a consumer that has asked none."""
    spark.sparkContext.pythonExec = path
    workers.check(spark, "other", [])


def away() -> FunctionType:
    """A function of a module that this process alone has."""
    module = sys.modules["shop_module"] = ModuleType("shop_module")
    exec("def handler(): pass", module.__dict__)
    return module.handler  # type: ignore[no-any-return]


def main(folder: Path) -> None:
    """One session, which takes the interpreter for its workers from `pythonExec` at each job."""
    from pyspark.sql import SparkSession

    from kit.orders import batch, consumer, orders
    from kit.places import DeltaPlace

    builder = SparkSession.builder.master("local[1]").config("spark.sql.warehouse.dir", str(folder / "warehouse"))
    spark = builder.config("spark.ui.enabled", "false").config("spark.log.level", "OFF").getOrCreate()
    place = DeltaPlace(folder)
    place.create_sink()
    (folder / "old").write_text("#!/bin/sh\necho 'SyntaxError: invalid syntax' >&2; exit 1\n")
    (folder / "old").chmod(0o755)
    made = consumer(place.store())
    made._handler = None
    made.foreach(into="orders")(lambda event, tx: {"id": event.data["id"], "amount": 1})
    frame, others = frame_of(spark, batch(*orders(range(3)))), spark.sparkContext.pythonExec
    told = {"check": said(made.check, frame), "batch": said(made, frame, 0), "rows": place.read()}
    spark.sparkContext.pythonExec = sys.executable
    told |= {"own": said(made.check, frame)}
    spark.sparkContext.pythonExec = others
    told |= {"again": said(made.check, frame)}
    told |= {"others": {path: said(ask, spark, path) for path in ("/no/such/python", str(folder / "old"))}}
    spark.sparkContext.pythonExec = sys.executable
    told |= {"module": said(workers.check, spark, "other", [pickle.dumps(away())])}
    print(json.dumps({**told, "own batch": said(made, frame, 0), "own rows": len(place.read())}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
