"""Words are aligned beside the steps: nobody waits for them, and whatever ends them ends well."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.common.errors import (
    SequenceFailedError,
    UnsupportedValueError,
    WorkerDrainingError,
)
from cluster.common.messages import DecodeResult, Priority, TokenAlignment
from decoder_worker import loop
from decoder_worker.alignment import PendingAlignment
from decoder_worker.cpu.compiled import path_finder
from decoder_worker.scheduling.sequence import DecodeSequence, SequenceState, given_attempt
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


def test_no_text_waits_for_what_finds_words_to_be_compiled() -> None:
    path_finder.cache_clear()
    with make_stand(cached_checkpoint(), max_batch=MAX_BATCH):
        assert path_finder.cache_info().currsize


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


def test_texts_that_end_together_are_fed_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    n_texts, text, fed = 5, tuple(range(300, 312)), list[int]()
    monkeypatch.setattr(loop, "TOKENS_AT_ONCE", 2 * len(text))
    with make_stand(cached_checkpoint(), max_batch=n_texts, kv_windows=n_texts) as stand:
        scheduler, runner = stand.engine._loop.scheduler, stand.engine._loop._runner
        start, align = scheduler.start_running, runner.align

        def start_together() -> list[DecodeSequence]:
            return start() if len(scheduler._ready()) == n_texts else []

        def count(sequences: Sequence[DecodeSequence]) -> list[PendingAlignment | None]:
            fed.append(len(sequences))
            return align(sequences)

        monkeypatch.setattr(scheduler, "start_running", start_together)
        monkeypatch.setattr(runner, "align", count)
        asked = {"words": True, "known_text": text}
        for result in stand.decode_all([{"seed": seed, **asked} for seed in range(n_texts)]):
            assert result.alignment is not None
            assert result.alignment.tokens == text
        assert fed == [2, 2, 1]
        stand.assert_all_returned()


def test_the_most_urgent_text_is_fed_first() -> None:
    def ended(priority: Priority, n_tokens: int) -> Any:
        attempts = [given_attempt((300,) * n_tokens)]
        return SimpleNamespace(state=SequenceState.RUNNING, priority=priority, attempts=attempts)

    texts = [ended("bulk", 200), ended("later", 400), ended("live", 30), ended("later", 600)]
    gone = SimpleNamespace(state=SequenceState.FINISHED)
    waiting: Any = SimpleNamespace(_unaligned=[*texts, gone])
    order = [texts[2], texts[1], texts[3], texts[0]]
    for turn in (order[:2], order[2:3], order[3:], []):
        assert loop.DecodeLoop._take_unaligned(waiting) == turn


def test_a_text_that_is_known_is_aligned_as_if_it_had_been_sampled(stand: Stand) -> None:
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


def test_words_of_the_most_urgent_text_are_found_first(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, ended = Held(monkeypatch), list[str]()

    def note(priority: Priority, _: Future[DecodeResult]) -> None:
        ended.append(priority)

    def is_fed(n_before: int) -> bool:
        return len(stand.engine._loop._wordless) == n_before

    priorities: tuple[Priority, ...] = ("bulk", "bulk", "later", "interactive")
    futures = []
    for n_before, priority in enumerate(priorities):
        request = replace(stand.request(0, words=True), priority=priority)
        futures.append(stand.engine.submit(request))
        futures[-1].add_done_callback(partial(note, priority))
        assert held.entered.wait(ANSWER_S)
        wait_until(partial(is_fed, n_before), "its text was not fed")
    held.may_end.set()
    for future in futures:
        assert future.result(ANSWER_S).alignment is not None
    assert ended == ["bulk", "interactive", "later", "bulk"]


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
