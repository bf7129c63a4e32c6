"""No request pays for a fault: the short form of `make chaos`, and all of it on kept KV."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.chaos.campaign import recovery_s, run_fault
from tests.chaos.faults import Both, Fault, Freeze, FullSpool, Kill, kept_faults
from tests.chaos.load import TIGHT, Load, Sent, steady_load
from tests.chaos.target import Target, local_target
from tests.e2e.conftest import wait_until

RATE, KEPT_RATE = 1.5, 4.0  # requests/s


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    with local_target(tmp_path_factory.mktemp("chaos"), env=TIGHT) as running:
        yield running


@pytest.fixture(scope="module")
def load(target: Target) -> Iterator[Load]:
    with steady_load(target.url, RATE) as running:
        yield running


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "fault",
    [
        Both(first=Kill(kind="encoder"), second=Freeze(kind="audio")),
        pytest.param(
            Both(first=Kill(kind="decoder"), second=FullSpool(hold_s=2.0)), marks=pytest.mark.slow
        ),
        Kill(kind="router"),
    ],
    ids=lambda fault: fault.name,
)
def test_no_request_is_lost_and_nothing_left_over(target: Target, load: Load, fault: Fault) -> None:
    if reason := fault.possible(target):
        pytest.skip(reason)
    outcome = run_fault(fault, target, load, before_s=3.0, watch_s=5.0, is_timed=False)
    assert outcome.sent > 0
    assert outcome.is_good, outcome


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_routers_that_all_die_leave_nothing_behind(target: Target, load: Load) -> None:
    load.burst(40)
    wait_until(lambda: any(one["running"] for one in target.workers("decoder")), 30, "work")
    for router in target.processes("router"):
        router.kill()
    wait_until(lambda: not target.missing(), 60, "new routers")
    assert target.left_over() == []
    wait_until(lambda: load.n_in_flight == 0, 60, "the end of what was in flight")


@pytest.fixture(scope="module")
def repeated(target: Target) -> Iterator[Load]:
    with steady_load(target.url, KEPT_RATE, kept=True) as running:
        yield running


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("fault", kept_faults(), ids=lambda fault: fault.name)
def test_no_reader_of_kept_kv_gets_another_window_s(
    target: Target, repeated: Load, fault: Fault
) -> None:
    outcome = run_fault(fault, target, repeated, before_s=5.0, watch_s=10.0, is_timed=False)
    assert outcome.is_good, outcome
    assert outcome.hits, "kept KV was read"
    assert outcome.evicted, "and evicted"


def answers(times_s: list[float]) -> list[Sent]:
    return [
        Sent(number, "short", ended_s - 1.0, ended_s, "right", "", [200])
        for number, ended_s in enumerate(times_s)
    ]


def test_recovery_is_counted_to_the_first_good_span() -> None:
    """One answer a second, but none from 10 to 18: good again with the span of 5 s that has 4."""
    sent = answers([float(s) for s in range(40) if not 10 <= s < 18])
    assert recovery_s(sent, 10.0, 40.0, 1.0) == pytest.approx(7.0, abs=1.0)
    assert recovery_s(sent, 20.0, 40.0, 1.0) == 0.0
    assert recovery_s(sent[:10], 10.0, 40.0, 1.0) is None
    late = answers([float(s) for s in range(40) if not 20 <= s < 25])
    assert recovery_s(late, 10.0, 40.0, 1.0) == pytest.approx(14.0, abs=1.0)
