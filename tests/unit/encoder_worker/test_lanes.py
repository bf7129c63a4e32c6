"""Windows of other lanes than the urgent one on a CPU: beside it, after it, with the same KV."""

from __future__ import annotations

import time
from concurrent.futures import wait

import pytest

from cluster.common.errors import WorkerDrainingError
from cluster.common.messages import Priority
from tests.support.kv.ends import wait_until
from tests.support.references.hugging_face import make_pcm
from tests.support.workers.encoder_engines import PATIENCE_S, MakeBench


@pytest.mark.parametrize("other", ["later", "bulk"])
def test_a_window_of_another_lane_has_the_same_kv(bench: MakeBench, other: Priority) -> None:
    b = bench(n_windows=12)
    windows = [make_pcm(0.5 + n, seed=n) for n in range(3)]
    futures = [
        [b.submit(pcm, f"{priority}-{n}", priority=priority) for n, pcm in enumerate(windows)]
        for priority in ("interactive", other)
    ]
    wait([*futures[0], *futures[1]], PATIENCE_S)
    for others, bulk in zip(*futures, strict=True):
        handles = others.result(0).handle, bulk.result(0).handle
        largest = (b.kv(handles[0]) - b.kv(handles[1])).abs().max().item()
        assert largest < 1e-5, largest
        assert all(b.engine.revoke(handle) for handle in handles)
    b.exporter.pool.check_integrity()
    assert (b.engine.stats().windows, b.engine.stats().queued) == (6, 0)


@pytest.mark.parametrize("other", ["later", "bulk"])
def test_no_lane_waits_for_the_other(bench: MakeBench, other: Priority) -> None:
    b = bench()
    b.lanes_gate.clear()
    bulk = b.submit(make_pcm(0.3), "bulk", priority=other)
    wait_until(lambda: b.engine.stats().running == 1)
    b.engine.revoke(b.submit(make_pcm(0.4)).result(PATIENCE_S).handle)
    assert not bulk.done()
    assert not b.engine.is_idle()
    held = b.hold()
    b.lanes_gate.set()
    b.engine.revoke(bulk.result(PATIENCE_S).handle)
    assert not held.done()
    b.gate.set()
    b.engine.revoke(held.result(PATIENCE_S).handle)
    wait_until(b.engine.is_idle)


def test_a_bulk_window_can_be_cancelled_and_its_lane_ended(bench: MakeBench) -> None:
    b = bench()
    b.lanes_gate.clear()
    first = b.submit(make_pcm(0.3), "first", priority="bulk")
    wait_until(lambda: b.engine.stats().running == 1)
    second, third = (b.submit(make_pcm(0.3), name, priority="bulk") for name in ("2", "3"))
    assert second.cancel()
    assert b.engine.stats().queued == 1
    b.lanes_gate.set()
    for future in (first, third):
        b.engine.revoke(future.result(PATIENCE_S).handle)
    assert b.engine.stats().windows == 2
    b.exporter.pool.check_integrity()
    b.close()
    with pytest.raises(WorkerDrainingError):
        b.submit(make_pcm(0.3), priority="bulk")


def test_no_batch_takes_less_than_nothing_where_another_lane_was_done_later(
    bench: MakeBench,
) -> None:
    """The seconds are summed up into a counter, which must not fall."""
    b = bench()
    b.engine._loops[0]._found.done_s = time.monotonic() + 100.0
    reply = b.submit(make_pcm(0.3)).result(PATIENCE_S)
    assert reply.timings.encode_s == 0.0
    b.engine.revoke(reply.handle)
    assert b.engine.stats().encode_s == 0.0
