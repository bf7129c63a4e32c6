"""Checks the URLs that clients ask the server to call, to prevent server-side request forgery.

A host must be allowed by name, and all its addresses must be public or in a network that the
operator allows. The caller must connect to the address that was checked.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from urllib.parse import SplitResult, urlsplit

from cluster.common.errors import ConfigurationError, InvalidRequestError

PORTS = {"http": 80, "https": 443}
MAX_NAME = 253  # characters
NOT_ALLOWED = "url_not_allowed"
_NAME = re.compile(r"[a-z0-9_-]+(?:\.[a-z0-9_-]+)*")
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
# Networks that some supported Python versions call global, but that are not on the public internet.
_NOT_PUBLIC = tuple(
    map(
        ipaddress.ip_network,
        (
            "168.63.129.16/32",  # Azure's WireServer
            "192.0.0.0/24",  # IETF's; Oracle Cloud's metadata service uses it
            "192.88.99.0/24",  # 6to4 relays
            "64:ff9b:1::/48",  # RFC 8215: local NAT64, may lead anywhere
            "2001::/23",  # IETF's
            "3fff::/20",  # documentation
            "5f00::/16",  # segment routing
            "fec0::/10",  # site-local
        ),
    )
)

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network
Resolve = Callable[[str, int], Awaitable[Sequence[str]]]


async def resolve(host: str, port: int) -> Sequence[str]:
    """Return all addresses of a name, by the system's resolver. Raises OSError."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in found]


@dataclass(frozen=True, slots=True)
class Destination:
    host: str
    authority: str  # the value of the Host header
    pinned_url: str  # the URL with the checked address in place of the name


class HostRules:
    def __init__(
        self,
        hosts: Sequence[str],
        private_networks: Sequence[str],
        resolve: Resolve,
    ) -> None:
        """hosts: NAME, NAME:PORT, *.DOMAIN or '*'; without a port 80 and 443 are allowed. Raises
        ConfigurationError for an invalid network.
        """
        self._hosts = [_host_and_port(one) for one in hosts]
        try:
            self._networks = [ipaddress.ip_network(one) for one in private_networks]
        except ValueError as error:
            raise ConfigurationError(f"batches.private_networks: {error}") from error
        self._resolve = resolve

    async def check(self, url: str, param: str) -> Destination:
        """Raises InvalidRequestError for a forbidden URL, and OSError for an unknown host."""
        parts, host, port = _split(url, param)
        if not any(_matches(host, port, *allowed) for allowed in self._hosts):
            raise InvalidRequestError(
                f"This server may not call {host}:{port}. Its operator can allow the host.",
                param=param,
                code=NOT_ALLOWED,
            )
        addresses = await self._resolve(host, port)
        for address in addresses:
            if not self._may_call(ipaddress.ip_address(address.partition("%")[0])):
                raise InvalidRequestError(
                    f"{host} has an address that this server may not call.",
                    param=param,
                    code=NOT_ALLOWED,
                )
        if not addresses:
            raise OSError(f"{host} has no address")
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
    if not address.is_global or address.is_reserved:
        return False
    return not any(address in network for network in _NOT_PUBLIC)


def _inner(address: Address) -> Address | None:
    """Return the IPv4 address embedded in an IPv6 address (NAT64, Teredo, mapped or 6to4)."""
    if isinstance(address, ipaddress.IPv4Address):
        return None
    if address in _NAT64:
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    teredo = address.teredo
    return address.ipv4_mapped or address.sixtofour or (teredo[1] if teredo else None)


def _split(url: str, param: str) -> tuple[SplitResult, str, int]:
    try:
        parts = urlsplit(url)
        port = parts.port or PORTS.get(parts.scheme, 0)
    except ValueError as error:
        raise InvalidRequestError(f"'{param}' is not a URL: {error}", param=param) from None
    if parts.scheme not in PORTS or not parts.hostname:
        raise InvalidRequestError(
            f"'{param}' must be an http or https URL, not {url[:64]!r}", param=param
        )
    if parts.username is not None or parts.password is not None:
        raise InvalidRequestError(f"'{param}' must not hold a name or a password", param=param)
    try:
        return parts, _canonical(parts.hostname), port
    except ValueError:
        raise InvalidRequestError(
            f"'{param}' has no valid host: {parts.hostname[:253]!r}",
            param=param,
            code="invalid_url",
        ) from None


def _canonical(host: str) -> str:
    """Return a DNS name in lower case, or an IPv6 address. Raises ValueError for anything else."""
    if ":" in host:
        return str(ipaddress.IPv6Address(host))
    name = host.rstrip(".").encode("idna").decode().lower()
    # The resolver is less strict: it cuts a name at a zero byte.
    if len(name) > MAX_NAME or not _NAME.fullmatch(name):
        raise ValueError(host)
    return name


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _host_and_port(entry: str) -> tuple[str, int | None]:
    host, colon, port = entry.strip().lower().rpartition(":")
    if not (colon and port.isdigit() and not host.endswith(":")):
        host, port = entry.strip().lower(), ""
    domain = host.removeprefix("*.").strip("[]")
    with suppress(ValueError):  # an invalid entry matches no host
        domain = "*" if domain == "*" else _canonical(domain)
    return ("*." if host.startswith("*.") else "") + domain, int(port) if port else None


def _matches(host: str, port: int, allowed: str, allowed_port: int | None) -> bool:
    if port not in (PORTS.values() if allowed_port is None else (allowed_port,)):
        return False
    if allowed.startswith("*."):
        return host.endswith(allowed[1:])
    return allowed in ("*", host)
