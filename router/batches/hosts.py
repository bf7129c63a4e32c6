"""Which hosts the server may call for its clients, and at which addresses.

A client that names a URL makes the server speak from inside of its network. So a host must be
allowed by name, every address that its name has must be public (or in a network that the operator
names), and the address that was checked is the one that is called. Knows no HTTP.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from urllib.parse import SplitResult, urlsplit

from cluster.common.errors import ConfigurationError, InvalidRequestError

PORTS = {"http": 80, "https": 443}
NOT_ALLOWED = "url_not_allowed"
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_LOCAL_NAT64 = ipaddress.ip_network("64:ff9b:1::/48")  # RFC 8215: leads to what its network likes

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network
Resolve = Callable[[str, int], Awaitable[Sequence[str]]]


async def resolve(host: str, port: int) -> Sequence[str]:
    """All addresses of a name, as the system knows it. Raises OSError."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in found]


@dataclass(frozen=True, slots=True)
class Destination:
    """A URL that may be called.

    host: its name; authority: of its Host header; pinned_url: with the address to call it at in
    place of the name.
    """

    host: str
    authority: str
    pinned_url: str


class HostRules:
    """What is allowed."""

    def __init__(
        self,
        hosts: Sequence[str],
        private_networks: Sequence[str] = (),
        resolve: Resolve = resolve,
    ) -> None:
        """`hosts`: NAME, NAME:PORT, *.DOMAIN or '*'; without a port 80 and 443 are allowed.

        Raises:
            ConfigurationError: a network is none.
        """
        self._hosts = [_host_and_port(one) for one in hosts]
        try:
            self._networks = [ipaddress.ip_network(one) for one in private_networks]
        except ValueError as error:
            raise ConfigurationError(f"batches.private_networks: {error}") from error
        self._resolve = resolve

    async def check(self, url: str, param: str) -> Destination:
        """Where to call `url`.

        param: the request's field that has it, for errors.

        Raises:
            InvalidRequestError: it is no http(s) URL, or leads where it may not.
            OSError: its name is not known.
            ValueError: its name is none, such as one with a zero byte.
        """
        parts, port = _split(url, param)
        host = (parts.hostname or "").rstrip(".")
        if not any(_matches(host, port, *allowed) for allowed in self._hosts):
            raise InvalidRequestError(
                f"This server does not call {host[:253]}:{port}: its operator allows it not.",
                param=param,
                code=NOT_ALLOWED,
            )
        try:
            addresses = await self._resolve(host, port)
        except UnicodeError:
            raise InvalidRequestError(f"'{param}' names no host", param=param) from None
        for address in addresses:
            if not self._may_call(ipaddress.ip_address(address.partition("%")[0])):
                raise InvalidRequestError(
                    f"{host[:253]} has an address that this server does not call.",
                    param=param,
                    code=NOT_ALLOWED,
                )
        if not addresses:
            raise OSError(f"{host[:253]} has no address")
        authority = _bracketed(host)
        if port != PORTS[parts.scheme]:
            authority += f":{port}"
        pinned = parts._replace(netloc=f"{_bracketed(addresses[0])}:{port}", fragment="")
        return Destination(host, authority, pinned._replace(path=parts.path or "/").geturl())

    def _may_call(self, address: Address) -> bool:
        inner = _inner(address)
        if inner is not None:
            return self._may_call(inner)
        if address.is_multicast or address.is_unspecified or address.is_link_local:
            return False
        return _is_public(address) or any(address in network for network in self._networks)


def _is_public(address: Address) -> bool:
    """`is_global`, without what Python counts there though the internet does not have it."""
    if not address.is_global or address.is_reserved:
        return False
    if isinstance(address, ipaddress.IPv4Address):
        return True
    return not address.is_site_local and address not in _LOCAL_NAT64


def _inner(address: Address) -> Address | None:
    """The IPv4 address that an IPv6 one leads to, in each way that there is."""
    if isinstance(address, ipaddress.IPv4Address):
        return None
    if address in _NAT64:
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    teredo = address.teredo
    return address.ipv4_mapped or address.sixtofour or (teredo[1] if teredo else None)


def _split(url: str, param: str) -> tuple[SplitResult, int]:
    try:
        parts = urlsplit(url)
        port = parts.port or PORTS.get(parts.scheme, 0)
    except ValueError as error:
        raise InvalidRequestError(f"'{param}' is no URL: {error}", param=param) from None
    if parts.scheme not in PORTS or not parts.hostname:
        raise InvalidRequestError(
            f"'{param}' must be an http or https URL, not {url[:64]!r}", param=param
        )
    if parts.username is not None or parts.password is not None:
        raise InvalidRequestError(f"'{param}' must not hold a name or a password", param=param)
    return parts, port


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _host_and_port(entry: str) -> tuple[str, int | None]:
    host, colon, port = entry.strip().lower().rpartition(":")
    if colon and port.isdigit() and not host.endswith(":"):
        return host.strip("[]"), int(port)
    return entry.strip().lower().strip("[]"), None


def _matches(host: str, port: int, allowed: str, allowed_port: int | None) -> bool:
    if port not in (PORTS.values() if allowed_port is None else (allowed_port,)):
        return False
    if allowed.startswith("*."):
        return host.endswith(allowed[1:])
    return allowed in ("*", host)
