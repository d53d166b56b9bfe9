"""The log of the year, and what its events have to come to."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

EVENTS = 20

ACCOUNTS = 50

REPEATED_WITHIN = 20 * 86400.0
"""Seconds after which nobody sends an event a second time: less than the retention."""


class Topic:
    """One partition. Each batch has new orders, repeated ones, rejected ones, and positions that are transaction markers."""

    def __init__(self, seed: int) -> None:
        self._dice = random.Random(seed)
        self._recent: deque[dict[str, Any]] = deque()
        self._made = 0
        self.next = 0
        self.first = 0
        self.orders: dict[str, int] = {}
        self.latest: dict[str, int] = {}
        self.mails: set[str] = set()
        self.rejected = 0
        self.repeated = 0

    def batch(self, now: float, *, rejected: int = 0, marked: bool = False) -> list[dict[str, Any]]:
        """The next events. `marked`: one publishes a message that nobody can take."""
        events = [self._event(now, number < rejected, marked and number == EVENTS - 1) for number in range(max(EVENTS, rejected))]
        for place, event in enumerate(events):
            event["number"], event["time"] = self.next, now
            self.next += 2 if place % 5 == 3 else 1  # a marker takes the position behind it
        return events

    def _event(self, now: float, rejected: bool, marked: bool) -> dict[str, Any]:
        while self._recent and self._recent[0]["time"] < now - REPEATED_WITHIN:
            self._recent.popleft()
        if self._recent and not rejected and not marked and self._dice.random() < 0.1:
            self.repeated += 1
            return dict(self._recent[self._dice.randrange(len(self._recent))])
        self._made += 1
        event = {"id": f"{self._made}-{0 if marked else self._made % 10}{'!' * marked}", "account": f"a{self._dice.randrange(ACCOUNTS)}"}
        event["amount"] = -1 if rejected else self._made
        self._expect(event, now)
        return event

    def _expect(self, event: dict[str, Any], now: float) -> None:
        if event["amount"] < 0:
            self.rejected += 1
            return
        self._recent.append({**event, "time": now})
        self.orders[event["id"]] = event["amount"]
        self.latest[event["account"]] = event["amount"]
        if event["id"].endswith("-0"):
            self.mails.add(event["id"])

    def begin_again(self) -> None:
        """The topic is deleted and created again."""
        self.next = self.first = 0

    def lose(self, positions: int) -> None:
        """The retention of the log takes positions that nobody has read."""
        self.next = self.first = self.next + positions
