"""A small reverse proxy in front of a server: it wants a bearer token, and may be told to refuse.

Real sockets and real HTTP on both sides; requests and answers pass through byte for byte. Every
connection carries one request (`Connection: close`), so that the proxy needs to understand only its head.
"""

from __future__ import annotations

import asyncio
import threading
from types import TracebackType
from typing import Self

DEADLINE_S = 10.0
HEAD_BYTES_MAX = 64 * 1024


class ReverseProxy:
    """Passes on requests that carry `token`; others get 401. `refusal` makes it answer with that status."""

    def __init__(self, port: int, token: str) -> None:
        self.upstream_port = port
        self.token = token
        self.refusal: int | None = None
        self.requests = 0
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._ready.wait(DEADLINE_S)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._listen())
        self._loop.run_forever()
        self._server.close()
        for task in self._tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*self._tasks, return_exceptions=True))
        self._loop.close()

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port: int = self._server.sockets[0].getsockname()[1]
        self._ready.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            self.requests += 1
            lines = head.decode("latin-1").split("\r\n")
            given = [line.partition(":")[2].strip() for line in lines if line.lower().startswith("authorization:")]  # fmt: skip
            if self.refusal is not None or given != [f"Bearer {self.token}"]:
                await self._refuse(writer, self.refusal or 401)
                return
            await self._pass_on(head, reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _refuse(self, writer: asyncio.StreamWriter, status: int) -> None:
        body = b"<html>no</html>"
        head = f"HTTP/1.1 {status} Refused\r\nContent-Type: text/html\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        await writer.drain()

    async def _pass_on(
        self, head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self.upstream_port)
        up_writer.write(head[:-2] + b"Connection: close\r\n\r\n")
        sending = asyncio.ensure_future(self._copy(reader, up_writer))
        try:
            await self._copy(up_reader, writer)
        finally:
            sending.cancel()
            up_writer.close()

    @staticmethod
    async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(DEADLINE_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
