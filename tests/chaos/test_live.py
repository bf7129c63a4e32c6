"""Faults while four sessions speak: no wrong word, none twice, and every session goes on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cluster.demo.samples import sample_text, words_of
from tests.chaos.campaign import run_fault
from tests.chaos.faults import Fault, Freeze, Kill
from tests.chaos.host_faults import bad_link
from tests.chaos.live_load import CLOSED, LiveLoad, live_texts
from tests.chaos.load import CLIPS, Load
from tests.chaos.several_hosts import several_hosts
from tests.chaos.soak import LIVE_RATE
from tests.chaos.target import Target, local_target
from tests.support.hosts import missing_for_hosts


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    with local_target(tmp_path_factory.mktemp("chaos-live")) as running:
        yield running


@pytest.fixture(scope="module")
def load(target: Target) -> Iterator[Load]:
    texts = live_texts(target.url)
    assert words_of(texts["short"]) == words_of(sample_text("short"))
    for clip in CLIPS:
        said, true = words_of(texts[clip]), words_of(sample_text(clip))
        assert abs(len(said) - len(true)) <= 0.1 * len(true), texts[clip]
    with LiveLoad(target.url, texts, LIVE_RATE) as running:
        yield running


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "fault",
    [Kill(kind="encoder"), Kill(kind="decoder"), Freeze(kind="encoder"), Freeze(kind="decoder")],
    ids=lambda fault: fault.name,
)
def test_no_session_pays_for_a_worker(target: Target, load: Load, fault: Fault) -> None:
    if reason := fault.possible(target):
        pytest.skip(reason)
    outcome = run_fault(fault, target, load, before_s=5.0, watch_s=10.0, is_timed=False)
    assert outcome.sent > 0
    assert outcome.is_good, outcome


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_router_takes_only_its_own_sessions(target: Target, load: Load) -> None:
    n_before = len(load.sent)
    outcome = run_fault(
        Kill(kind="router"), target, load, before_s=5.0, watch_s=10.0, is_timed=False
    )
    sent = load.sent[n_before:]
    assert any(one.verdict == "right" for one in sent)
    others = [one for one in sent if one.verdict not in ("right", "refused")]
    assert all(one.detail.startswith(CLOSED) for one in others), others
    assert not outcome.left_over


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_no_session_pays_for_a_cut_link() -> None:
    if reason := missing_for_hosts():
        pytest.skip(reason)
    with several_hosts() as target:
        texts = live_texts(target.url)
        with LiveLoad(target.url, texts, LIVE_RATE) as load:
            outcome = run_fault(
                bad_link("cut", 100),
                target,
                load,
                before_s=8.0,
                watch_s=20.0,
                is_timed=False,
            )
    assert outcome.sent > 0
    assert outcome.is_good, outcome
