"""Which webhook addresses may be called: the guard against requests into private networks.

Sits below `delivery` and `manager`. The URL is checked when it is registered; the addresses its name stands
for are checked again at every delivery, and the connection goes to a checked address, so a name that
later points inwards gains nothing. Invariants: https to public unicast addresses only, except plain http
to this machine's loopback, for development; one forbidden address among several refuses them all.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from millstream.control.limits import URL_CHARS_MAX

IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address

_NAME: Final = re.compile(r"(?!-)[a-z0-9_-]{1,63}(?<!-)(\.(?!-)[a-z0-9_-]{1,63}(?<!-))*\.?")
_LOCAL_SUFFIXES: Final = (".localhost", ".local", ".internal", ".lan", ".home.arpa", ".intranet")
_NAT64: Final = ipaddress.IPv6Network("64:ff9b::/96")
_PRINTABLE: Final = re.compile(r"[\x21-\x7e]+")


class AddressRefused(Exception):  # noqa: N818
    """A webhook address that this server does not call; the text says why."""


@dataclass(frozen=True, slots=True)
class Target:
    """A webhook URL taken apart. `host` is bare (no brackets), `authority` is what Host says."""

    secure: bool
    host: str
    port: int
    authority: str
    request_target: str
    loopback: bool

    def check_address(self, address: str) -> None:
        ip = ipaddress.ip_address(address.partition("%")[0])
        if self.loopback:
            if not ip.is_loopback:
                raise AddressRefused(f"{self.host} stands for {ip}, which is not loopback")
        else:
            _require_public(ip)


def parse(url: str) -> Target:
    """The target of a webhook URL that may be registered; `AddressRefused` otherwise."""
    if len(url) > URL_CHARS_MAX or not _PRINTABLE.fullmatch(url) or "\\" in url:
        raise AddressRefused("webhook.url must be printable ASCII of at most 2048 characters")
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise AddressRefused(f"webhook.url is not a URL: {error}") from error
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise AddressRefused("webhook.url must be an https:// URL with a host")
    if "@" in parts.netloc or parts.fragment:
        raise AddressRefused("webhook.url must not carry credentials or a fragment")
    if port == 0:
        raise AddressRefused("webhook.url names port 0")
    secure = parts.scheme == "https"
    host = parts.hostname.lower()
    loopback = not secure
    _check_host(host, loopback)
    return Target(
        secure=secure,
        host=host,
        port=port if port is not None else (443 if secure else 80),
        authority=parts.netloc.lower(),
        request_target=(parts.path or "/") + (f"?{parts.query}" if parts.query else ""),
        loopback=loopback,
    )


def _check_host(host: str, loopback: bool) -> None:
    ip = _literal(host)
    if loopback:
        if host != "localhost" and (ip is None or not ip.is_loopback or _is_mapped(ip)):
            raise AddressRefused("plain http is allowed for localhost only; use https")
        return
    if ip is not None:
        _require_public(ip)
        return
    name = host.rstrip(".")
    if not _NAME.fullmatch(host) or name.rpartition(".")[2].isdigit():
        raise AddressRefused(f"{host!r} is neither a host name nor an address")
    if name == "localhost" or "." not in name or name.endswith(_LOCAL_SUFFIXES):
        raise AddressRefused(f"{host!r} is a name of a local network")


def _literal(host: str) -> IpAddress | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _is_mapped(ip: IpAddress) -> bool:
    return isinstance(ip, ipaddress.IPv6Address) and ip.ipv4_mapped is not None


def _require_public(ip: IpAddress) -> None:
    if not _is_public(ip):
        raise AddressRefused(f"{ip} is not a public address")


def _is_public(ip: IpAddress) -> bool:
    if isinstance(ip, ipaddress.IPv6Address):
        if ip.ipv4_mapped is not None or ip.teredo is not None or ip.is_site_local:
            return False
        inner = ip.sixtofour
        if ip in _NAT64:
            inner = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
        if inner is not None:
            return _is_public(inner)
    return ip.is_global and not (
        ip.is_multicast
        or ip.is_reserved
        or ip.is_private
        or ip.is_link_local
        or ip.is_loopback
        or ip.is_unspecified
    )
