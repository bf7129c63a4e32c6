"""Words are aligned beside the steps: nobody waits for them, and whatever ends them ends well."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future

import pytest

from cluster.common.errors import (
    SequenceFailedError,
    UnsupportedValueError,
    WorkerDrainingError,
)
from cluster.common.messages import DecodeResult, TokenAlignment
from decoder_worker.alignment import PendingAlignment
from tests.support.checkpoints import cached_checkpoint
from tests.support.workers.decoder_engines import (
    ANSWER_S,
    Stand,
    assert_same,
    make_stand,
    wait_until,
)

MAX_BATCH = 2


class Held:
    """Alignments, from their beginning until `may_end` is set; the next one raises `error`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.entered, self.may_end = threading.Event(), threading.Event()
        self.error: Exception | None = None
        find = PendingAlignment.find

        def held(pending: PendingAlignment) -> TokenAlignment:
            self.entered.set()
            assert self.may_end.wait(ANSWER_S)
            if (error := self.error) is not None:
                self.error = None
                raise error
            return find(pending)

        monkeypatch.setattr(PendingAlignment, "find", held)


@pytest.fixture
def stand() -> Iterator[Stand]:
    with make_stand(cached_checkpoint(), max_batch=MAX_BATCH) as made:
        yield made
        made.assert_all_returned()


def submit_held(stand: Stand, held: Held, remaining_s: float = ANSWER_S) -> Future[DecodeResult]:
    """A window that has decoded, and waits for its words."""
    request = stand.request(0, words=True, remaining_s=remaining_s)
    future = stand.engine.submit(request)
    assert held.entered.wait(ANSWER_S)
    return future


def test_others_step_on_and_have_its_rows(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, other = stand.decode(0, words=True), stand.decode(1)
    held = Held(monkeypatch)
    future = submit_held(stand, held)
    scheduler = stand.engine._loop.scheduler
    wait_until(lambda: scheduler.n_free_slots == MAX_BATCH, "its rows are not back")
    assert_same(stand.decode(1, temperatures=(0.0,), best_of=MAX_BATCH), other)
    assert not future.done()
    assert not stand.engine.drain(0.0)
    held.may_end.set()
    assert_same(future.result(ANSWER_S), expected)
    assert expected.alignment is not None


def test_a_text_that_is_known_is_aligned_as_if_it_had_been_sampled(stand: Stand) -> None:
    """Without a step, beside others, and for whoever sends more than fits, a clear no."""
    sampled = stand.decode(0, words=True)
    assert sampled.alignment is not None
    known = {"words": True, "language": "en", "known_text": sampled.alignment.tokens}
    steps = stand.engine.stats().steps
    found, other = stand.decode_all([{"seed": 0, **known}, {"seed": 1, "words": True}])
    assert found.alignment is not None
    assert found.alignment.tokens == sampled.alignment.tokens
    assert found.alignment.times_s == pytest.approx(sampled.alignment.times_s, abs=0.021)
    assert found.alignment.probs == pytest.approx(sampled.alignment.probs, abs=1e-3)
    assert_same(other, stand.decode(1, words=True))
    assert found.timings.steps == 0
    assert stand.engine.stats().steps > steps, "the other one was decoded"
    longest = sampled.alignment.tokens * 448
    assert stand.decode(0, **known | {"known_text": longest[:443]}).alignment is not None
    for wrong in (longest[:444], (50_257,)):
        with pytest.raises(UnsupportedValueError, match="text"):
            stand.decode(0, **known | {"known_text": wrong})


def test_an_alignment_that_raises_fails_its_sequence_alone(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held(monkeypatch)
    held.error = RuntimeError("no path today")
    first = submit_held(stand, held)
    second = stand.engine.submit(stand.request(1, words=True))
    held.may_end.set()
    with pytest.raises(SequenceFailedError, match="no path today"):
        first.result(ANSWER_S)
    assert second.result(ANSWER_S).alignment is not None
    assert stand.engine.healthy() is None


def test_a_close_answers_it_and_waits_for_the_pages_to_be_read(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held(monkeypatch)
    future = submit_held(stand, held)
    closing = threading.Thread(target=stand.engine.close)
    closing.start()
    with pytest.raises(WorkerDrainingError):
        future.result(ANSWER_S)
    assert closing.is_alive()
    held.may_end.set()
    closing.join(ANSWER_S)
    assert not closing.is_alive()
