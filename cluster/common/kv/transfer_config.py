"""What the two ends of a transfer have in common: how they are made, and what they report.

`common.kv.exporter` is the encoder's end and `common.kv.importer` the decoder's. Each moves one
payload, which is what its page layout says: cross-attention KV or encoder states.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from cluster.common.settings import Transport

LEASE_S = 10.0  # from publication, or from the last renewal
RENEW_S = 3.0  # how often a decoder renews all its leases of a peer


@dataclass(frozen=True, slots=True)
class TransferConfig:
    """What all exporters and importers of one worker are made with, whatever their payload.

    cluster_key: signs handles; it is the same in all workers of a cluster, and not empty.
    name: role and replica, as in "encoder-0"; an agent's name begins with it.
    device: where the pools lie, "cpu" or "cuda".
    clock: monotonic seconds, for leases, deadlines and reports.
    randbits: a random integer of so many bits, for lease ids, agent names and first generations.
    """

    cluster_key: bytes = field(repr=False)
    name: str
    transport: Transport = "auto"
    device: str = "cpu"
    lease_s: float = LEASE_S
    renew_s: float = RENEW_S
    fetch_timeout_s: float = 10.0
    clock: Callable[[], float] = time.monotonic
    randbits: Callable[[int], int] = secrets.randbits

    def __post_init__(self) -> None:
        if not isinstance(self.cluster_key, bytes) or not self.cluster_key:
            raise ValueError("cluster_key must be non-empty bytes")

    def new_agent_name(self) -> str:
        """A name that no other process has, nor this one after a restart."""
        return f"{self.name}-{os.getpid()}-{self.randbits(32):08x}"


@dataclass(frozen=True, slots=True)
class FetchStats:
    """What one fetch moved, and how long it took from post to verified generation."""

    n_bytes: int
    seconds: float
    transport: str
