"""Object storage for the crash loops: a server, a proxy before it, and what can become of requests."""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections.abc import Iterator

from crash.faults import Fault, started
from crash.lane import Lane
from kit import azurite_server, http_proxy, object_storage, s3_server
from kit.http_proxy import BEFORE, BUSY, EXPIRED, HANG, LOST, SLOW_DOWN, Counted, HttpProxy

SCHEMES = {"delta-az": "az", "delta-s3": "s3"}
"""Store -> how its places begin."""

ONCE = {
    "a request never arrives": BEFORE,
    "the answer to a request is lost": LOST,
    "a request hangs": HANG,
}

FOR_A_WHILE = {
    "the storage answers 503": BUSY,
    "the storage answers 429": SLOW_DOWN,
    "credentials expire": EXPIRED,
}

REQUESTS = 120
"""Of the requests of a process one of the first so many is broken."""

WHILES = (0.1, 0.5, 1.5)
"""Seconds for which the storage refuses."""


class RequestFaults:
    """What the proxy can do to the requests of processes; this process does not go through it."""

    def __init__(self, proxy: HttpProxy, settings: dict[str, str]) -> None:
        self.proxy, self.settings = proxy, settings

    def all(self) -> dict[str, Fault]:
        """By name."""
        once = {name: self._once(way) for name, way in ONCE.items()}
        return {**once, **{name: self._for_a_while(way) for name, way in FOR_A_WHILE.items()}}

    def _once(self, way: str) -> Fault:
        def fault(lane: Lane, dice: random.Random) -> str:
            """One request."""
            nth = dice.randrange(REQUESTS)
            self.proxy.rule = rule = Counted(way, nth)
            try:
                lane.wait(lane.start(patience=dice.choice([0.0, 30.0])))
            finally:
                self.proxy.rule = lambda method, path: ""
            lane.missed = not rule.met
            return f"request {nth}"

        return fault

    def _for_a_while(self, way: str) -> Fault:
        def fault(lane: Lane, dice: random.Random) -> str:
            """All requests from one on, until it passes."""
            nth, seconds = dice.randrange(REQUESTS // 2), dice.choice(WHILES)
            self.proxy.rule = rule = Counted(way, nth, times=1_000_000)
            try:
                process = started(lane, patience=dice.choice([0.0, 30.0]))
                while not process.ended and not rule.met:
                    time.sleep(0.002)
                time.sleep(seconds)
            finally:
                self.proxy.rule = lambda method, path: ""
            lane.wait(process)
            lane.missed = not rule.met
            return f"from request {nth} on, {seconds} s"

        return fault


@contextlib.contextmanager
def storage(kind: str) -> Iterator[RequestFaults]:
    """A server of this kind; meanwhile this process reaches it, and has in its faults how others reach it through the proxy."""
    with contextlib.ExitStack() as stack:
        if kind == "delta-az":
            settings = object_storage.azure(stack.enter_context(azurite_server.running_azurite()))
        else:
            settings = object_storage.s3(stack.enter_context(s3_server.running_s3()))
        proxy = stack.enter_context(http_proxy.proxied(object_storage.server(settings), hang=2.0))
        before = {name: os.environ.get(name) for name in settings}
        os.environ.update(settings)
        try:
            yield RequestFaults(proxy, object_storage.through(settings, proxy.address))
        finally:
            for name, value in before.items():
                os.environ.pop(name) if value is None else os.environ.update({name: value})
