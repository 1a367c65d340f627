"""One webhook request against real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import ipaddress
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from millstream import allowlists
from millstream.control.subscriptions import address, delivery
from millstream.control.subscriptions.delivery import DeliveryFailed, Reply
from millstream.control.subscriptions.lookups import Lookups

HERE = allowlists.places("127.0.0.1")
Exchange = Callable[[bytes, asyncio.StreamWriter], Awaitable[None]]


async def machine(host: str, port: int) -> list[str]:
    """The machine's own resolver."""
    return await Lookups(lambda _: None).resolve(host, port)


@contextlib.asynccontextmanager
async def receiver(
    exchange: Exchange, tls: ssl.SSLContext | None = None
) -> AsyncIterator[tuple[int, list[bytes]]]:
    """A server that reads one whole request and lets `exchange` answer it."""
    requests: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            lines = head.lower().split(b"\r\n")
            length = next(int(x.split(b":")[1]) for x in lines if x.startswith(b"content-length:"))
            requests.append(head + await reader.readexactly(length))
            with contextlib.suppress(ConnectionError):
                await exchange(requests[-1], writer)
                writer.close()
                await writer.wait_closed()
        finally:
            writer.transport.abort()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=tls)
    async with server:
        yield server.sockets[0].getsockname()[1], requests


