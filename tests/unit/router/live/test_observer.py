"""What happens in live sessions is in the router's metrics."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.common.errors import SequenceFailedError
from cluster.common.messages import SAMPLE_RATE
from cluster.common.metrics import ROUTER_METRICS
from cluster.common.tracing import NO_TRACER, Tracer
from cluster.planning.virtual_time import run_virtually
from router.live.interface import LiveConfig, TextDelta, TurnCompleted, TurnFailed
from tests.support.live.played_speech import pcm_of_words, spoken
from tests.support.live.virtual_sessions import PlayedEngine, Told, say
from tests.support.traced import Traced, id_of, parent_of
from tests.support.workers.counted import Counted

MANUAL = LiveConfig(language="en", turn_detection=None)
WORDS = spoken(" ".join(f"w{n}" for n in range(12)))
PCM = pcm_of_words(WORDS)


def listen_to(tracer: Tracer = NO_TRACER, **pools: Any) -> tuple[Told, Counted, PlayedEngine]:
    """A session of WORDS; `pools` are attributes of the played pools."""
    counted = Counted(ROUTER_METRICS)

    async def work() -> tuple[Told, PlayedEngine]:
        played = PlayedEngine(WORDS, recorder=counted.recorder, tracer=tracer)
        for name, value in pools.items():
            setattr(played.pools, name, value)
        told = await say(played, PCM, MANUAL, commit=True)
        await played.close()
        return told, played

    told, played = run_virtually(work())
    return told, counted, played


def test_updates_turns_and_words_are_counted() -> None:
    told, counted, played = listen_to()
    observer = played.engine.observer
    answered = counted.of("splitscribe_live_updates_total", outcome="answered")
    assert sum(answered) == observer.updates > 3
    assert len(counted.of("splitscribe_live_update_seconds")) == observer.updates
    assert counted.of("splitscribe_live_hop_seconds")[-1] == played.engine.pace.hop_s
    assert counted.of("splitscribe_live_turns_total", outcome="completed") == [1.0]
    audio_s = sum(counted.of("splitscribe_live_audio_seconds_total"))
    assert audio_s == pytest.approx(len(PCM) / SAMPLE_RATE, abs=0.1)
    delays = counted.of("splitscribe_live_word_delay_seconds")
    assert len(delays) >= len(told.of(TextDelta)) > 3
    assert all(0.0 <= delay_s < 3.0 for delay_s in delays)


def test_a_turn_that_fails_is_counted_apart() -> None:
    error = SequenceFailedError("no numbers")
    told, counted, _ = listen_to(fault=lambda nth: error)
    assert told.of(TurnFailed)
    assert counted.of("splitscribe_live_turns_total", outcome="failed") == [1.0]
    assert not counted.of("splitscribe_live_updates_total", outcome="answered")


def test_each_turn_is_a_trace_and_each_update_a_span_of_it() -> None:
    traced = Traced()
    told, _, _ = listen_to(tracer=traced.tracer)
    spans = traced.all()
    turns = [span for span in spans if span.name == "live turn"]
    assert len(turns) == len(told.of(TurnCompleted))
    updates = [span for span in spans if span.name == "live update"]
    assert len(updates) > 3
    numbers = [(span.attributes or {})["splitscribe.update"] for span in updates]
    assert len(set(numbers)) == len(numbers)
    assert {parent_of(span) for span in updates} == {id_of(span) for span in turns}
    for span in (*turns, *updates):
        assert span.attributes is not None
        assert span.attributes["splitscribe.request_id"] == "live"
        assert span.attributes["splitscribe.turn"] == 0
    assert all(parent_of(span) is None for span in turns)
    windows = [span for span in spans if span.name == "window"]
    assert {parent_of(span) for span in windows} <= {id_of(span) for span in updates}
    assert len(windows) == len(updates)
