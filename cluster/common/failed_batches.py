"""What becomes of a batch that raised: each of its items runs again alone, and only culprits fail.

A device that is lost is no item's fault. That error is raised on, so that it ends the worker's
thread, and Serve replaces the replica.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch

logger = logging.getLogger(__name__)

DeviceLostError = torch.AcceleratorError  # CUDA's errors are final for their process

T = TypeVar("T")
R = TypeVar("R")


def run_batch(
    items: Sequence[T],
    run: Callable[[Sequence[T]], Sequence[R]],
    fail: Callable[[T, Exception], None],
) -> list[tuple[T, R]]:
    """Run items together; should that raise, each alone.

    Returns:
        Each item that ran, with its result. `fail` got every other one, with what it raised.
    """
    if not items:
        return []
    try:
        return list(zip(items, run(items), strict=True))
    except Exception as error:
        return list(run_alone(error, items, lambda item: run([item])[0], fail))


def run_alone(
    error: Exception,
    items: Sequence[T],
    run: Callable[[T], R],
    fail: Callable[[T, Exception], None],
) -> Iterator[tuple[T, R]]:
    """Run each item of a batch that raised `error` alone; returns and `fail` as in `run_batch`.

    An item runs when the iterator comes to it.
    """
    if isinstance(error, DeviceLostError):
        raise error
    logger.warning("a batch of %d raised: each runs alone", len(items), exc_info=error)
    for item in items:
        try:
            result = run(item)
        except DeviceLostError:
            raise
        except Exception as own_error:
            fail(item, own_error)
        else:
            yield item, result