def answer(data: bytes) -> Exchange:
    async def exchange(request: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(data)
        await writer.drain()

    return exchange


async def post_to(exchange: Exchange, timeout_s: float = 5.0) -> tuple[Reply, bytes]:
    async with receiver(exchange) as (port, requests):
        target = address.parse(f"http://127.0.0.1:{port}/hook?x=1", HERE)
        reply = await delivery.post(target, b'{"n":1}', {"X-Test": "1"}, timeout_s, machine)
        return reply, requests[0]


def test_a_request_is_sent_whole_and_the_answer_is_read() -> None:
    reply, request = asyncio.run(
        post_to(answer(b'HTTP/1.1 200 OK\r\nContent-Length: 13\r\n\r\n{"done":true}'))
    )
    assert reply.done
    assert request.startswith(b"POST /hook?x=1 HTTP/1.1\r\n")
    assert b"x-test: 1\r\n" in request.lower()
    assert request.endswith(b'\r\n\r\n{"n":1}')


@pytest.mark.parametrize(
    ("body", "done"),
    [
        (b"", False),
        (b"ok", False),
        (b"[true]", False),
        (b'{"done":1}', False),
        (b'{"done":true}', True),
    ],
)
def test_only_done_true_means_done(body: bytes, done: bool) -> None:
    head = b"HTTP/1.1 204 No Content\r\n\r\n" if not body else b"HTTP/1.1 200 OK\r\n\r\n"
    reply, _ = asyncio.run(post_to(answer(head + body)))
    assert reply.done is done


def test_an_endless_answer_is_cut_and_counts_as_taken() -> None:
    async def flood(request: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        while True:
            writer.write(b"4000\r\n" + b"x" * 0x4000 + b"\r\n")
            await writer.drain()

    reply, _ = asyncio.run(post_to(flood))
    assert (reply.status, reply.done) == (200, False)


CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def endless(start: bytes, part: bytes) -> Exchange:
    async def exchange(request: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(start)
        while True:
            writer.write(part * 1000)
            await writer.drain()

    return exchange


@pytest.mark.parametrize(
    ("start", "part"),
    [
        (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
        (b"", b"HTTP/1.1 103 Early Hints\r\nLink: " + b"x" * 9000 + b"\r\n\r\n"),
        (b"", b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\n\r\n"),
        (b"HTTP/1.1 200 OK\r\n", b"a:b\r\n"),
        (CHUNKED + b"1;", b"a"),
        (CHUNKED + b"0\r\n", b"a:b\r\n"),
    ],
    ids=["informational", "large informational", "switching", "headers", "extension", "trailers"],
)
def test_a_reply_that_does_not_come_to_its_point_is_a_failure(start: bytes, part: bytes) -> None:
    with pytest.raises(DeliveryFailed) as failure:
        asyncio.run(post_to(endless(start, part)))
    assert "no answer within 5 s" not in str(failure.value)


def test_a_body_in_very_many_pieces_is_cut_and_counts_as_taken() -> None:
    """Long before it is too large."""
    pieces = b"1;a=b\r\nx\r\n" * 1000
    reply, _ = asyncio.run(post_to(answer(CHUNKED + pieces + b"0\r\n\r\n")))
    assert reply == Reply(200, b"")


def test_some_informational_replies_may_come_first() -> None:
    hints = b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n" * 3
    done = b'HTTP/1.1 200 OK\r\nContent-Length: 13\r\n\r\n{"done":true}'
    reply, _ = asyncio.run(post_to(answer(hints + done)))
    assert reply.done


@pytest.mark.parametrize(
    "data",
    [
        b"HTTP/1.1 500 No\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\nshort",
        b"not http at all\r\n\r\n",
        b"",
    ],
)
def test_everything_but_a_whole_2xx_answer_is_a_failure(data: bytes) -> None:
    with pytest.raises(DeliveryFailed):
        asyncio.run(post_to(answer(data)))


def test_a_silent_receiver_is_given_up() -> None:
    async def silence(request: bytes, writer: asyncio.StreamWriter) -> None:
        await asyncio.Event().wait()

    with pytest.raises(DeliveryFailed, match="no answer within"):
        asyncio.run(post_to(silence, timeout_s=0.2))


@pytest.mark.parametrize(
    ("allowed", "url", "resolved", "calls"),
    [
        ("", "https://rebound.example:{port}/", ["127.0.0.1"], 0),
        ("10.0.0.0/8", "http://rebound.example:{port}/", ["127.0.0.1"], 0),
        ("127.0.0.1:1", "https://rebound.example:{port}/", ["127.0.0.1"], 0),
        ("other.example", "https://rebound.example:{port}/", ["127.0.0.1"], 0),
        ("127.0.0.1", "http://rebound.example:{port}/", ["::ffff:127.0.0.1"], 0),
        ("127.0.0.1", "http://rebound.example:{port}/", ["127.0.0.1", "10.0.0.1"], 0),
        ("127.0.0.0/8", "http://rebound.example:{port}/", ["127.0.0.1"], 1),
        ("hooks.internal", "http://hooks.internal:{port}/", ["127.0.0.1"], 1),
        ("hooks.internal", "http://hooks.internal:{port}/", ["0.0.0.0"], 0),
    ],
)
def test_what_a_name_stands_for_is_checked_when_it_is_called(
    allowed: str, url: str, resolved: list[str], calls: int
) -> None:
    async def resolver(host: str, port: int) -> list[str]:
        return resolved

    async def run() -> None:
        async with receiver(answer(b"HTTP/1.1 200 OK\r\n\r\n")) as (port, requests):
            target = address.parse(url.format(port=port), allowlists.places(allowed))
            post = delivery.post(target, b"", {}, 5.0, resolver=resolver)
            if calls:
                await post
            else:
                with pytest.raises(DeliveryFailed, match="address refused"):
                    await post
            assert len(requests) == calls

    asyncio.run(run())


def test_localhost_is_refused_when_it_is_called_unless_it_is_named() -> None:
    """With the machine's own resolver: the name passes the first look, its address does not."""
    target = address.parse("http://localhost:9/", allowlists.places("10.0.0.0/8"))
    with pytest.raises(DeliveryFailed, match="address refused: plain http"):
        asyncio.run(delivery.post(target, b"", {}, 5.0, machine))


def test_one_forbidden_address_among_several_stops_the_delivery_before_it_connects() -> None:
    async def run() -> None:
        async def rebound(host: str, port: int) -> list[str]:
            return ["93.184.216.34", "127.0.0.1"]

        async with receiver(answer(b"HTTP/1.1 200 OK\r\n\r\n")) as (port, requests):
            target = address.parse(f"https://example.com:{port}/")
            with pytest.raises(DeliveryFailed, match="address refused"):
                await delivery.post(target, b"", {}, 2.0, resolver=rebound)
            assert requests == []

    asyncio.run(run())


def test_the_connection_goes_to_the_checked_address_with_the_name_verified(tmp_path: Path) -> None:
    """TLS is checked against the name in the URL although the connection is made by address."""
    server_tls, client_tls = certificate("example.test", tmp_path)

    async def here(host: str, port: int) -> list[str]:
        assert host in ("example.test", "other.test")
        return ["127.0.0.1"]

    async def run() -> None:
        async with receiver(answer(b"HTTP/1.1 200 OK\r\n\r\n"), server_tls) as (port, requests):
            for host, works in (("example.test", True), ("other.test", False)):
                target = address.parse(f"https://{host}:{port}/", HERE)
                post = delivery.post(target, b"{}", {}, 5.0, resolver=here, tls=client_tls)
                if works:
                    assert (await post).status == 200
                else:
                    with pytest.raises(DeliveryFailed, match="CERTIFICATE_VERIFY_FAILED"):
                        await post
            assert len(requests) == 1
            assert b"host: example.test:" in requests[0].lower()

    asyncio.run(run())


def certificate(name: str, directory: Path) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    signed = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(
            x509.SubjectAlternativeName(
                [x509.DNSName(name), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
            ),
            critical=False,
        )
        .sign(key, hashes.SHA256())
    )
    file = directory / "certificate.pem"
    file.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        + signed.public_bytes(serialization.Encoding.PEM)
    )
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(file)
    return server, ssl.create_default_context(cafile=str(file))


def test_a_name_that_does_not_resolve_is_a_failure() -> None:
    async def nowhere(host: str, port: int) -> list[str]:
        raise OSError("no such name")

    with pytest.raises(DeliveryFailed, match="no such name"):
        asyncio.run(
            delivery.post(address.parse("https://example.com/"), b"", {}, 2.0, resolver=nowhere)
        )


def test_localhost_resolves_without_leaving_the_machine() -> None:
    addresses = asyncio.run(machine("localhost", 80))
    assert addresses
    for one in addresses:
        assert ipaddress.ip_address(one).is_loopback
