"""Names and values that the messages of several roles have in common."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Role = Literal["encoder", "decoder"]
ROLES: tuple[Role, ...] = ("encoder", "decoder")
Task = Literal["transcribe", "translate"]
FinishReason = Literal["stop", "length"]
Payload = Literal["cross_kv", "encoder_states"]  # what an encoder hands to a decoder
Priority = Literal["live", "interactive", "bulk"]  # how urgent a window is, the most urgent first


@dataclass(frozen=True, slots=True)
class Location:
    """Where a worker runs: Ray's id of the node, and the name of the NVLink domain it is in."""

    node: str = ""
    domain: str = ""
