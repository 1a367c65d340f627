"""Which webhook addresses are called, and which never."""

from __future__ import annotations

import pytest

from millstream import allowlists
from millstream.control.subscriptions import address
from millstream.control.subscriptions.address import AddressRefused


@pytest.mark.parametrize(
    "url",
    [
        "https://example.com/hook",
        "https://example.com:8443",
        "https://93.184.216.34/hook",
        "https://[2606:2800:220:1:248:1893:25c8:1946]/hook",
    ],
)
def test_allowed(url: str) -> None:
    address.parse(url)


@pytest.mark.parametrize(
    "url",
    [
        "http://localhost/hook",  # this machine, which nobody has named
        "http://127.0.0.1:8080/hook",
        "http://127.9.9.9/hook?x=1",
        "http://[::1]:99/",
        "http://10.0.0.1/hook",  # plain http
        "http://93.184.216.34/hook",
        "http://example.com/hook",
        "http://[::ffff:127.0.0.1]/",
        "http://0.0.0.0/",
        "http://localhost.example.com/",
        "https://10.0.0.1/",  # private
        "https://172.16.0.1/",
        "https://192.168.1.1/",
        "https://100.64.0.1/",
        "https://[fd00::1]/",
        "https://127.0.0.1/",
        "https://[::1]/",
        "https://localhost/",
        "https://api.localhost/",
        "https://169.254.169.254/latest/meta-data",  # link-local and metadata
        "https://[fe80::1]/",
        "https://metadata.google.internal/",
        "https://[fd00:ec2::254]/",
        "https://224.0.0.1/",  # multicast, unspecified, reserved, broadcast
        "https://[ff02::1]/",
        "https://0.0.0.0/",
        "https://[::]/",
        "https://240.0.0.1/",
        "https://255.255.255.255/",
        "https://192.0.2.1/",
        "https://[::ffff:10.0.0.1]/",  # IPv4 in IPv6 clothes
        "https://[::ffff:93.184.216.34]/",
        "https://[::10.0.0.1]/",
        "https://[64:ff9b::a00:1]/",
        "https://[64:ff9b::7f00:1]/",
        "https://[64:ff9b:1::8.8.8.8]/",
        "https://[2002:a00:1::1]/",
        "https://[2001:0:a00:1::1]/",
        "https://2130706433/",  # other spellings of 127.0.0.1
        "https://0177.0.0.1/",
        "https://0x7f.0.0.1/",
        "https://127.1/",
        "https://printer/",  # names of local networks
        "https://nas.local/",
        "https://user:secret@example.com/",
        "https://example.com/#part",
        "https://example.com:0/",
        "https://example.com:99999/",
        "https://exa mple.com/",
        "https://example.com/\r\nX: y",
        "https://ex\\ample.com/",
        "https:///path",
        "ftp://example.com/",
        "javascript:alert(1)",
        "https://" + "a" * 3000 + ".com/",
        "",
        "https://[::1",
        "https://exämple.com/",
    ],
)
def test_refused(url: str) -> None:
    with pytest.raises(AddressRefused):
        address.parse(url)


@pytest.mark.parametrize(
    "resolved",
    ["10.0.0.1", "127.0.0.1", "169.254.169.254", "::1", "fe80::1%eth0", "::ffff:8.8.8.8"],
)
def test_a_public_name_may_not_resolve_inwards(resolved: str) -> None:
    with pytest.raises(AddressRefused):
        address.parse("https://example.com/").check_address(resolved)


@pytest.mark.parametrize(
    ("allowed", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:8080/hook"),
        ("127.0.0.1", "https://127.0.0.1/hook"),
        ("127.0.0.1:8080", "http://127.0.0.1:8080/hook"),
        ("10.0.0.0/8:80, 192.168.0.0/16", "http://10.1.2.3/"),
        ("::1", "http://[::1]:99/"),
        ("[::1]:99", "http://[::1]:99/"),
        ("localhost", "http://localhost:5/"),
        ("Hooks.Internal.:443", "https://hooks.internal/"),
        ("127.0.0.1", "http://localhost:5/"),  # its addresses are checked when it is called
        ("10.0.0.0/8", "https://nas.local/"),
        ("::ffff:127.0.0.1", "http://[::ffff:127.0.0.1]/"),
        ("0.0.0.0/0", "http://169.254.169.254/"),
    ],
)
def test_what_the_operator_names_is_allowed(allowed: str, url: str) -> None:
    address.parse(url, allowlists.places(allowed))


@pytest.mark.parametrize(
    ("allowed", "url"),
    [
        ("127.0.0.1", "http://127.0.0.2/"),
        ("127.0.0.1:8080", "http://127.0.0.1/"),
        ("127.0.0.1", "http://[::ffff:127.0.0.1]/"),
        ("127.0.0.1", "https://[64:ff9b::7f00:1]/"),
        ("127.0.0.1", "http://[::1]/"),
        ("127.0.0.1:80", "http://localhost:81/"),
        ("localhost", "http://127.0.0.1/"),
        ("localhost:80", "http://localhost:81/"),
        ("hooks.internal", "https://other.internal/"),
        ("internal", "https://other.internal/"),
        ("10.0.0.0/8", "https://169.254.169.254/"),
        ("0.0.0.0/0", "http://0.0.0.0/"),  # nobody is there to name
        ("0.0.0.0/0", "http://224.0.0.1/"),
        ("0.0.0.0/0", "http://255.255.255.255/"),
        ("::/0", "http://[ff02::1]/"),
        ("127.0.0.1", "http://2130706433/"),
    ],
)
def test_what_is_named_allows_nothing_else(allowed: str, url: str) -> None:
    with pytest.raises(AddressRefused):
        address.parse(url, allowlists.places(allowed))


def test_a_refusal_says_how_to_allow_it() -> None:
    with pytest.raises(AddressRefused, match=r"--webhook-allow \[::1\]:80$"):
        address.parse("http://[::1]/")


def test_plain_http_may_not_leave_what_is_named() -> None:
    target = address.parse("http://localhost/", allowlists.places("127.0.0.0/8,::1"))
    target.check_address("127.0.0.1")
    target.check_address("::1")
    with pytest.raises(AddressRefused):
        target.check_address("8.8.8.8")


def test_a_url_is_taken_apart() -> None:
    target = address.parse("https://Example.com:8443/a/b?c=d")
    assert (target.host, target.port, target.authority, target.request_target, target.secure) == (
        "example.com",
        8443,
        "example.com:8443",
        "/a/b?c=d",
        True,
    )
