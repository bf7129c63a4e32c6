"""Live sessions on virtual time, over pools that hear words as a real model was seen to."""

from __future__ import annotations

import asyncio
import weakref
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from cluster.common.messages import SAMPLE_RATE, Pcm
from cluster.common.model.text.quality import compression_ratio
from cluster.planning.virtual_time import run_virtually
from router.live.interface import (
    LiveConfig,
    SemanticVad,
    ServerVad,
    SpeechStarted,
    SpeechStopped,
    TextDelta,
    TurnCommitted,
    TurnCompleted,
    TurnSegment,
)
from router.live.partial_transcript import Policy
from router.live.session import LiveSession
from router.speakers.live import SessionVoices
from tests.support.live.played_speech import (
    Floats,
    LoudIsSpeech,
    SlowToHear,
    pcm_of_words,
    spoken,
)
from tests.support.live.virtual_sessions import (
    GAP_S,
    MANUAL,
    POLICIES,
    TALK,
    VAD,
    PlayedEngine,
    listen,
    numbered,
    plain,
    play,
    speak,
    speak_all,
)


@pytest.mark.parametrize("policy", POLICIES)
def test_who_repeats_a_word_loses_none(policy: Policy) -> None:
    """Updates that repeat themselves confirm nothing, but the last one does."""

    def repeats(played: PlayedEngine) -> None:
        played.pools.ratio = compression_ratio

    talk = " ".join(["no"] * 30)
    told, _ = play(talk, policy=policy, prepare=repeats)
    assert told.words == plain(talk)


@pytest.mark.parametrize(
    ("policy", "n_words"), [*product(POLICIES, (4, 9)), (POLICIES[0], 14), (POLICIES[0], 40)]
)
def test_text_that_takes_all_tokens_of_its_updates_is_continued(
    policy: Policy, n_words: int
) -> None:
    """Words of 35 tokens, 92 a second: an update has 24 and 16 a second, a final one 224."""
    words = spoken(" ".join(f"{index:034d}" for index in range(n_words)), gap_s=GAP_S)
    told, _ = play(words, policy=policy)
    assert told.words == [word.text for word in words]


@pytest.mark.parametrize("policy", POLICIES)
def test_words_come_while_people_speak(policy: Policy) -> None:
    """Each word within 2.5 s of its end, compute included, with no pause to wait for."""
    words = numbered(24)
    told, _ = play(words, policy=policy)
    assert told.words == [word.text for word in words]
    told_at = [
        at_s
        for at_s, event in told.events
        if isinstance(event, TextDelta)
        for _ in plain(event.text)
    ]
    for at_s, word in zip(told_at, words, strict=True):
        assert at_s - word.end_s < 2.5, word


def test_a_turn_ends_with_its_silence() -> None:
    """What was decoded in the pause is its end, so that nothing is decoded behind it."""
    told, _ = play("one two three. (1.2) four five.", VAD)
    assert {n: plain(text) for n, text in told.texts.items()} == {
        0: ["one", "two", "three"],
        1: ["four", "five"],
    }
    kinds = [type(event) for _, event in told.events if event.turn == 0]
    assert kinds[0] is SpeechStarted
    assert kinds.index(SpeechStopped) < kinds.index(TurnCommitted) < kinds.index(TurnCompleted)
    assert told.when(TurnCompleted, 0) - told.when(SpeechStopped, 0) < 0.05
    assert abs(told.of(SpeechStarted)[0].audio_start_ms - 200) < 50  # 0.5 s less padding
    assert abs(told.of(SpeechStopped)[0].audio_end_ms - 1900) < 100  # 1.4 and 0.5 s


@pytest.mark.parametrize(
    ("config", "kinds"),
    [(VAD, []), (MANUAL, [TurnCommitted, TurnCompleted])],
    ids=["nothing is told", "a commit makes an empty turn"],
)
def test_silence_is_not_decoded(config: LiveConfig, kinds: list[type]) -> None:
    silence = np.zeros(10 * SAMPLE_RATE, np.int16)

    async def send(session: LiveSession, pcm: Pcm, played: PlayedEngine) -> None:
        await speak(session, pcm, played.clock)
        if config is MANUAL:
            session.commit()

    told, played = play("unsaid", config, send, pcm=silence)
    assert [type(event) for _, event in told.events] == kinds
    assert played.pools.encoded == []


def test_a_pushed_file_is_right_too() -> None:
    """Audio that comes all at once, with the commit right behind it."""

    async def push(session: LiveSession, pcm: Pcm, played: PlayedEngine) -> None:
        session.append(pcm)
        assert session.unsent_s > 60
        assert session.commit() == 0

    words = numbered(200, GAP_S)
    told, played = play(words, client=push)
    assert max(request.n_samples for request in played.pools.encoded) <= 30 * SAMPLE_RATE
    assert told.words == [word.text for word in words]


