"""Which webhook addresses may be called: the guard against requests into private networks.

Sits below `delivery` and `manager`. The URL is checked when it is registered, without asking anybody for its name: a
client is not to learn what names stand for here. The addresses of the name are checked at every delivery, and the
connection goes to a checked address, so a name that later points inwards gains nothing. Invariants: https to public
unicast addresses, and what the setting `webhook_allow` names; nothing else. One forbidden address among several
refuses them all.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from millstream.allowlists import HOST_NAME, IpAddress
from millstream.control.limits import URL_CHARS_MAX

if TYPE_CHECKING:
    from millstream.allowlists import Place

_LOCAL_SUFFIXES: Final = (".localhost", ".local", ".internal", ".lan", ".home.arpa", ".intranet")
_NAT64: Final = ipaddress.IPv6Network("64:ff9b::/96")
_NAT64_LOCAL: Final = ipaddress.IPv6Network("64:ff9b:1::/48")
_BROADCAST: Final = ipaddress.IPv4Address("255.255.255.255")
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
    allowed: tuple[Place, ...] = ()

    def check_address(self, address: str) -> None:
        """Raises unless a connection to this address may be made for this target."""
        ip = ipaddress.ip_address(address.partition("%")[0])
        if ip.is_multicast or ip.is_unspecified or ip == _BROADCAST:
            raise AddressRefused(f"{ip} is not the address of a single machine")
        if self.is_named or any(place.contains(ip, self.port) for place in self.allowed):
            return
        if not self.secure:
            raise self.refused("plain http is only for targets that are named")
        if not _is_public(ip):
            raise self.refused(f"{ip} is not a public address")

    def check_host(self) -> None:
        """What can be said of the host before its name is looked up."""
        ip = _literal(self.host)
        if ip is not None:
            self.check_address(self.host)
            return
        name = self.host.rstrip(".")
        if not HOST_NAME.fullmatch(self.host) or name.rpartition(".")[2].isdigit():
            raise AddressRefused(f"{self.host!r} is neither a host name nor an address")
        if self.is_named or any(p.network and p.has_port(self.port) for p in self.allowed):
            return  # the addresses will tell
        if not self.secure:
            raise self.refused("plain http is only for targets that are named")
        if name == "localhost" or "." not in name or name.endswith(_LOCAL_SUFFIXES):
            raise self.refused(f"{self.host!r} is a name of a local network")

    @property
    def is_named(self) -> bool:
        return any(place.is_named(self.host, self.port) for place in self.allowed)

    def refused(self, reason: str) -> AddressRefused:
        """For whoever runs the server and tries it out: how to go on."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return AddressRefused(
            f"{reason}; the server's setting webhook_allow can name it: "
            f"--webhook-allow {host}:{self.port}"
        )


def parse(url: str, allowed: tuple[Place, ...] = ()) -> Target:
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
    target = Target(
        secure=secure,
        host=parts.hostname.lower(),
        port=port if port is not None else (443 if secure else 80),
        authority=parts.netloc.lower(),
        request_target=(parts.path or "/") + (f"?{parts.query}" if parts.query else ""),
        allowed=allowed,
    )
    target.check_host()
    return target


def _literal(host: str) -> IpAddress | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _is_public(ip: IpAddress) -> bool:
    if isinstance(ip, ipaddress.IPv6Address):
        if ip.ipv4_mapped is not None or ip.teredo is not None or ip.is_site_local:
            return False
        if ip in _NAT64_LOCAL:
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
