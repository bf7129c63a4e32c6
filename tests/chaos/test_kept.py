"""Faults while kept KV is evicted and asked for: every answer is the one asked for alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.chaos.campaign import run_fault
from tests.chaos.faults import Fault, kept_faults
from tests.chaos.kept_load import TIGHT, steady_load
from tests.chaos.load import Load
from tests.chaos.target import Target, local_target

RATE = 4.0  # requests/s


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    with local_target(tmp_path_factory.mktemp("chaos-kept"), env=TIGHT) as running:
        yield running


@pytest.fixture(scope="module")
def load(target: Target) -> Iterator[Load]:
    with steady_load(target.url, RATE, kept=True) as running:
        yield running


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("fault", kept_faults(), ids=lambda fault: fault.name)
def test_no_reader_of_kept_kv_gets_another_window_s(
    target: Target, load: Load, fault: Fault
) -> None:
    outcome = run_fault(fault, target, load, before_s=5.0, watch_s=10.0, is_timed=False)
    assert outcome.is_good, outcome
    assert outcome.hits, "kept KV was read"
    assert outcome.evicted, "and evicted"
