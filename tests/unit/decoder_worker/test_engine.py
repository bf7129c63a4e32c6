"""The engine decodes what single sequences give, whatever shares their batch."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from cluster.common.errors import (
    ConfigurationError,
    OverloadedError,
    SequenceFailedError,
    UnsupportedValueError,
    WorkerDrainingError,
)
from cluster.common.kv.connect import kv_layout, states_layout
from cluster.common.model.checkpoint import open_checkpoint
from cluster.common.priorities import BEHIND_ENCODER
from cluster.common.settings import DecoderSettings
from decoder_worker.engine import DecoderEngine
from tests.support.checkpoints import cached_checkpoint
from tests.support.kv.ends import memory_importer
from tests.support.workers.decoder_engines import (
    ANSWER_S,
    KEY,
    Stand,
    assert_same,
    make_stand,
    random_kv,
    random_states,
    wait_until,
)


@pytest.fixture
def stand() -> Iterator[Stand]:
    with make_stand(cached_checkpoint()) as made:
        yield made
        made.assert_all_returned()


def test_a_seed_repeats_and_another_differs(stand: Stand) -> None:
    request = stand.request(0, temperatures=(1.0,), max_new_tokens=40)
    handles = (request.handle, stand.publish(0), stand.publish(0))
    requests = [
        replace(request, handle=handle, options=replace(request.options, seed=seed))
        for seed, handle in zip((1, 1, 2), handles, strict=True)
    ]
    first, again, other = (stand.engine.submit(r).result(ANSWER_S).tokens for r in requests)
    assert first == again != other


@pytest.mark.skipif(sys.platform != "linux", reason="a thread has a priority of its own on Linux")
def test_on_a_cpu_urgent_sequences_among_others_are_decoded_with_the_encoder_s_priority(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, steps, before = stand.engine._loop, [], os.getpriority(os.PRIO_PROCESS, 0)
    step = loop.step

    def noted() -> bool:
        nice = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
        steps.append((nice - before, frozenset(loop.scheduler.classes())))
        return step()

    monkeypatch.setattr(loop, "step", noted)
    request = stand.request(0, max_new_tokens=200)
    later = stand.engine.submit(replace(request, priority="later"))
    wait_until(lambda: len(steps) > 3, "nothing steps")
    stand.engine.submit(stand.request(1, max_new_tokens=8)).result(ANSWER_S)
    later.result(ANSWER_S)
    assert 0 in {nice for nice, classes in steps if "interactive" in classes}
    assert {nice for nice, classes in steps if classes == {"later"}} == {BEHIND_ENCODER}


def test_results_say_where_the_time_went(stand: Stand) -> None:
    result = stand.decode()
    timings = result.timings
    assert timings.transport == "memory"
    assert timings.transfer_bytes == stand.importer.layout.page_bytes
    assert timings.steps == len(result.tokens) - 1
    assert min(timings.queue_s, timings.transfer_s) >= 0
    assert min(timings.prefill_s, timings.decode_s) > 0
    assert len(result.token_logprobs) == len(result.tokens)
    stats = stand.engine.stats()
    assert (stats.finished, stats.steps, stats.tokens) == (1, 11, 12)
    assert stats.transfer_bytes == timings.transfer_bytes


@pytest.mark.parametrize(
    "options",
    [{"language": "xx"}, {"language": None, "languages": ("xx",)}, {"prompt_tokens": (10**6,)}],
)
def test_what_the_model_cannot_do_is_refused_at_once(stand: Stand, options: dict[str, Any]) -> None:
    request = stand.request(0, **options)
    with pytest.raises(UnsupportedValueError):
        stand.engine.submit(request)
    stand.exporter.revoke(request.handle.lease)


def test_english_only_checkpoints_know_their_language() -> None:
    with make_stand(cached_checkpoint("tiny.en"), kv_windows=1, max_batch=1) as made:
        request = made.request(0, language=None, max_new_tokens=2)
        result = made.engine.submit(request).result(ANSWER_S)
        assert result.language == "en"
        wrong = made.request(1, language="en", task="translate")
        with pytest.raises(UnsupportedValueError):
            made.engine.submit(wrong)


@pytest.mark.parametrize("reads_states", [False, True])
def test_what_is_not_a_number_fails_its_sequence_alone(reads_states: bool) -> None:
    with make_stand(cached_checkpoint(), reads_states=reads_states) as stand:
        expected = stand.decode(1)
        layout = stand.exporter.layout
        broken = random_states(stand.checkpoint, 0) if reads_states else random_kv(layout, 0)
        broken[7, 0] = torch.nan
        for language in ("en", None):
            handle = stand.publish(7, broken)
            bad = stand.engine.submit(stand.request(7, handle=handle, language=language))
            assert_same(stand.decode(1), expected)
            with pytest.raises(SequenceFailedError, match="finite"):
                bad.result(ANSWER_S)
        stand.assert_all_returned()


def test_the_waiting_list_is_bounded() -> None:
    with make_stand(cached_checkpoint(), kv_windows=1, max_waiting=2, fetch_timeout_s=60) as made:
        made.exporter.freeze()
        futures = [made.engine.submit(made.request(0))]
        wait_until(lambda: made.engine.stats().loading == 1, "not loading")
        futures += [made.engine.submit(made.request(seed)) for seed in (1, 2)]
        request = made.request(3)
        with pytest.raises(OverloadedError) as refused:
            made.engine.submit(request)
        assert refused.value.retry_after_s
        futures.pop().cancel()
        wait_until(lambda: made.engine.stats().waiting == 1, "not cancelled")
        assert made.engine.load() == made.engine.stats().load
        futures.append(made.engine.submit(request))
        made.exporter.thaw()
        for future in futures:
            assert future.result(ANSWER_S).tokens
        made.assert_all_returned()


def test_parts_that_do_not_fit_are_refused_at_start() -> None:
    checkpoint = open_checkpoint(str(cached_checkpoint()))
    layout = kv_layout(open_checkpoint(str(cached_checkpoint("tiny"))))
    other = memory_importer(layout, 1, cluster_key=KEY)
    small = memory_importer(kv_layout(checkpoint, 100), 3, cluster_key=KEY)
    states = memory_importer(states_layout(checkpoint), 1, cluster_key=KEY)
    for importer, word in (
        (other, "checkpoint"),
        (small, "kv_windows"),
        (states, "also for states"),
    ):
        with pytest.raises(ConfigurationError, match=word):
            DecoderEngine(checkpoint, importer, DecoderSettings())
        importer.close()


def test_drained_and_closed_engines_take_nothing_new() -> None:
    with make_stand(cached_checkpoint()) as made:
        running = made.engine.submit(made.request(0))
        request = made.request(1)
        assert made.engine.drain(ANSWER_S)
        assert running.result(0.5).tokens
        with pytest.raises(WorkerDrainingError):
            made.engine.submit(request)
        made.engine.close()
        made.engine.close()
        assert made.engine.healthy() is not None
        with pytest.raises(WorkerDrainingError):
            made.engine.submit(request)
