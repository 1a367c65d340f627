"""One webhook request: resolve, check, connect to the checked address, post, read a bounded answer.

Sits below `manager`. No redirects are followed, no proxy or cookie is used, nothing is kept open.
Invariant: the socket is connected to an address that `address` approved in this very call.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import h11

from millstream.control.limits import (
    CONNECT_TIMEOUT_S,
    REPLY_BODY_BYTES_MAX,
    REPLY_HEAD_BYTES_MAX,
    REPLY_PARTS_MAX,
    REPLY_READ_BYTES,
)
from millstream.control.subscriptions.address import AddressRefused, Target

Resolver = Callable[[str, int], Awaitable[list[str]]]


class DeliveryFailed(Exception):  # noqa: N818
    """The receiver did not take the wake; the text says why. It is for the log: clients are not told."""


@dataclass(frozen=True, slots=True)
class Reply:
    status: int
    body: bytes

    @property
    def done(self) -> bool:
        """Whether the receiver said that it has finished this wake."""
        try:
            value = json.loads(self.body)
        except (ValueError, RecursionError):
            return False
        return isinstance(value, dict) and value.get("done") is True


async def checked_addresses(target: Target, resolver: Resolver) -> list[str]:
    """All addresses of the target; `AddressRefused` if any of them may not be called."""
    addresses = await resolver(target.host, target.port)
    if not addresses:
        raise DeliveryFailed(f"{target.host} has no address")
    for address in addresses:
        target.check_address(address)
    return addresses


async def post(
    target: Target,
    body: bytes,
    headers: dict[str, str],
    timeout_s: float,
    resolver: Resolver,
    tls: ssl.SSLContext | None = None,
) -> Reply:
    """Posts and reads the answer; `DeliveryFailed` for everything that is not a 2xx answer in time."""
    try:
        async with asyncio.timeout(timeout_s):
            reply = await _post(target, body, headers, resolver, tls)
    except TimeoutError as error:
        raise DeliveryFailed(f"no answer within {timeout_s:g} s") from error
    except AddressRefused as error:
        raise DeliveryFailed(f"address refused: {error}") from error
    except (OSError, h11.ProtocolError, asyncio.IncompleteReadError) as error:
        raise DeliveryFailed(f"{type(error).__name__}: {error}") from error
    if not 200 <= reply.status < 300:
        raise DeliveryFailed(f"the receiver answered {reply.status}")
    return reply


async def _post(
    target: Target,
    body: bytes,
    headers: dict[str, str],
    resolver: Resolver,
    tls: ssl.SSLContext | None,
) -> Reply:
    addresses = await checked_addresses(target, resolver)
    reader, writer = await _connect(target, addresses, tls)
    try:
        connection = h11.Connection(h11.CLIENT)
        request = h11.Request(
            method="POST",
            target=target.request_target,
            headers=[
                ("Host", target.authority),
                ("Content-Length", str(len(body))),
                ("Connection", "close"),
                ("User-Agent", "millstream"),
                *headers.items(),
            ],
        )
        writer.write(connection.send(request) or b"")
        writer.write(connection.send(h11.Data(body)) or b"")
        writer.write(connection.send(h11.EndOfMessage()) or b"")
        await writer.drain()
        return await _read_reply(connection, reader)
    finally:
        writer.transport.abort()  # at once, also when the receiver does not take part in closing


async def _connect(
    target: Target, addresses: list[str], tls: ssl.SSLContext | None
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    context = (tls or ssl.create_default_context()) if target.secure else None
    failure: OSError | None = None
    for address in addresses:
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                return await asyncio.open_connection(
                    address,
                    target.port,
                    ssl=context,
                    server_hostname=target.host if context is not None else None,
                )
        except (OSError, TimeoutError) as error:
            failure = error
    raise failure or OSError("no address to connect to")


async def _read_reply(connection: h11.Connection, reader: asyncio.StreamReader) -> Reply:
    """The reply, if it comes to its point; whatever arrives costs little, and a little at a time."""
    received, status = 0, 0
    body = bytearray()
    for _ in range(REPLY_PARTS_MAX):
        while (event := connection.next_event()) is h11.NEED_DATA:
            if not status and received > REPLY_HEAD_BYTES_MAX:
                raise DeliveryFailed(f"no answer within {received} bytes")
            data = await reader.read(REPLY_READ_BYTES)
            await asyncio.sleep(0)  # to read what has arrived already does not leave the loop
            received += len(data)
            connection.receive_data(data)
        if isinstance(event, h11.Response):
            status = event.status_code
        elif isinstance(event, h11.Data):
            body += event.data
            if len(body) > REPLY_BODY_BYTES_MAX:
                break
        elif isinstance(event, h11.EndOfMessage):
            return Reply(status, bytes(body))
        elif not isinstance(event, h11.InformationalResponse):
            raise DeliveryFailed("the receiver closed the connection without an answer")
    if not status:
        raise DeliveryFailed(f"{REPLY_PARTS_MAX} informational replies and no answer")
    return Reply(status, b"")  # taken, but it can hardly be a {"done": true}
