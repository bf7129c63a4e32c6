"""Runs the items of a failed batch again one by one, so that only the culprits fail.

A lost device is no item's fault: that error ends the worker's thread, and Serve replaces it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch

logger = logging.getLogger(__name__)

DeviceLostError = torch.AcceleratorError  # no call of the process succeeds after it

T = TypeVar("T")
R = TypeVar("R")


def run_batch(
    items: Sequence[T],
    run: Callable[[Sequence[T]], Sequence[R]],
    fail: Callable[[T, Exception], None],
) -> list[tuple[T, R]]:
    """Run items together or, if that raises, one by one; `fail` gets those that raise alone."""
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
    """Run the items of a batch that raised `error` one by one, as the iterator proceeds."""
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
