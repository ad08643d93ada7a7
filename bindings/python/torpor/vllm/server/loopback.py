# SPDX-License-Identifier: Apache-2.0
"""The address of another server on this host, for calls that carry the admin key: they must not leave the host.

Only loopback addresses are taken: whatever the host's routes and settings are, these never lead outside. A name is
resolved once, when it is checked; connections go to the addresses that the check saw.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
from dataclasses import dataclass

from aiohttp.abc import AbstractResolver

from torpor.errors import InvalidArgument

_EXAMPLE = "give that of another server of this host, like http://127.0.0.1:8001"
_ON_LOOPBACK = f"let the other server listen on a loopback address, too (--host 0.0.0.0 does), and {_EXAMPLE}"
# Nothing else is parsed: what two parsers of URLs read differently does not match.
_URL = re.compile(r"(https?)://(?:\[([0-9a-f:.]+)\]|([0-9a-z._-]+))(?::([0-9]{1,5}))?(/?)", re.ASCII | re.IGNORECASE)
_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True)
class Loopback(AbstractResolver):
    """A server of this host. For aiohttp it resolves the host of `url`, to what was checked."""

    url: str  # of scheme, host and port alone
    host: str
    addresses: tuple[str, ...]

    async def resolve(self, host: str, port: int = 0, family: int = socket.AF_UNSPEC) -> list[dict]:
        if host != self.host:
            raise OSError(f"{host} was not checked")
        checked = {"hostname": host, "port": port, "proto": 0, "flags": socket.AI_NUMERICHOST}
        return [
            checked | {"host": address, "family": socket.AF_INET6 if ":" in address else socket.AF_INET}
            for address in self.addresses
        ]

    async def close(self) -> None:
        pass


async def checked(to: str) -> Loopback:
    """The server at `to`. InvalidArgument, which says what to give instead, unless its address is a loopback one."""
    found = _URL.fullmatch(to)
    if found is None:
        raise InvalidArgument(f"{to!r} is not the address of a server: {_wrong_with(to)}", _EXAMPLE)
    scheme, v6, name, given = found.group(1).lower(), found.group(2), found.group(3), found.group(4)
    host = (v6 or name).lower()
    port = _PORTS[scheme] if given is None else int(given)
    if not 0 < port < 65536:
        raise InvalidArgument(f"{to!r} is not the address of a server: there is no port {given}", _EXAMPLE)
    addresses = await _resolved() if host == "localhost" else (host,)
    for address in addresses:
        _refuse_others(address, host)
    url = f"{scheme}://{f'[{host}]' if v6 else host}:{port}"
    return Loopback(url, host, addresses)


async def _resolved() -> tuple[str, ...]:
    """What `localhost` is here: the file of hosts may say something else than one expects."""
    try:
        found = await asyncio.get_running_loop().getaddrinfo("localhost", None, type=socket.SOCK_STREAM)
    except OSError as problem:
        raise InvalidArgument(f"this host does not know localhost: {problem}", _EXAMPLE) from None
    return tuple(dict.fromkeys(str(address[0]) for _, _, _, _, address in found))


def _refuse_others(address: str, host: str) -> None:
    named = address if address == host else f"{host}, which is {address} here,"
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        raise InvalidArgument(f"{named} is neither localhost nor a complete address", _EXAMPLE) from None
    mapped = getattr(parsed, "ipv4_mapped", None)
    if mapped is not None:
        raise InvalidArgument(f"{named} is an IPv4 address written as IPv6", f"write it as {mapped}, or {_EXAMPLE}")
    if parsed.is_multicast:
        raise InvalidArgument(f"{named} is a multicast address", _EXAMPLE)
    if parsed.is_unspecified:
        raise InvalidArgument(f"{named} is where a server listens, not where it is asked", _EXAMPLE)
    if not parsed.is_loopback or getattr(parsed, "scope_id", None) is not None:
        raise InvalidArgument(f"{named} is not a loopback address, and the admin key stays on this host", _ON_LOOPBACK)


def _wrong_with(to: str) -> str:
    scheme, separator, rest = to.partition("://")
    if not separator or scheme.lower() not in ("http", "https"):
        return "it does not begin with http:// or https://"
    host, *after = re.split("[/?#]", rest, maxsplit=1)
    if "@" in host:
        return "it has a user"
    if after and after != [""]:
        return "it has more than a host and a port"
    return "it has no host and port as a URL has them"
