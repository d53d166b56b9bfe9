"""One connection: the AMQP conversation, and the links in it."""

from __future__ import annotations

import asyncio
import contextlib
import struct
from typing import Any

from kit.eventhubs import codec
from kit.eventhubs.codec import Described, Sym, UByte, UInt, ULong, frame
from kit.eventhubs.hub import Partition
from kit.eventhubs.messages import APPLICATION, PROPERTIES, VALUE, read, section
from kit.eventhubs.service import Service

LARGEST_FRAME, LARGEST_MESSAGE = 65_536, 1_048_576
SENDER_CREDIT = 1_000
CHUNK = 512
"""Deliveries written at once."""
ACCEPTED = Described(ULong(0x24), [])


class Link:
    """One link; `reads` where the client is the receiver."""

    def __init__(self, connection: Connection, channel: int, handle: int, name: str, reads: bool, address: str) -> None:
        self.connection, self.channel, self.handle, self.name, self.reads, self.address = connection, channel, handle, name, reads, address
        self.credit = self.deliveries = 0
        self.buffer, self.head = bytearray(), list[Any]()
        self.at, self.group, self.level, self.partition = 0, "", None, None
        self.wake = asyncio.Event()
        self.task: asyncio.Task[None] | None = None

    def end(self, condition: str | None, text: str = "") -> None:
        """Detach it, with an error."""
        self.connection.detach(self, condition, text)


