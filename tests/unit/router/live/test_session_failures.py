"""Live sessions whose updates fail, are late, or are overtaken: no word is lost for it.

And what the router's metrics and traces tell of sessions.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from cluster.common.errors import OverloadedError, SequenceFailedError, UnsupportedValueError
from cluster.common.messages import SAMPLE_RATE, Pcm
from cluster.common.settings import LiveSettings
from cluster.planning.virtual_time import run_virtually
from router.live.interface import LiveConfig, SpeechStarted, TextDelta, TurnCompleted, TurnFailed
from router.live.session import LiveSession
from tests.support.live.played_speech import SlowToHear, pcm_of_words, spoken
from tests.support.live.virtual_sessions import (
    GAP_S,
    MANUAL,
    TALK,
    VAD,
    PlayedEngine,
    Told,
    converse,
    listen,
    numbered,
    plain,
    play,
    speak,
)
from tests.support.traced import Traced, id_of, parent_of


def pools(
    fault: Callable[[PlayedEngine, int], Exception | None] = lambda played, nth: None,
    encode_s: Callable[[int], float] = lambda nth: 0.05,
) -> Callable[[PlayedEngine], None]:
    """Makes the pools fail at decodes, and take their time for encodes, by their numbers."""

    def prepare(played: PlayedEngine) -> None:
        played.pools.fault = lambda nth: fault(played, nth)
        played.pools.encode_s = encode_s

    return prepare


def test_a_lost_update_costs_no_word() -> None:
    lost = SequenceFailedError("lost")
    prepare = pools(lambda played, nth: lost if 3 <= nth < 14 and nth != 8 else None)
    told, _ = play(TALK, prepare=prepare)
    assert told.words == plain(TALK)


def test_an_error_that_nothing_helps_ends_its_turn_alone() -> None:
    error = UnsupportedValueError("no such language")
    prepare = pools(lambda played, nth: error if played.clock.monotonic() < 2.4 else None)
    told, played = play("one two three. (1.2) four five six.", VAD, prepare=prepare)
    assert isinstance(told.of(TurnFailed)[0].error, UnsupportedValueError)
    for outcome in ("failed", "completed"):
        assert played.counted.of("splitscribe_live_turns_total", outcome=outcome) == [1.0]
    assert plain(told.texts[1]) == ["four", "five", "six"]


def test_an_update_that_hangs_is_overtaken() -> None:
    words = numbered(30)
    told, played = play(words, prepare=pools(encode_s=lambda nth: 100.0 if nth == 4 else 0.05))
    assert told.words == [word.text for word in words]
    assert played.pools.cancelled == 1
    assert played.n_updates("overtaken") == 1


def test_load_makes_updates_rare_and_then_refuses_sessions() -> None:
    async def run(encode_s: float) -> PlayedEngine:
        words = numbered(40, GAP_S)
        played = PlayedEngine(words, settings=LiveSettings(max_hop_s=2.0))
        played.pools.encode_s = lambda nth: encode_s
        told = await converse(played, pcm_of_words(words))
        assert told.words == [word.text for word in words]
        return played

    async def compare() -> None:
        quick, busy = await run(0.05), await run(0.8)
        assert quick.engine.pace.hop_s == 0.5
        assert busy.n_updates("answered") < quick.n_updates("answered")
        assert busy.engine.pace.hop_s > 1.0
        assert not busy.engine.pace.is_overloaded
        for _ in range(20):  # of many sessions
            busy.engine.pace.record(6.0)
        with pytest.raises(OverloadedError) as refused:
            busy.engine.open(MANUAL, session_id="one more")
        assert refused.value.retry_after_s
        await busy.clock.sleep(60.0)
        await busy.engine.open(MANUAL, session_id="later").close()
        for played in (quick, busy):
            await played.close()

    run_virtually(compare())


@pytest.mark.parametrize("config", [MANUAL, VAD])
@pytest.mark.parametrize("encode_s", [0.05, 1.0, 4.0, 10.0])
@pytest.mark.parametrize("pause_s", [0.46, 0.52, 0.6])
def test_words_do_not_depend_on_how_long_answers_take(
    config: LiveConfig, encode_s: float, pause_s: float
) -> None:
    """Nor on a detector that hears a word when the pause before it seems to have ended a turn."""
    talk = f"one two three ({pause_s}) four five ({pause_s}) six seven eight."
    prepare = pools(encode_s=lambda nth: encode_s)
    told, _ = play(talk, config, prepare=prepare, tail_s=1.0, detector=SlowToHear())
    assert told.words == plain(talk)


def test_an_utterance_without_confirmed_words_is_cut_between_words() -> None:
    """Its updates fail; only the decodes that end an utterance succeed."""
    error = UnsupportedValueError("no")
    prepare = pools(
        lambda played, nth: (
            error if len(played.pools.decoded[-1].options.temperatures) == 1 else None
        )
    )
    words = numbered(120, GAP_S)  # 45 s without a pause
    told, _ = play(words, prepare=prepare)
    assert told.words == [word.text for word in words]


def test_a_mistake_of_ours_ends_its_session_alone() -> None:
    async def run() -> tuple[Told, Told]:
        words = spoken("one two three.")
        played, pcm = PlayedEngine(words), pcm_of_words(words)
        broken = played.engine.open(VAD, session_id="broken")

        def fail(turn: object) -> bool:
            raise RuntimeError("a mistake")

        listening = asyncio.ensure_future(listen(broken, played.clock))
        await speak(broken, pcm[:SAMPLE_RATE], played.clock)
        broken._detector.add_probabilities = fail  # type: ignore[assignment, method-assign]
        broken.append(pcm[SAMPLE_RATE:])
        told_by_broken = await listening
        told = await converse(played, pcm, VAD)
        await played.close()
        return told_by_broken, told

    broken, told = run_virtually(run())
    assert isinstance(broken.events[0][1], SpeechStarted)
    assert isinstance(broken.events[-1][1], TurnFailed)
    assert told.words == ["one", "two", "three"]


# ---- metrics and traces ----


def test_updates_turns_and_words_are_counted() -> None:
    words = numbered(12)
    told, played = play(words)
    counted = played.counted
    n_answered = played.n_updates("answered")
    assert n_answered > 3
    assert len(counted.of("splitscribe_live_update_seconds")) == n_answered
    assert counted.of("splitscribe_live_hop_seconds")[-1] == played.engine.pace.hop_s
    assert counted.of("splitscribe_live_turns_total", outcome="completed") == [1.0]
    audio_s = sum(counted.of("splitscribe_live_audio_seconds_total"))
    assert audio_s == pytest.approx(words[-1].end_s + 1.5, abs=0.1)
    delays = counted.of("splitscribe_live_word_delay_seconds")
    assert len(delays) >= len(told.of(TextDelta)) > 3
    assert all(0.0 <= delay_s < 3.0 for delay_s in delays)


def test_each_turn_is_a_trace_and_each_update_a_span_of_it() -> None:
    traced = Traced()
    told, _ = play(numbered(12), tracer=traced.tracer)
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


def test_a_turn_that_is_cleared_before_it_was_told_of_ends_its_span() -> None:
    async def clear(session: LiveSession, pcm: Pcm, played: PlayedEngine) -> None:
        session.append(pcm[: SAMPLE_RATE // 2])
        session.clear()
        assert [span.name for span in traced.all()] == ["live turn"]

    traced = Traced()
    told, _ = play("one two", client=clear, tracer=traced.tracer)
    assert told.events == []
