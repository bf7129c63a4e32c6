"""Choosing a transport, and making a worker's end of it: the one place that names them all.

"auto" is NIXL where it loads (Linux), else the transport within one process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from cluster.errors import ConfigurationError
from cluster.kv.transfer_config import TransferConfig
from cluster.kv.wires.memory_wire import MemoryWire
from cluster.kv.wires.nixl_agent import load_api
from cluster.kv.wires.nixl_wire import NixlWire
from cluster.kv.wires.wire import Wire

_WIRES: dict[str, Callable[[TransferConfig], Wire]] = {"memory": MemoryWire, "nixl": NixlWire}


def available_transport() -> Literal["nixl", "memory"]:
    """The best transport that works on this machine."""
    try:
        load_api()
    except ConfigurationError:
        return "memory"
    return "nixl"


def make_wire(config: TransferConfig) -> Wire:
    """A wire of the configured transport, not open yet.

    Raises:
        ConfigurationError: the GPU's allocator does not suit the transport.
    """
    chosen = available_transport() if config.transport == "auto" else config.transport
    return _WIRES[chosen](config)
