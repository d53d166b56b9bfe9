"""Where the partitions of event hubs end, for `dedup lag`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dedup.eventhub.namespace import Namespace
from dedup.eventhub.settings import Connection
from dedup.lag import End


class Hubs:
    """The hubs of one namespace.

    Args:
        connection_string: of the namespace, or of one hub.
    """

    def __init__(self, connection_string: str) -> None:
        self._text = connection_string

    def __repr__(self) -> str:
        return "Hubs(***)"

    def ends(self, topics: Sequence[str]) -> Mapping[tuple[str, int], End]:
        """(hub, partition) -> its ends.

        Raises:
            SourceUnavailable: the service does not answer. ConfigError: there is no such hub.
        """
        found = {hub: Namespace(Connection.of(self._text, hub)).look() for hub in topics}
        return {(name, part): End(s.first, s.end, s.newest) for name, hub in found.items() for part, s in hub.spans.items()}
