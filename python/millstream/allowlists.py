"""Lists of network places in settings: the webhook targets and the origins of pages that an operator allows.

Where it sits: below `settings`, which refuses a list that is wrong; `control` asks whether a place is on it.
Invariant: what is not on a list is not allowed by it; an entry is never wider than it reads.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from typing import Final

IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address
IpNetwork = ipaddress.IPv4Network | ipaddress.IPv6Network

HOST_NAME: Final = re.compile(r"(?!-)[a-z0-9_-]{1,63}(?<!-)(\.(?!-)[a-z0-9_-]{1,63}(?<!-))*\.?")
_BRACKETED: Final = re.compile(r"\[([0-9a-f:./]+)\](:[0-9]+)?")
_ORIGIN: Final = re.compile(r"(https?)://(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(?::([0-9]{1,5}))?")
_DEFAULT_PORTS: Final = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class Place:
    """One entry of `webhook_allow`: a network or a host name, at one port or at all of them."""

    network: IpNetwork | None
    name: str
    port: int | None

    def has_port(self, port: int) -> bool:
        return self.port is None or self.port == port

    def is_named(self, host: str, port: int) -> bool:
        return self.network is None and self.name == host.rstrip(".") and self.has_port(port)

    def contains(self, ip: IpAddress, port: int) -> bool:
        # An IPv4 address inside an IPv6 one is another address, which only an IPv6 network contains.
        return self.network is not None and ip in self.network and self.has_port(port)


def places(text: str) -> tuple[Place, ...]:
    """The entries of `127.0.0.1:9000, 10.0.0.0/8, [::1]:9000, hooks.internal`; `ValueError` says what is wrong."""
    return tuple(_place(entry) for entry in _entries(text))


def origins(text: str) -> tuple[str, ...]:
    """The origins of `https://app.example, http://localhost:3000`, as browsers write them."""
    return tuple(_origin(entry) for entry in _entries(text))


def _entries(text: str) -> list[str]:
    return [entry for part in text.split(",") if (entry := part.strip().lower())]


def _place(entry: str) -> Place:
    bracketed = _BRACKETED.fullmatch(entry)
    if bracketed is not None:
        host, port_text = bracketed[1], (bracketed[2] or "")[1:]
    elif entry.count(":") > 1:
        host, port_text = entry, ""
    else:
        host, colon, port_text = entry.partition(":")
        if colon and not port_text:
            raise ValueError(f"{entry!r} has no port after its colon")
    port = _port(entry, port_text) if port_text else None
    try:
        network = ipaddress.ip_network(host)
    except ValueError as error:
        numeric = host.rstrip(".").rpartition(".")[2].isdigit()
        if bracketed or numeric or "/" in host or not HOST_NAME.fullmatch(host):
            raise ValueError(
                f"{entry!r} is not an address, network or host name: {error}"
            ) from error
        return Place(None, host.rstrip("."), port)
    if network.is_multicast or network.is_unspecified:
        raise ValueError(f"{entry!r} is not an address that can be called")
    return Place(network, "", port)


def _port(entry: str, text: str) -> int:
    if not (text.isascii() and text.isdigit()) or not 1 <= int(text[:6]) <= 65535:
        raise ValueError(f"{entry!r} has an invalid port")
    return int(text)


def _origin(entry: str) -> str:
    match = _ORIGIN.fullmatch(entry)
    if match is None:
        raise ValueError(
            f"{entry!r} is not an origin; write scheme and host, such as https://app.example"
        )
    scheme, host, port = match.groups()
    if port is None or _port(entry, port) == _DEFAULT_PORTS[scheme]:
        return f"{scheme}://{host}"  # browsers leave the usual port out
    return f"{scheme}://{host}:{int(port)}"
