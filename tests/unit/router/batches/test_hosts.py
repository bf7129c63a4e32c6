"""The server calls for its clients only where it may: no request forgery."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from cluster.common.errors import ConfigurationError, InvalidRequestError
from router.batches.hosts import HostRules

PUBLIC = "93.184.216.34"


def rules(*hosts: str, address: str = PUBLIC, networks: Sequence[str] = ()) -> HostRules:
    async def resolve(host: str, port: int) -> Sequence[str]:
        return (PUBLIC, address)

    return HostRules(hosts, networks, resolve)


@pytest.mark.parametrize(
    ("allowed", "url"),
    [
        ("a.example", "https://a.example/x.wav?y=1"),
        ("A.example", "http://a.EXAMPLE./x.wav"),
        ("a.example:9000", "http://a.example:9000/"),
        ("*.example", "https://deep.down.example/"),
        ("*", "https://whatever.test/"),
        ("bücher.example", "https://BÜCHER.example/"),
        ("*.bücher.example", "https://a.xn--bcher-kva.example/"),
        ("a_b", "http://a_b/"),
        ("[2606:2800:220:1:0:0:0:1]", "https://[2606:2800:220:1::1]/"),
        ("[2606:2800:220:1::1]:8443", "https://[2606:2800:220:1::1]:8443/"),
    ],
)
async def test_allowed_hosts_are_called(allowed: str, url: str) -> None:
    assert f"://{PUBLIC}:" in (await rules(allowed).check(url, "url")).pinned_url


@pytest.mark.parametrize("address", [PUBLIC, "2606:4700:4700::1111", "64:ff9b::5db8:d822"])
async def test_public_addresses_are_called(address: str) -> None:
    await rules("*", address=address).check("https://a.example/", "url")


@pytest.mark.parametrize(
    ("allowed", "url"),
    [
        ("a.example", "https://b.example/"),
        ("a.example", "https://a.example:8443/"),
        ("a.example:9000", "http://a.example/"),
        ("*.example", "https://example/"),
        ("*.example", "https://notexample/"),
        ("*", "ftp://a.example/"),
        ("*", "https:///x"),
        ("*", "https://user:word@a.example/"),
        ("*", "https://a.example:99999/"),
        ("*", "http://a.example:22/"),
        ("*", f"http://{'a' * 64}.example/"),
        ("*", "https://[::1/"),
        ("*.example.com", "http://localhost\0.example.com/"),
        ("*", "http://a%2eexample/"),
        ("*", "http://a..example/"),
        ("*", "http://a.example\\@b.example/"),
        ("*", "http://a\ud800.example/"),
        ("*", f"http://{'a.' * 127}example/"),
    ],
)
async def test_other_urls_are_refused(allowed: str, url: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        await rules(allowed).check(url, "file_url")
    assert refused.value.param == "file_url"


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "0.0.0.0"),
        *("100.64.0.1", "224.0.0.1", "255.255.255.255", "::1", "::", "fe80::1%eth0", "fd00::1"),
        *("::ffff:127.0.0.1", "64:ff9b::7f00:1", "2002:7f00:1::", "ff02::1"),
        *("::7f00:1", "fec0::1", "64:ff9b:1::7f00:1", "2001:0:4136:e378:8000:63bf:80ff:fffe"),
        *("192.0.0.192", "192.0.0.9", "168.63.129.16", "192.88.99.1", "3fff::1", "5f00::1"),
        *("::ffff:168.63.129.16", "64:ff9b::c000:c0", "2001:20::1", "fd00:ec2::254"),
        *("240.0.0.1", "198.18.0.1", "192.0.2.1", "::ffff:0:7f00:1"),
    ],
)
async def test_an_address_of_several_that_is_private_is_enough_to_refuse(address: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        await rules("*", address=address).check("https://a.example/", "url")
    assert refused.value.code == "url_not_allowed"
    assert address.partition("%")[0] not in refused.value.message, "what is inside is not told"


async def test_the_operator_may_name_private_networks() -> None:
    inside = rules("store", address="10.1.2.3", networks=["10.1.0.0/16", "169.254.0.0/16"])
    await inside.check("http://store/", "url")
    for address in ("10.2.0.1", "169.254.169.254"):
        with pytest.raises(InvalidRequestError):
            await rules("store", address=address, networks=["10.1.0.0/16"]).check(
                "http://store/", "url"
            )
    with pytest.raises(ConfigurationError, match="private_networks"):
        rules("store", networks=["10.1.2.3/16"])


async def test_it_is_called_at_the_address_that_was_checked() -> None:
    found = await rules("a.example:8080").check("http://a.example:8080/x y?q=1#f", "url")
    assert found.pinned_url == f"http://{PUBLIC}:8080/x y?q=1"
    assert (found.host, found.authority) == ("a.example", "a.example:8080")
