"""Ports for servers that cannot be told to take any free one."""

from __future__ import annotations

import random
import socket

BELOW_EPHEMERAL = range(20_000, 30_000)  # which no program is given that asks for any port


def free_port() -> int:
    """One that nobody has at the moment; another program may take it before you do."""
    while True:
        port = random.choice(BELOW_EPHEMERAL)
        try:
            with socket.create_server(("127.0.0.1", port)):
                return port
        except OSError:
            continue
