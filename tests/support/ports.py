"""Ports for servers that cannot be told to take any free one."""

from __future__ import annotations

import socket


def free_port() -> int:
    """One that nobody has at the moment; another program may take it before you do."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port: int = listening.getsockname()[1]
        return port
