"""CUDA streams and events of a role, and nothing at all on a CPU.

Each role computes on a stream of its own, never on the default one, so that both can share a GPU
within one process. There the decoder's goes first: its kernels are short, and what it leaves idle
the encoder fills.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

ENCODE_PRIORITY = 0  # CUDA's lowest; smaller goes first
DECODE_PRIORITY = -1


def new_stream(device: torch.device | str, priority: int = 0) -> torch.cuda.Stream | None:
    """A stream of `device`; None on a CPU."""
    if torch.device(device).type != "cuda":
        return None
    return torch.cuda.Stream(device, priority)  # type: ignore[no-untyped-call]


def new_event(blocking: bool = False) -> torch.cuda.Event:
    """blocking: who waits for it sleeps instead of spinning."""
    return torch.cuda.Event(blocking=blocking)  # type: ignore[no-untyped-call]


def on_stream(stream: torch.cuda.Stream | None) -> AbstractContextManager[Any]:
    """While open, this thread's work goes to `stream`; does nothing for None."""
    return nullcontext() if stream is None else torch.cuda.stream(stream)


def synchronize(device: torch.device | str) -> None:
    """Wait for all that every stream of `device` was given; a CPU has always done it."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
