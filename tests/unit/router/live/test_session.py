"""Live sessions on virtual time, over pools that hear words as a real model was seen to."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from cluster.common.messages import SAMPLE_RATE
from router.live.interface import (
    SpeechStarted,
    SpeechStopped,
    TextDelta,
    TurnCommitted,
    TurnCompleted,
    TurnSegment,
)
from router.live.policies import Policy
from tests.support.live.played_speech import Floats, LoudIsSpeech, pcm_of_words, spoken
from tests.support.live.talks import (
    GAP_S,
    MANUAL,
    POLICIES,
    TALK,
    VAD,
    plain,
    run_talk,
    said,
    virtually,
)
from tests.support.live.virtual_sessions import PlayedEngine, Told, listen, say, speak


@pytest.mark.parametrize("policy", POLICIES)
def test_all_words_come_once_and_in_order(policy: Policy) -> None:
    told, _ = virtually(run_talk(TALK, MANUAL, policy, commit=True))
    assert plain(told.texts[0]) == said(TALK)
    assert len(told.of(TextDelta)) > 5


@pytest.mark.parametrize("policy", POLICIES)
def test_words_come_while_people_speak(policy: Policy) -> None:
    """Each word within 2.5 s of its end, compute included, with no pause to wait for."""
    talk = " ".join(f"w{n}" for n in range(24))
    words = spoken(talk)
    told, _ = virtually(run_talk(talk, MANUAL, policy, commit=True))
    n_told = 0
    for at_s, event in told.events:
        if isinstance(event, TextDelta):
            for _ in plain(event.text):
                assert at_s - words[n_told].end_s < 2.5, words[n_told]
                n_told += 1
    assert n_told == len(words)


def test_a_turn_ends_with_its_silence() -> None:
    told, _ = virtually(run_talk("one two three. (1.2) four five.", VAD))
    assert {n: plain(text) for n, text in told.texts.items()} == {
        0: ["one", "two", "three"],
        1: ["four", "five"],
    }
    kinds = [type(event) for _, event in told.events if event.turn == 0]
    assert kinds[0] is SpeechStarted
    assert kinds.index(SpeechStopped) < kinds.index(TurnCommitted) < kinds.index(TurnCompleted)
    started, stopped = told.of(SpeechStarted)[0], told.of(SpeechStopped)[0]
    assert abs(started.audio_start_ms - 200) < 50  # type: ignore[attr-defined]  # 0.5 s less padding
    assert abs(stopped.audio_end_ms - 1900) < 100  # type: ignore[attr-defined]  # 1.4 and 0.5 s


def test_a_turn_is_completed_at_once_when_its_silence_has_passed() -> None:
    """What was decoded in the pause is its end, so that nothing is decoded behind it."""
    told, _ = virtually(run_talk("one two three. (1.5) four.", VAD))
    waited_s = told.when(TurnCompleted, 0) - told.when(SpeechStopped, 0)
    assert waited_s < 0.05


def test_nothing_is_told_of_silence() -> None:
    async def silence() -> tuple[Told, PlayedEngine]:
        played = PlayedEngine(spoken("unsaid"))
        told = await say(played, np.zeros(10 * SAMPLE_RATE, np.int16), VAD)
        await played.close()
        return told, played

    told, played = virtually(silence())
    assert told.events == []
    assert played.pools.encoded == []


def test_a_committed_silence_is_an_empty_turn() -> None:
    async def silence() -> Told:
        played = PlayedEngine(spoken("unsaid"))
        told = await say(played, np.zeros(SAMPLE_RATE, np.int16), MANUAL, commit=True)
        await played.close()
        assert played.pools.encoded == []
        return told

    told = virtually(silence())
    assert [type(event) for _, event in told.events] == [TurnCommitted, TurnCompleted]


def test_a_pushed_file_is_right_too() -> None:
    """Audio that comes all at once, with the commit right behind it."""

    async def push() -> Told:
        words = spoken(" ".join(f"w{n}" for n in range(200)), gap_s=GAP_S)  # without a pause
        played = PlayedEngine(words)
        session = played.engine.open(MANUAL, session_id="live")
        listening = asyncio.ensure_future(listen(session, played.clock))
        session.append(pcm_of_words(words))
        assert session.unsent_s > 60
        assert session.commit() == 0
        await session.drain()
        told = await listening
        await played.close()
        assert max(request.n_samples for request in played.pools.encoded) <= 30 * SAMPLE_RATE
        return told

    told = virtually(push())
    told.check_ends()
    assert plain(told.texts[0]) == [f"w{n}" for n in range(200)]


def test_a_long_speech_is_cut_where_sentences_ended() -> None:
    talk = " ".join(f"a{n} b{n} c{n} d{n} e{n}." for n in range(20))  # 30 s without a pause
    told, played = virtually(run_talk(talk, MANUAL, commit=True, gap_s=GAP_S))
    assert plain(told.texts[0]) == said(talk)
    longest = max(request.n_samples for request in played.pools.encoded)
    assert longest < 12 * SAMPLE_RATE
    segments = told.of(TurnSegment)
    assert " ".join(segment.text for segment in segments).split() == told.texts[0].split()  # type: ignore[attr-defined]
    ends = [segment.end_s for segment in segments]  # type: ignore[attr-defined]
    assert ends == sorted(ends)


def test_what_a_clear_forgets_is_not_told() -> None:
    async def clear() -> Told:
        words = spoken("one two (3.0) three four")
        played = PlayedEngine(words)
        pcm = pcm_of_words(words)
        session = played.engine.open(MANUAL, session_id="live")
        listening = asyncio.ensure_future(listen(session, played.clock))
        half = round(2.0 * SAMPLE_RATE)
        session.append(pcm[: SAMPLE_RATE // 2])
        session.clear()
        await speak(session, pcm[SAMPLE_RATE // 2 : half], played.clock)
        session.clear()
        assert session.commit() is None
        await speak(session, pcm[half:], played.clock)
        session.commit()
        await session.drain()
        told = await listening
        await played.close()
        return told

    told = virtually(clear())
    told.check_ends()
    last = max(event.turn for _, event in told.events)
    assert plain(told.texts[last]) == ["three", "four"]


def test_a_commit_after_the_silence_committed_finds_nothing() -> None:
    async def run() -> None:
        words = spoken("one two three.")
        played = PlayedEngine(words)
        session = played.engine.open(VAD, session_id="live")
        listening = asyncio.ensure_future(listen(session, played.clock))
        await speak(session, pcm_of_words(words, 1.5), played.clock)
        assert session.commit() is None
        await session.drain()
        told = await listening
        assert len(told.of(TurnCompleted)) == 1
        await played.close()

    virtually(run())


def test_sessions_share_a_detector_and_do_not_mix() -> None:
    async def run() -> None:
        words = spoken("left one two three (1.0) right four five six")
        played = PlayedEngine(words)
        pcm = pcm_of_words(words)
        left = np.where(pcm < 1004, pcm, 0).astype(np.int16)
        right = np.where(pcm >= 1004, pcm, 0).astype(np.int16)
        both = await asyncio.gather(say(played, left, VAD), say(played, right, VAD))
        assert [plain(told.texts[0]) for told in both] == [
            ["left", "one", "two", "three"],
            ["right", "four", "five", "six"],
        ]
        await played.close()

    virtually(run())


def test_a_closed_session_leaves_nothing_behind() -> None:
    async def run() -> None:
        words = spoken(TALK)
        played = PlayedEngine(words)
        played.pools.encode_s = lambda nth: 100.0
        session = played.engine.open(MANUAL, session_id="live")
        listening = asyncio.ensure_future(listen(session, played.clock))
        await speak(session, pcm_of_words(words)[: 2 * SAMPLE_RATE], played.clock)
        await session.close()
        await session.close()
        await listening
        assert played.pools.cancelled == len(played.pools.encoded) == 1
        assert played.engine.observer.sessions == 0
        await played.close()
        assert len(asyncio.all_tasks()) == 1

    virtually(run())


def test_audio_of_which_the_detector_is_never_sure_is_not_kept_for_the_word_behind_it() -> None:
    """Such as a hum, for seconds: the words behind it are decoded all the same."""

    class Hum(LoudIsSpeech):
        def run(self, frames: Floats, h: Floats, c: Floats) -> tuple[Floats, Floats, Floats]:
            heard, h, c = super().run(frames, h, c)
            return np.maximum(heard, np.float32(0.4)), h, c

    async def run() -> Told:
        words = spoken("one two three.", at_s=8.0)
        played = PlayedEngine(words, detector=Hum())
        pcm = pcm_of_words(words)
        pcm[pcm == 0] = 9  # silence itself is not shown to the detector
        told = await say(played, pcm, VAD)
        await played.close()
        return told

    told = virtually(run())
    assert plain(told.texts[0]) == ["one", "two", "three"]
    assert abs(told.of(SpeechStarted)[0].audio_start_ms - 7400) < 100  # type: ignore[attr-defined]
