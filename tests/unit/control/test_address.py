"""Which webhook addresses are called, and which never."""

from __future__ import annotations

import pytest

from millstream.control.subscriptions import address
from millstream.control.subscriptions.address import AddressRefused


@pytest.mark.parametrize(
    "url",
    [
        "http://localhost/hook",
        "http://127.0.0.1:8080/hook",
        "http://127.9.9.9/hook?x=1",
        "http://[::1]:99/",
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
        "http://10.0.0.1/hook",  # plain http away from this machine
        "http://example.com/hook",
        "http://[::ffff:127.0.0.1]/",
        "http://0.0.0.0/",
        "http://localhost.example.com/",
        "https://10.0.0.1/",  # private
        "https://172.16.0.1/",
        "https://192.168.1.1/",
        "https://100.64.0.1/",
        "https://[fd00::1]/",
        "https://127.0.0.1/",  # loopback has no business with https
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
        "https://[64:ff9b::a00:1]/",
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


def test_localhost_may_not_resolve_outwards() -> None:
    target = address.parse("http://localhost/")
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
