"""Choosing a transport, and making a worker's end of it: the one place that names them all.

"auto" is NIXL where it loads (Linux), else the transport within one process. To ask which one
that is imports no wire, and so not torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from cluster.errors import ConfigurationError
from cluster.kv.transfer_config import TransferConfig
from cluster.kv.wires.nixl_agent import load_api

if TYPE_CHECKING:
    from cluster.kv.wires.wire import Wire


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
    if chosen == "memory":
        from cluster.kv.wires.memory_wire import MemoryWire

        return MemoryWire(config)
    from cluster.kv.wires.nixl_wire import NixlWire

    return NixlWire(config)
