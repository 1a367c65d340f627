"""What people see of the client: the same names in both, tokens, TLS, how things look in a notebook, every platform."""

from __future__ import annotations

import asyncio
import inspect
import pickle
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

import millstream
from millstream import aio, errors
from millstream.types import Batch, Gap, Record, StreamInfo
from unit.client.scripted import Peer, ScriptedServer, Seen

HEAD = {"Content-Type": "text/plain", "Stream-Next-Offset": "0_5"}
PAIRS = [
    (millstream.Client, aio.AsyncClient),
    (millstream.Stream, aio.AsyncStream),
    (millstream.Producer, aio.AsyncProducer),
    (millstream.Follower, aio.AsyncFollower),
    (millstream.ArrowBatches, aio.AsyncArrowBatches),
]


def attributes(kind: type) -> dict[str, tuple[str, tuple[str, ...]]]:
    """Public names of a class, whether each is a property, and what its calls take."""
    found = {}
    for name in dir(kind):
        if name.startswith("_"):
            continue
        value = inspect.getattr_static(kind, name)
        is_property = isinstance(value, property)
        parameters = () if is_property else tuple(inspect.signature(getattr(kind, name)).parameters)
        shown = "close" if name == "aclose" else name
        found[shown] = ("property" if is_property else "method", parameters)
    return found


@pytest.mark.parametrize(("sync", "asynchronous"), PAIRS, ids=[pair[0].__name__ for pair in PAIRS])
def test_both_clients_have_the_same_attributes(sync: type, asynchronous: type) -> None:
    assert attributes(sync) == attributes(asynchronous)
    assert attributes(sync)


def test_handles_have_the_same_attributes() -> None:
    stream = millstream.connect("http://127.0.0.1:1").stream("a")
    other = aio.connect("http://127.0.0.1:1").stream("a")
    assert set(vars(stream)) == set(vars(other))


# --- tokens ---------------------------------------------------------------------------------------


def authorization(**options: object) -> str | None:
    seen: list[Seen] = []

    def answer(peer: Peer) -> None:
        seen.append(peer.read())
        peer.answer(200, headers=HEAD)

    with ScriptedServer(answer) as server:
        with millstream.connect(server.url, **options) as client:  # type: ignore[arg-type]
            client.stream("a").info()
    return seen[0].headers.get("authorization")


def test_a_token_goes_with_every_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MILLSTREAM_TOKEN", raising=False)
    assert authorization() is None
    assert authorization(token="abc") == "Bearer abc"
    assert authorization(token="abc", headers={"authorization": "Basic x"}) == "Bearer abc"


def test_the_environment_gives_the_token_unless_the_caller_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MILLSTREAM_TOKEN", "from-outside\n")
    assert authorization() == "Bearer from-outside"
    assert authorization(token="mine") == "Bearer mine"
    assert authorization(token="") is None
    assert authorization(headers={"Authorization": "Basic x"}) == "Basic x"
    copy = pickle.loads(pickle.dumps(millstream.connect("http://127.0.0.1:1")))
    assert copy._headers == {"Authorization": "Bearer from-outside"}


@pytest.mark.parametrize("token", ["a b\nc", "ü", "x" * 20_000])
def test_a_token_that_is_none_is_refused_without_showing_it(token: str) -> None:
    with pytest.raises(errors.InvalidArgument) as caught:
        millstream.connect(token=token)
    assert token not in str(caught.value)


# --- TLS ------------------------------------------------------------------------------------------


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .sign(key, hashes.SHA256())
    )
    path = tmp_path / "server.pem"
    path.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        + made.public_bytes(serialization.Encoding.PEM)
    )
    return path