class Connection:
    """Reads frames and answers them until the client goes or a fault ends it."""

    def __init__(self, service: Service, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.service, self.reader, self.writer = service, reader, writer
        self.links: dict[tuple[int, int], Link] = {}
        self.out, self.window = dict[int, int](), dict[int, int]()  # channel -> next delivery id, first id that may not be sent
        self.limit = LARGEST_FRAME
        self.trusted = False

    async def run(self) -> None:
        """Until the end of the connection."""
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            await self._greet()
            while await self._next():
                await self.writer.drain()
        for link in list(self.links.values()):
            self.forget(link)
        self.writer.close()

    async def _greet(self) -> None:
        if (await self.reader.readexactly(8))[:5] != b"AMQP\x03":
            raise ConnectionResetError("no SASL header")
        self.writer.write(b"AMQP\x03\x01\x00\x00")
        mechanisms = codec.symbols(["ANONYMOUS", "MSSBCBS", "PLAIN", "EXTERNAL"])
        body = b"\x00\x53\x40\xd0" + struct.pack(">II", len(mechanisms) + 4, 1) + mechanisms
        self.writer.write(struct.pack(">IBBH", len(body) + 8, 2, codec.SASL, 0) + body)
        await self._frame()  # sasl-init
        self.writer.write(frame(0, 0x44, [UByte(0), None], kind=codec.SASL))
        await self.reader.readexactly(8)
        self.writer.write(b"AMQP\x00\x01\x00\x00")

    async def _frame(self) -> tuple[int, int, bytes]:
        size, offset, _, channel = struct.unpack(">IBBH", await self.reader.readexactly(8))
        return channel, offset, await self.reader.readexactly(size - 8)

    async def _next(self) -> bool:
        channel, offset, body = await self._frame()
        if not body:
            self.writer.write(b"\x00\x00\x00\x08\x02\x00\x00\x00")
            return True
        code, fields, payload = codec.performative(body, offset)
        if code == codec.CLOSE:
            self.writer.write(frame(0, codec.CLOSE, []))
            await self.writer.drain()
            return False
        if code == codec.TRANSFER:
            self._transfer(channel, fields, payload)
        else:
            _ANSWERS[code](self, channel, fields)
        return True

    def _open(self, channel: int, fields: list[Any]) -> None:
        self.limit = min(fields[2] or LARGEST_FRAME, LARGEST_FRAME)
        self.writer.write(frame(0, codec.OPEN, ["double", None, UInt(LARGEST_FRAME), 255, UInt(240_000)]))

    def _begin(self, channel: int, fields: list[Any]) -> None:
        self.out[channel], self.window[channel] = 0, fields[2] or 0
        self.writer.write(frame(channel, codec.BEGIN, [channel, UInt(0), UInt(65_536), UInt(65_536), UInt(255)]))

    def _end(self, channel: int, fields: list[Any]) -> None:
        for link in [link for link in self.links.values() if link.channel == channel]:
            self.forget(link)
        self.writer.write(frame(channel, codec.END, []))

    def _detach(self, channel: int, fields: list[Any]) -> None:
        if link := self.links.get((channel, fields[0])):
            self.detach(link, None, "")

    def _disposition(self, channel: int, fields: list[Any]) -> None:
        pass  # everything is sent settled

    def _attach(self, channel: int, fields: list[Any]) -> None:
        name, handle, reads, source, target, properties = fields[0], fields[1], bool(fields[2]), fields[5], fields[6], fields[13] or {}
        address = (source if reads else target).value[0]
        address = address.split("://", 1)[1].split("/", 1)[1] if "://" in address else address
        link = Link(self, channel, handle, name, reads, address)
        self.links[channel, handle] = link
        first = UInt(0) if reads else None
        modes = [UByte(1 if reads else 0), UByte(0)]
        refusal = self._refusal(link, source.value if source else [], properties)
        if refusal and not address.startswith("$"):
            source = target = None  # by these the client knows that it is refused (AMQP 1.0, 2.6.3)
        answer = [name, UInt(handle), not reads, *modes, source, target, None, None, first, ULong(LARGEST_MESSAGE)]
        self.writer.write(frame(channel, codec.ATTACH, answer))
        if refusal:
            self.service.refusals.append(refusal[1])
            self.detach(link, *refusal)
        elif not reads:
            self._grant(link)
        elif not address.startswith("$"):
            self.service.counts["readers"] += 1
            link.task = asyncio.create_task(self._pump(link, link.partition))

    def _refusal(self, link: Link, source: list[Any], properties: dict[str, Any]) -> tuple[str, str] | None:
        if link.address == "$cbs":
            return None
        if not self.trusted or self.service.faults.denied == "link":
            return "amqp:unauthorized-access", f"Unauthorized access. 'Listen' or 'Send' claims are required to use '{link.address}'."
        if link.address.startswith("$"):
            return None
        if link.reads:
            return self.service.admit(link, source, properties)
        known = link.address.split("/")[0].lower() in self.service.hubs
        return None if known else ("amqp:not-found", f"The messaging entity '{link.address}' could not be found.")

    def detach(self, link: Link, condition: str | None, text: str) -> None:
        """End a link; the connection stays."""
        if self.links.get((link.channel, link.handle)) is not link:
            return
        self.forget(link)
        error = Described(ULong(0x1D), [Sym(condition), text, None]) if condition else None
        self.writer.write(frame(link.channel, codec.DETACH, [UInt(link.handle), True, error]))

    def forget(self, link: Link) -> None:
        """Nothing more goes over this link."""
        self.links.pop((link.channel, link.handle), None)
        if link.partition is not None and link in link.partition.readers:
            link.partition.readers.remove(link)
        if link.task is not None:
            link.task.cancel()

    def break_off(self) -> None:
        """End the connection as a network does that fails."""
        self.writer.transport.abort()

    # ------------------------------------------------------------------ what goes out
    def _flow(self, channel: int, fields: list[Any]) -> None:
        self.window[channel] = (fields[0] or 0) + (fields[1] or 0)
        link = self.links.get((channel, fields[4])) if fields[4] is not None else None
        if link and link.reads:
            link.credit = (fields[5] or 0) + (fields[6] or 0) - link.deliveries
        for each in self.links.values():
            each.wake.set()

    def _grant(self, link: Link) -> None:
        fields = [UInt(0), UInt(65_536), UInt(self.out[link.channel]), UInt(65_536)]
        self.writer.write(frame(link.channel, codec.FLOW, [*fields, UInt(link.handle), UInt(link.deliveries), UInt(SENDER_CREDIT)]))

    async def _pump(self, link: Link, partition: Partition) -> None:
        """Deliver what credit, session window and log allow, for as long as the link lives."""
        faults = self.service.faults
        with contextlib.suppress(ConnectionError):
            while True:
                link.at = max(link.at, partition.first)
                room = min(link.credit, self.window[link.channel] - self.out[link.channel], 16 if faults.slow else CHUNK)
                if room <= 0 or link.at >= partition.next:
                    link.wake.clear()
                    await link.wake.wait()
                    continue
                sent = self._deliver(link, partition, room)
                await self.writer.drain()
                if faults.slow:
                    await asyncio.sleep(sent / faults.slow)

    def _deliver(self, link: Link, partition: Partition, room: int) -> int:
        faults, key = self.service.faults, id(partition)
        if key in faults.resets and faults.resets[key] <= room:
            room = faults.resets.pop(key)
            self._send(link, partition, room)
            return self._break_inside(link, partition)
        sent, size = self._send(link, partition, room)
        if key in faults.resets:
            faults.resets[key] -= sent
        if key in faults.again:
            link.at = max(partition.first, link.at - faults.again.pop(key))
        return size

    def _send(self, link: Link, partition: Partition, room: int) -> tuple[int, int]:
        begin = link.at - partition.first
        events = partition.events[begin : begin + room]
        link.at += len(events)
        frames = [self.delivery(link, event) for event in events if event is not None]
        data = b"".join(frames)
        self.writer.write(data)
        self.service.counts["delivered"] += len(frames)
        self.service.counts["bytes"] += len(data)
        return len(frames), len(data)

    def delivery(self, link: Link, message: bytes) -> bytes:
        """The frames of the link's next delivery."""
        number = self.out[link.channel]
        made = codec.transfer(link.channel, link.handle, number & 0xFFFFFFFF, link.deliveries & 0xFFFFFFFF, message, self.limit)
        self.out[link.channel] += 1
        link.deliveries += 1
        link.credit -= 1
        return made

    def _break_inside(self, link: Link, partition: Partition) -> int:
        event = next((event for event in partition.events[link.at - partition.first :] if event is not None), b"")
        half = self.delivery(link, event)
        self.writer.write(half[: max(1, len(half) // 2)])
        link.credit = 0
        asyncio.get_running_loop().call_later(0.05, self.break_off)  # what is written leaves first
        return 0

    # ------------------------------------------------------------------ what comes in
    def _transfer(self, channel: int, fields: list[Any], payload: bytes) -> None:
        link = self.links.get((channel, fields[0]))
        if link is None:
            return
        if fields[1] is not None:
            link.head = fields
        link.buffer += payload
        if fields[5]:
            return
        raw, link.buffer = bytes(link.buffer), bytearray()
        link.deliveries += 1
        if link.deliveries % (SENDER_CREDIT // 2) == 0:
            self._grant(link)
        self._take(link, raw)

    def _take(self, link: Link, raw: bytes) -> None:
        outcome = ACCEPTED
        if link.address.startswith("$"):
            self._request(link, raw)
        elif self.service.faults.dropped_sends > 0:
            self.service.faults.dropped_sends -= 1
            return self.break_off()
        elif refusal := self.service.publish(link.address, raw, link.head[3] or 0):
            outcome = Described(ULong(0x25), [Described(ULong(0x1D), [Sym(refusal[0]), refusal[1], None])])
        elif self.service.faults.lost_answers > 0:
            self.service.faults.lost_answers -= 1
            return self.break_off()
        elif self.service.faults.silent_sends > 0:
            self.service.faults.silent_sends -= 1
            return None
        if not link.head[4]:
            number = UInt(link.head[1])
            self.writer.write(frame(link.channel, codec.DISPOSITION, [True, number, number, True, outcome]))

    def _request(self, link: Link, raw: bytes) -> None:
        if link.address == "$cbs":
            self.trusted = self.service.accepts(raw)
            status, text, body = (
                (202, "Accepted", None) if self.trusted else (401, "InvalidSignature: The token has an invalid signature.", None)
            )
        else:
            status, text, body = self.service.manage(raw)
        asked = (read(raw, PROPERTIES).get(PROPERTIES) or [None])[0]
        message = section(PROPERTIES, [None, None, None, None, None, asked, *[None] * 7])
        message += section(APPLICATION, {"status-code": status, "status-description": text}) + section(VALUE, body)
        for other in self.links.values():
            if other.channel == link.channel and other.reads and other.address == link.address:
                self.writer.write(self.delivery(other, message))
                return


_ANSWERS = {
    codec.OPEN: Connection._open,
    codec.BEGIN: Connection._begin,
    codec.ATTACH: Connection._attach,
    codec.FLOW: Connection._flow,
    codec.DISPOSITION: Connection._disposition,
    codec.DETACH: Connection._detach,
    codec.END: Connection._end,
}
