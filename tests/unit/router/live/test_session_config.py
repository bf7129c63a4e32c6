"""What a live session's configuration changes: turn detection, prompt, probabilities."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from cluster.common.messages import SAMPLE_RATE
from router.live.interface import (
    IdleTimeout,
    LiveConfig,
    SemanticVad,
    ServerVad,
    TextDelta,
    TurnCompleted,
)
from tests.support.live.played_speech import pcm_of_words, spoken
from tests.support.live.talks import MANUAL, VAD, plain, run_talk, virtually
from tests.support.live.virtual_sessions import PlayedEngine, Told, listen, say, speak


def test_semantic_turns_wait_for_the_end_of_a_sentence() -> None:
    config = LiveConfig(language="en", turn_detection=SemanticVad("high"))
    talk = "one two three. (1.2) four five (1.2) six."
    told, _ = virtually(run_talk(talk, config))
    # the pools end every text with a full stop where the audio ends, so both pauses end a turn
    assert len(told.of(TurnCompleted)) == 3


def test_a_quiet_line_is_reported_once() -> None:
    async def run() -> Told:
        words = spoken("one two.")
        played = PlayedEngine(words)
        config = LiveConfig(turn_detection=ServerVad(idle_timeout_ms=3000))
        told = await say(played, pcm_of_words(words, 12.0), config)
        await played.close()
        return told

    told = virtually(run())
    assert [event.turn for event in told.of(IdleTimeout)] == [1]  # type: ignore[attr-defined]
    assert told.texts == {0: told.texts[0]}


def test_windows_are_live_and_carry_the_prompt() -> None:
    config = LiveConfig(language="en", turn_detection=None, prompt="before", keywords=("Ada",))
    _, played = virtually(run_talk("one two three four five six seven", config, commit=True))
    assert {request.priority for request in played.pools.encoded} == {"live"}
    assert {request.priority for request in played.pools.decoded} == {"live"}
    tokenizer = played.pools.tokenizer
    prompt = tokenizer.decode(played.pools.decoded[0].options.prompt_tokens)
    assert prompt == " Ada before"
    assert all(request.audio_key == b"" for request in played.pools.encoded)


def test_log_probabilities_are_told_where_they_are_asked_for() -> None:
    config = LiveConfig(language="en", turn_detection=None, logprobs=True)
    told, _ = virtually(run_talk("one two three four.", config, commit=True))
    completed = told.of(TurnCompleted)[0]
    text = b"".join(bytes(one.bytes) for one in completed.logprobs).decode()  # type: ignore[attr-defined]
    assert text.strip() == completed.text  # type: ignore[attr-defined]
    by_delta = [one for delta in told.of(TextDelta) for one in delta.logprobs]  # type: ignore[attr-defined]
    assert tuple(by_delta) == completed.logprobs  # type: ignore[attr-defined]


def test_a_configuration_holds_from_the_text_that_follows() -> None:
    """Audio may come before it; a turn that has text keeps its own."""

    async def run() -> Told:
        words = spoken("one two three. (1.5) four five six.")
        played = PlayedEngine(words)
        pcm = pcm_of_words(words)
        session = played.engine.open(LiveConfig(language="en"), session_id="live")
        listening = asyncio.ensure_future(listen(session, played.clock))
        session.append(pcm[: SAMPLE_RATE // 2])
        session.configure(LiveConfig(language="de", turn_detection=ServerVad(), logprobs=True))
        await speak(session, pcm[SAMPLE_RATE // 2 :], played.clock)
        await session.drain()
        told = await listening
        await played.close()
        return told

    told = virtually(run())
    assert [turn.language for turn in told.of(TurnCompleted)] == ["de", "de"]  # type: ignore[attr-defined]
    assert all(delta.logprobs for delta in told.of(TextDelta))  # type: ignore[attr-defined]


@pytest.mark.parametrize("is_heard", [False, True])
def test_turn_detection_that_is_turned_on_loses_no_word(is_heard: bool) -> None:
    """Neither of audio that no detector has seen, nor of an utterance that waits to be decoded."""

    async def run() -> Told:
        words = spoken("one two three. (2.5) four five six.")
        played = PlayedEngine(words)
        played.pools.encode_s = lambda nth: 4.0
        pcm = pcm_of_words(words)
        first = 4 * SAMPLE_RATE
        session = played.engine.open(MANUAL, session_id="live")
        listening = asyncio.ensure_future(listen(session, played.clock))
        if is_heard:
            await speak(session, pcm[:first], played.clock)
        else:
            session.append(pcm[:first])
        session.configure(VAD)
        await speak(session, pcm[first:], played.clock)
        await session.drain()
        told = await listening
        await played.close()
        return told

    told = virtually(run())
    told.check_ends()
    text = " ".join(told.texts[turn] for turn in sorted(told.texts))
    assert plain(text) == ["one", "two", "three", "four", "five", "six"]


def test_a_quiet_line_is_reported_after_a_clear_too() -> None:
    async def run() -> Told:
        words = spoken("one two.")
        played = PlayedEngine(words)
        config = LiveConfig(turn_detection=ServerVad(idle_timeout_ms=3000))
        session = played.engine.open(config, session_id="live")
        listening = asyncio.ensure_future(listen(session, played.clock))
        pcm = pcm_of_words(words, 8.0)
        await speak(session, pcm[:SAMPLE_RATE], played.clock)
        session.clear()
        await speak(session, np.zeros(6 * SAMPLE_RATE, np.int16), played.clock)
        await session.drain()
        told = await listening
        await played.close()
        return told

    assert len(virtually(run()).of(IdleTimeout)) == 1
