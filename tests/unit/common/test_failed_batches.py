"""A batch that raised runs again item by item: culprits fail alone, a lost device fails nobody."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from cluster.common.failed_batches import DeviceLostError, run_batch


class Doubling:
    def __init__(self, bad: int, error: Exception) -> None:
        self._bad, self._error = bad, error
        self.batches: list[list[int]] = []
        self.failed: list[tuple[int, Exception]] = []

    def run(self, items: Sequence[int]) -> list[int]:
        self.batches.append(list(items))
        if self._bad in items:
            raise self._error
        return [2 * item for item in items]

    def fail(self, item: int, error: Exception) -> None:
        self.failed.append((item, error))


def test_a_batch_without_culprits_runs_once_and_an_empty_one_not_at_all() -> None:
    work = Doubling(9, ValueError())
    assert run_batch([1, 2], work.run, work.fail) == [(1, 2), (2, 4)]
    assert run_batch([], work.run, work.fail) == []
    assert work.batches == [[1, 2]]


def test_only_the_culprit_fails_and_with_its_own_error() -> None:
    error = ValueError("this one")
    work = Doubling(2, error)
    assert run_batch([1, 2, 3], work.run, work.fail) == [(1, 2), (3, 6)]
    assert work.batches == [[1, 2, 3], [1], [2], [3]]
    assert work.failed == [(2, error)]


def test_a_lost_device_is_no_item_s_fault() -> None:
    work = Doubling(2, DeviceLostError("an illegal memory access"))
    with pytest.raises(DeviceLostError):
        run_batch([1, 2], work.run, work.fail)
    assert work.batches == [[1, 2]]
    assert not work.failed
