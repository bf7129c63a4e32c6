"""Compile machine code for this CPU by numba, once, and keep it.

An engine builds its kernels before it takes work. Torch, which replaces kernels that do not
compile, rounds differently, and one audio must give one text.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from cluster.common.kernels.cpu.cache import ensure_jit_cache, one_builder

logger = logging.getLogger(__name__)

T = TypeVar("T")

TELL_S = 10.0  # after which the log says what the start waits for


def built(name: str, variant: str, build: Callable[[], T]) -> T | None:
    """Compile or load the kernels of a variant; None, and a warning, if that fails."""
    begun = time.monotonic()
    message = "compiling %s kernels, for a minute or so; later starts only load them"
    telling = threading.Timer(TELL_S, logger.info, (message, name))
    telling.daemon = True
    telling.start()
    try:
        ensure_jit_cache()
        with one_builder(name, variant):
            kernels = build()
        logger.info("%s kernels are ready after %.1f s", name, time.monotonic() - begun)
        return kernels
    except Exception as error:  # torch's operations do the same, slower
        reason = str(error).partition("\n")[0]
        logger.warning("no %s kernels, torch's operations stay: %s", name, reason)
        logger.debug("why", exc_info=True)
        return None
    finally:
        telling.cancel()


def as_array(x: Tensor) -> Any:
    """View a CPU tensor as a NumPy array: bfloat16 as uint16, float8 as uint8."""
    bits = {torch.bfloat16: torch.uint16, torch.float8_e4m3fn: torch.uint8}.get(x.dtype)
    return (x if bits is None else x.view(bits)).numpy()