def test_a_long_speech_is_cut_where_sentences_ended() -> None:
    talk = " ".join(f"a{n} b{n} c{n} d{n} e{n}." for n in range(20))  # 30 s without a pause
    told, played = play(spoken(talk, gap_s=GAP_S))
    assert plain(told.texts[0]) == plain(talk)
    assert max(request.n_samples for request in played.pools.encoded) < 12 * SAMPLE_RATE
    segments = told.of(TurnSegment)
    assert " ".join(segment.text for segment in segments).split() == told.texts[0].split()
    ends = [segment.end_s for segment in segments]
    assert ends == sorted(ends)


def test_what_a_clear_forgets_is_not_told() -> None:
    async def clear(session: LiveSession, pcm: Pcm, played: PlayedEngine) -> None:
        half = 2 * SAMPLE_RATE
        session.append(pcm[: SAMPLE_RATE // 2])
        session.clear()
        await speak(session, pcm[SAMPLE_RATE // 2 : half], played.clock)
        session.clear()
        assert session.commit() is None
        await speak(session, pcm[half:], played.clock)
        session.commit()

    told, _ = play("one two (3.0) three four", client=clear)
    last = max(event.turn for _, event in told.events)
    assert plain(told.texts[last]) == ["three", "four"]


def test_a_turn_that_is_cleared_while_its_voice_is_heard_has_no_more_segments() -> None:
    hearing = asyncio.Event()

    async def hear(_: Pcm) -> None:
        hearing.set()
        await asyncio.sleep(1.0)

    async def clear(session: LiveSession, pcm: Pcm, played: PlayedEngine) -> None:
        speaking = asyncio.ensure_future(speak(session, pcm, played.clock))
        await hearing.wait()
        session.clear()
        await speaking
        session.commit()

    def prepare(played: PlayedEngine) -> None:
        played.engine.voices = lambda: SessionVoices(hear, 0.15)

    told, _ = play(TALK, replace(MANUAL, diarize=True), clear, prepare=prepare)
    assert all(one.turn != told.of(TurnCompleted)[0].turn for one in told.of(TurnSegment))


def test_a_closed_session_leaves_nothing_behind() -> None:
    async def run() -> None:
        words = spoken(TALK)
        played = PlayedEngine(words)
        played.pools.encode_s = lambda nth: 100.0
        session = played.engine.open(MANUAL, session_id="live")
        listening = asyncio.ensure_future(listen(session, played.clock))
        await speak(session, pcm_of_words(words)[: 2 * SAMPLE_RATE], played.clock)
        last = np.zeros(SAMPLE_RATE, np.int16)
        session.append(last)
        held = weakref.ref(last)
        del last
        await session.close()
        await session.close()
        assert held() is None
        await listening
        assert played.pools.cancelled == len(played.pools.encoded) == 1
        assert not played.engine.sessions
        await played.close()
        assert len(asyncio.all_tasks()) == 1

    run_virtually(run())


def test_audio_of_which_the_detector_is_never_sure_is_not_kept_for_the_word_behind_it() -> None:
    """Such as a hum, for seconds: the words behind it are decoded all the same."""

    class Hum(LoudIsSpeech):
        def run(self, frames: Floats, h: Floats, c: Floats) -> tuple[Floats, Floats, Floats]:
            heard, h, c = super().run(frames, h, c)
            return np.maximum(heard, np.float32(0.4)), h, c

    words = spoken("one two three.", at_s=8.0)
    pcm = pcm_of_words(words)
    pcm[pcm == 0] = 9  # silence itself is not shown to the detector
    told, _ = play(words, VAD, pcm=pcm, detector=Hum())
    assert told.words == ["one", "two", "three"]
    assert abs(told.of(SpeechStarted)[0].audio_start_ms - 7400) < 100


# ---- configurations ----


def test_semantic_turns_wait_for_the_end_of_a_sentence() -> None:
    config = LiveConfig(language="en", turn_detection=SemanticVad("high"))
    # the pools end every text with a full stop where the audio ends, so both pauses end a turn
    told, _ = play("one two three. (1.2) four five (1.2) six.", config)
    assert len(told.of(TurnCompleted)) == 3


def test_windows_are_live_and_carry_the_prompt() -> None:
    config = replace(MANUAL, prompt="before", keywords=("Ada",))
    _, played = play("one two three four five six seven", config)
    requests = [*played.pools.encoded, *played.pools.decoded]
    assert {request.priority for request in requests} == {"live"}
    prompt = played.pools.decoded[0].options.prompt_tokens
    assert played.pools.tokenizer.decode(prompt) == " Ada before"
    assert all(request.audio_key == b"" for request in played.pools.encoded)


def test_a_language_is_sought_among_those_of_the_session() -> None:
    """By the decoder, in the decode that reads the text: no window is decoded twice for it."""
    config = LiveConfig(languages=("de", "fr"), turn_detection=ServerVad())
    told, played = play("one two three.", config)
    asked = [request.options for request in played.pools.decoded]
    assert {options.languages for options in asked} == {("de", "fr")}
    assert asked[0].language is None
    assert len(asked) == len(played.pools.encoded)
    assert told.of(TurnCompleted)


def test_log_probabilities_are_told_where_they_are_asked_for() -> None:
    told, _ = play("one two three four.", replace(MANUAL, logprobs=True))
    completed = told.of(TurnCompleted)[0]
    text = b"".join(bytes(one.bytes) for one in completed.logprobs).decode()
    assert text.strip() == completed.text
    by_delta = [one for delta in told.of(TextDelta) for one in delta.logprobs]
    assert tuple(by_delta) == completed.logprobs


def test_a_configuration_holds_from_the_text_that_follows() -> None:
    """Audio may come before it; a turn that has text keeps its own."""

    async def configure(session: LiveSession, pcm: Pcm, played: PlayedEngine) -> None:
        session.append(pcm[: SAMPLE_RATE // 2])
        session.configure(LiveConfig(language="de", turn_detection=ServerVad(), logprobs=True))
        await speak(session, pcm[SAMPLE_RATE // 2 :], played.clock)

    told, _ = play("one two three. (1.5) four five six.", LiveConfig(language="en"), configure)
    assert [turn.language for turn in told.of(TurnCompleted)] == ["de", "de"]
    assert all(delta.logprobs for delta in told.of(TextDelta))


@pytest.mark.parametrize(("before", "after"), [(MANUAL, VAD), (VAD, MANUAL)])
@pytest.mark.parametrize("is_heard", [False, True])
def test_turn_detection_that_is_turned_on_or_off_loses_no_word(
    before: LiveConfig, after: LiveConfig, is_heard: bool
) -> None:
    """Of audio that no detector has seen, of an utterance that waits, of a word that begins."""

    async def configure(session: LiveSession, pcm: Pcm, played: PlayedEngine) -> None:
        played.pools.encode_s = lambda nth: 4.0
        first = 4 * SAMPLE_RATE
        if is_heard:
            await speak(session, pcm[:first], played.clock)
        else:
            session.append(pcm[:first])
        session.configure(after)
        await speak_all(session, pcm[first:], played)

    told, _ = play("one two three. (2.5) four five six.", before, configure)
    assert told.words == ["one", "two", "three", "four", "five", "six"]


def test_turn_detection_that_is_turned_on_while_a_word_begins_takes_it_whole() -> None:
    async def configure(session: LiveSession, pcm: Pcm, played: PlayedEngine) -> None:
        told, begun = 2 * SAMPLE_RATE, 4 * SAMPLE_RATE  # with 100 ms of "four"
        await speak(session, pcm[:told], played.clock)
        session.commit()
        await speak(session, pcm[told:begun], played.clock)
        session.configure(VAD)
        await speak(session, pcm[begun:], played.clock)

    told, _ = play("one two three. (2.5) four five six.", MANUAL, configure)
    assert told.words == ["one", "two", "three", "four", "five", "six"]


def test_a_commit_behind_a_word_that_begins_takes_it_whole() -> None:
    async def commit(session: LiveSession, pcm: Pcm, played: PlayedEngine) -> None:
        begun = 4 * SAMPLE_RATE  # with 100 ms of "four"
        await speak(session, pcm[:begun], played.clock)
        session.append(pcm[begun:])
        session.commit()

    config = replace(VAD, turn_detection=ServerVad(prefix_padding_ms=0))
    told, _ = play("one two three. (2.5) four five six.", config, commit)
    assert told.words == ["one", "two", "three", "four", "five", "six"]


def test_a_commit_takes_a_word_that_no_detector_has_seen() -> None:
    async def commit(session: LiveSession, pcm: Pcm, played: PlayedEngine) -> None:
        await speak(session, pcm[: SAMPLE_RATE // 2], played.clock)
        await played.clock.sleep(0.1)
        session.append(pcm[SAMPLE_RATE // 2 :])
        assert session.commit() == 0

    told, _ = play(spoken("one", word_s=0.2), VAD, commit, tail_s=0.0)
    assert told.words == ["one"]


@pytest.mark.parametrize("detector", [LoudIsSpeech, SlowToHear])
@pytest.mark.parametrize("silence_ms", [100, 200, 300])
def test_a_word_that_begins_while_a_short_silence_ends_the_turn_is_the_next_turn_s(
    silence_ms: int, detector: type[LoudIsSpeech]
) -> None:
    detection = ServerVad(silence_duration_ms=silence_ms)
    talk = " ".join(f"w{n + 4} ({silence_ms / 1000 + n / 100})" for n in range(-4, 5))
    told, _ = play(talk, replace(VAD, turn_detection=detection), detector=detector())
    assert told.words == plain(talk)
