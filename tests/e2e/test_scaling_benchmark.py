"""`benchmark.serving.scaling` on workers that answer at once: it counts every request."""

from __future__ import annotations

import pytest

from benchmark.serving.scaling import Sample, instant, measure

N, IN_FLIGHT = 20, 4


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_what_a_request_costs_is_told_by_kind_of_process() -> None:
    sample = Sample()
    with instant() as server:
        for _ in range(2):
            sample.add(*measure(server, N, IN_FLIGHT))
    told = sample.report()
    assert told["requests_per_s"] > 0
    assert {"router", "audio", "client"} <= set(told["cpu_ms"])
    assert told["router_and_proxy_ms"] == pytest.approx(told["cpu_ms"]["router"], abs=0.02)
