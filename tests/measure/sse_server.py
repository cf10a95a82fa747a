"""A scripted server of streamed completions, to measure the client with: counts what is in flight."""

from __future__ import annotations

import asyncio
import json


class SseServer:
    """`async with SseServer(...) as server`. Each answer has `num_tokens` events, `gap` seconds apart."""

    def __init__(self, num_tokens: int = 3, gap: float = 0.002, status: int = 200, closes: bool = False) -> None:
        self.num_tokens, self.gap, self.status, self.closes = num_tokens, gap, status, closes
        self.bodies: list[dict[str, object]] = []
        self.num_connections = self.in_flight = self.most_in_flight = 0

    async def __aenter__(self) -> SseServer:
        self._server = await asyncio.start_server(self._connection, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._server.close()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                self.bodies.append(json.loads(await reader.readexactly(length)))
                self.in_flight += 1
                self.most_in_flight = max(self.most_in_flight, self.in_flight)
                await self._answer(writer)
                self.in_flight -= 1
                if self.closes:
                    break
        except asyncio.IncompleteReadError:
            pass
        finally:
            writer.close()

    async def _answer(self, writer: asyncio.StreamWriter) -> None:
        if self.status != 200:
            writer.write(b"HTTP/1.1 %d No\r\ncontent-length: 4\r\n\r\nbusy" % self.status)
            return
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        for i in range(self.num_tokens):
            if i:
                await asyncio.sleep(self.gap)
            self._event(writer, {"choices": [{"text": f"{i} "}]})
        usage = {"prompt_tokens": 7, "completion_tokens": 2 * self.num_tokens, "prompt_tokens_details": None}
        self._event(writer, {"choices": [], "usage": usage})
        self._chunk(writer, b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")

    def _event(self, writer: asyncio.StreamWriter, value: object) -> None:
        self._chunk(writer, b": ping\n\n")
        self._chunk(writer, b"data: " + json.dumps(value).encode() + b"\n\n")

    @staticmethod
    def _chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
        writer.write(b"%x\r\n" % len(data) + data + b"\r\n")