@pytest.fixture
def tls_url(certificate: Path) -> Iterator[str]:
    """A server that answers every HEAD over TLS."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    listener = socket.create_server(("localhost", 0))
    answer = b"HTTP/1.1 200 OK\r\nStream-Next-Offset: 0_7\r\nContent-Type: text/plain\r\n\r\n"

    def serve() -> None:
        while True:
            try:
                plain, _ = listener.accept()
            except OSError:
                return
            try:
                with context.wrap_socket(plain, server_side=True) as connection:
                    while connection.recv(65536):
                        connection.sendall(answer)
            except OSError:
                plain.close()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield f"https://localhost:{listener.getsockname()[1]}"
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join(10)
    assert not thread.is_alive()


def test_a_context_of_the_caller_is_used(tls_url: str, certificate: Path) -> None:
    trusting = ssl.create_default_context(cafile=str(certificate))
    once = millstream.Retry(attempts=1)
    with millstream.connect(tls_url, ssl_context=trusting, retry=once) as client:
        assert client.stream("a").info().tail == "0_7"
    with millstream.connect(tls_url, retry=once) as client:
        with pytest.raises(errors.ConnectionFailed, match=r"TLS: .*certificate"):
            client.stream("a").info()

    async def scenario() -> None:
        async with aio.connect(tls_url, ssl_context=trusting, retry=once) as client:
            assert (await client.stream("a").info()).tail == "0_7"
        async with aio.connect(tls_url, retry=once) as client:
            with pytest.raises(errors.ConnectionFailed, match=r"TLS: .*certificate"):
                await client.stream("a").info()

    asyncio.run(scenario())


# --- notebooks ------------------------------------------------------------------------------------


def test_what_is_shown_in_a_notebook_is_short_and_escaped() -> None:
    time = datetime(2026, 1, 2, tzinfo=UTC)
    record = Record(None, b"<script>" + b"x" * 500, "0_5", number=1234, time=time)
    shown = record._repr_html_()
    assert "&lt;script&gt;" in shown
    assert "<script>" not in shown
    assert "1,234" in shown
    assert "2026-01-02" in shown
    assert len(shown) < 700
    batch = Batch((record,) * 100, "0_9", True, False, "text/plain")
    assert "and 80 more" in batch._repr_html_()
    gap = Record(None, b"", "0_1", gap=Gap("0_1", "0_2", "crash"))
    assert "gap: crash" in gap._repr_html_()


def test_what_is_printed_is_short_and_leaves_out_what_nobody_said() -> None:
    record = Record("ü", b"\xc3\xbc", "0_5")
    assert repr(record) == "Record(value='ü', offset='0_5', final=True)"
    time = datetime(2026, 1, 2, tzinfo=UTC)
    long = Record({"a": "x" * 3000}, b'{"a":"x..."}', "0_6", final=False, number=7, time=time)
    assert repr(long).startswith("Record(value={'a': 'xxx")
    assert "x…, offset='0_6', final=False, number=7, time=datetime" in repr(long)
    assert len(repr(long)) < 350
    gap = Gap("0_1", "0_2", "crash")
    assert repr(Record(None, b"", "0_2", gap=gap)) == (
        f"Record(offset='0_2', final=True, gap={gap!r})"
    )
    batch = Batch((long,) * 100, "0_9", True, False, "text/plain")
    assert repr(batch).count("Record(") == 20
    assert repr(batch).endswith(
        ", and 80 more), offset='0_9', up_to_date=True, closed=False, content_type='text/plain')"
    )
    assert "more" not in repr(Batch((record,), "0_9", True, False, "text/plain"))


def test_producers_and_followers_say_whose_they_are() -> None:
    stream = millstream.connect("http://127.0.0.1:1").stream("a/b")
    made = "p of a/b: 0 acknowledged, 0 pending"
    assert repr(stream.producer("p")) == f"<millstream.Producer {made}>"
    assert repr(stream.follow()) == "<millstream.Follower a/b: nothing yet>"

    async def scenario() -> None:
        other = aio.connect("http://127.0.0.1:1").stream("a/b")
        assert repr(other.producer("p")) == f"<millstream.AsyncProducer {made}>"
        assert repr(other.follow()) == "<millstream.AsyncFollower a/b: nothing yet>"

    asyncio.run(scenario())


def test_info_shows_what_the_server_said_and_nothing_else() -> None:
    info = StreamInfo("shop/<b>", "text/plain", "0_5", records=3)
    assert repr(info) == (
        "StreamInfo(path='shop/<b>', content_type='text/plain', tail='0_5', closed=False, records=3)"
    )
    assert "shop/&lt;b&gt;" in info._repr_html_()
    assert "None" not in info._repr_html_()


# --- platforms ------------------------------------------------------------------------------------


def test_the_client_needs_nothing_that_only_linux_has() -> None:
    """Names and modules that macOS or Windows lack are taken away, then everything is imported and used."""
    code = """
import asyncio, concurrent.futures  # the standard library looks at its own platform
import os, select, selectors, sys
for name in ("fcntl", "resource", "termios", "pwd", "grp", "pty", "tty"):
    sys.modules[name] = None
for name in ("sched_getaffinity", "sched_setaffinity", "sendfile", "memfd_create", "eventfd", "fork", "pipe2"):
    if hasattr(os, name):
        delattr(os, name)
for name in ("poll", "epoll"):
    if hasattr(select, name):
        delattr(select, name)
for name in ("PollSelector", "EpollSelector"):
    if hasattr(selectors, name):
        delattr(selectors, name)
selectors.DefaultSelector = selectors.SelectSelector
import importlib, pkgutil
import millstream
for name in millstream.__all__:
    getattr(millstream, name)
import millstream.client
for found in pkgutil.walk_packages(millstream.client.__path__, "millstream.client."):
    importlib.import_module(found.name)
retry = millstream.Retry(attempts=1)
with millstream.connect(sys.argv[1], retry=retry) as client:
    stream = client.stream("a")
    assert stream.info().tail == "0_5"
    assert stream.append("x" * 100_000) == "0_5"
    with stream.producer("p") as producer:
        producer.append("y")
print("fine")
"""

    def answer(peer: Peer) -> None:
        for _ in range(2):
            peer.read()
            peer.answer(200, headers=HEAD)

    def produced(peer: Peer) -> None:
        peer.read()
        peer.answer(200, headers=HEAD)

    with ScriptedServer(answer, produced) as server:
        done = subprocess.run(
            [sys.executable, "-c", code, server.url],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert done.stdout == "fine\n", done.stderr
