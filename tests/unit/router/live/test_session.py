"""Live sessions on virtual time, over pools that hear words as a real model was seen to."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from cluster.errors import OverloadedError, SequenceFailedError, UnsupportedValueError
from cluster.messages import SAMPLE_RATE
from cluster.settings import LiveSettings
from router.live.interface import (
    IdleTimeout,
    LiveConfig,
    SemanticVad,
    ServerVad,
    SpeechStarted,
    SpeechStopped,
    TextDelta,
    TurnCommitted,
    TurnCompleted,
    TurnFailed,
    TurnSegment,
)
from router.live.policies import AttentionPeak, LocalAgreement, Policy
from tests.support.live.played_speech import LoudIsSpeech, SlowToHear, pcm_of_words, spoken
from tests.support.live.virtual_sessions import PlayedEngine, Told, listen, say, speak
from tests.support.virtual_time import run_virtually

TALK = (
    "the first words come (0.2) and more of them. then another sentence follows here (0.9) "
    "after a long pause. it goes on and on (0.3) until it ends."
)
POLICIES: list[Policy] = [AttentionPeak(), LocalAgreement()]
GAP_S = 0.08  # between words that are cut apart: less than any pause
MANUAL = LiveConfig(language="en", turn_detection=None)
VAD = LiveConfig(language="en", turn_detection=ServerVad())


def plain(text: str) -> list[str]:
    """The words without what a pause may add to them."""
    return text.replace(".", "").split()


def said(talk: str) -> list[str]:
    return [word for word in plain(talk) if not word.startswith("(")]


async def _run(
    talk: str,
    config: LiveConfig,
    policy: Policy | None = None,
    *,
    commit: bool = False,
    gap_s: float = 0.0,
) -> tuple[Told, PlayedEngine]:
    words = spoken(talk, gap_s=gap_s)
    played = PlayedEngine(words, policy or AttentionPeak())
    told = await say(played, pcm_of_words(words, 1.5), config, commit=commit)
    await played.close()
    return told, played


def virtually(work: Coroutine[Any, Any, Any]) -> Any:
    return run_virtually(work)


@pytest.mark.parametrize("policy", POLICIES)
def test_all_words_come_once_and_in_order(policy: Policy) -> None:
    told, _ = virtually(_run(TALK, MANUAL, policy, commit=True))
    assert plain(told.texts[0]) == said(TALK)
    assert len(told.of(TextDelta)) > 5


@pytest.mark.parametrize("policy", POLICIES)
def test_words_come_while_people_speak(policy: Policy) -> None:
    """Each word within 2.5 s of its end, compute included, with no pause to wait for."""
    talk = " ".join(f"w{n}" for n in range(24))
    words = spoken(talk)
    told, _ = virtually(_run(talk, MANUAL, policy, commit=True))
    n_told = 0
    for at_s, event in told.events:
        if isinstance(event, TextDelta):
            for _ in plain(event.text):
                assert at_s - words[n_told].end_s < 2.5, words[n_told]
                n_told += 1
    assert n_told == len(words)


def test_a_turn_ends_with_its_silence() -> None:
    told, _ = virtually(_run("one two three. (1.2) four five.", VAD))
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
    told, _ = virtually(_run("one two three. (1.5) four.", VAD))
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
    told, played = virtually(_run(talk, MANUAL, commit=True, gap_s=GAP_S))
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


def test_a_lost_update_costs_no_word() -> None:
    async def run() -> Told:
        words = spoken(TALK)
        played = PlayedEngine(words)
        played.pools.fault = lambda nth: (
            SequenceFailedError("lost") if 3 <= nth < 14 and nth != 8 else None
        )
        told = await say(played, pcm_of_words(words), MANUAL, commit=True)
        await played.close()
        return told

    assert plain(virtually(run()).texts[0]) == said(TALK)


def test_an_error_that_nothing_helps_ends_its_turn_alone() -> None:
    async def run() -> Told:
        words = spoken("one two three. (1.2) four five six.")
        played = PlayedEngine(words)
        played.pools.fault = lambda nth: (
            UnsupportedValueError("no such language") if played.clock.monotonic() < 2.4 else None
        )
        told = await say(played, pcm_of_words(words), VAD)
        await played.close()
        return told

    told = virtually(run())
    assert isinstance(told.of(TurnFailed)[0].error, UnsupportedValueError)  # type: ignore[attr-defined]
    assert plain(told.texts[1]) == ["four", "five", "six"]


def test_an_update_that_hangs_is_overtaken() -> None:
    async def run() -> tuple[Told, PlayedEngine]:
        words = spoken(" ".join(f"w{n}" for n in range(30)))
        played = PlayedEngine(words)
        played.pools.encode_s = lambda nth: 100.0 if nth == 4 else 0.05
        told = await say(played, pcm_of_words(words), MANUAL, commit=True)
        await played.close()
        return told, played

    told, played = virtually(run())
    assert plain(told.texts[0]) == [f"w{n}" for n in range(30)]
    assert played.pools.cancelled == 1
    assert played.engine.observer.overtaken == 1


def test_load_makes_updates_rare_and_then_refuses_sessions() -> None:
    async def run(encode_s: float) -> PlayedEngine:
        words = spoken(" ".join(f"w{n}" for n in range(40)), gap_s=GAP_S)
        played = PlayedEngine(words, settings=LiveSettings(max_hop_s=2.0))
        played.pools.encode_s = lambda nth: encode_s
        told = await say(played, pcm_of_words(words), MANUAL, commit=True)
        assert plain(told.texts[0]) == [f"w{n}" for n in range(40)]
        return played

    async def compare() -> None:
        quick, busy = await run(0.05), await run(0.8)
        assert quick.engine.pace.hop_s == 0.5
        assert busy.engine.observer.updates < quick.engine.observer.updates
        assert busy.engine.pace.hop_s > 1.0
        assert not busy.engine.pace.is_overloaded
        slow = busy
        for _ in range(20):  # of many sessions
            slow.engine.pace.record(6.0)
        with pytest.raises(OverloadedError) as refused:
            slow.engine.open(MANUAL, session_id="one more")
        assert refused.value.retry_after_s
        assert slow.engine.observer.refused == 1
        await slow.clock.sleep(60.0)
        await slow.engine.open(MANUAL, session_id="later").close()
        for played in (quick, busy):
            await played.close()

    virtually(compare())


def test_semantic_turns_wait_for_the_end_of_a_sentence() -> None:
    config = LiveConfig(language="en", turn_detection=SemanticVad("high"))
    talk = "one two three. (1.2) four five (1.2) six."
    told, _ = virtually(_run(talk, config))
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


def test_sessions_share_batches_and_do_not_mix() -> None:
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


def test_windows_are_live_and_carry_the_prompt() -> None:
    config = LiveConfig(language="en", turn_detection=None, prompt="before", keywords=("Ada",))
    _, played = virtually(_run("one two three four five six seven", config, commit=True))
    assert {request.priority for request in played.pools.encoded} == {"live"}
    assert {request.priority for request in played.pools.decoded} == {"live"}
    tokenizer = played.pools.tokenizer
    prompt = tokenizer.decode(played.pools.decoded[0].options.prompt_tokens)
    assert prompt == " Ada before"
    assert all(request.audio_key == b"" for request in played.pools.encoded)


def test_log_probabilities_are_told_where_they_are_asked_for() -> None:
    config = LiveConfig(language="en", turn_detection=None, logprobs=True)
    told, _ = virtually(_run("one two three four.", config, commit=True))
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


@pytest.mark.parametrize("config", [MANUAL, VAD])
@pytest.mark.parametrize("encode_s", [0.05, 1.0, 4.0, 10.0])
@pytest.mark.parametrize("pause_s", [0.46, 0.52, 0.6])
def test_words_do_not_depend_on_how_long_answers_take(
    config: LiveConfig, encode_s: float, pause_s: float
) -> None:
    """Nor on a detector that hears a word when the pause before it seems to have ended a turn."""

    async def run() -> Told:
        words = spoken(f"one two three ({pause_s}) four five ({pause_s}) six seven eight.")
        played = PlayedEngine(words, model=SlowToHear())
        played.pools.encode_s = lambda nth: encode_s
        told = await say(played, pcm_of_words(words), config, commit=True)
        await played.close()
        return told

    told = virtually(run())
    told.check_ends()
    text = " ".join(told.texts[turn] for turn in sorted(told.texts))
    assert plain(text) == ["one", "two", "three", "four", "five", "six", "seven", "eight"]


def _fails_before_the_last(played: PlayedEngine) -> None:
    """Every decode but the last ones of utterances fails."""
    played.pools.fault = lambda nth: (
        UnsupportedValueError("no")
        if len(played.pools.decoded[-1].options.temperatures) == 1
        else None
    )


def test_a_stretch_of_which_nothing_is_certain_is_cut_between_words() -> None:
    """Its updates fail; only the decodes that end an utterance succeed."""

    async def run() -> Told:
        words = spoken(" ".join(f"w{n}" for n in range(120)), gap_s=GAP_S)  # 45 s without a pause
        played = PlayedEngine(words)
        _fails_before_the_last(played)
        told = await say(played, pcm_of_words(words), MANUAL, commit=True)
        await played.close()
        return told

    assert plain(virtually(run()).texts[0]) == [f"w{n}" for n in range(120)]


def test_a_clear_while_a_long_stretch_fails_ends_the_turn() -> None:
    async def run() -> Told:
        words = spoken(" ".join(f"w{n}" for n in range(80)), gap_s=GAP_S)
        played = PlayedEngine(words)
        session = played.engine.open(MANUAL, session_id="live")

        def fault(nth: int) -> Exception:
            if played.pools.encoded[-1].n_samples >= 20 * SAMPLE_RATE:
                session.clear()
            return UnsupportedValueError("no")

        played.pools.fault = fault
        listening = asyncio.ensure_future(listen(session, played.clock))
        await speak(session, pcm_of_words(words), played.clock)
        await session.drain()
        told = await listening
        await played.close()
        return told

    virtually(run()).check_ends()


def test_a_mistake_of_ours_ends_its_session_alone() -> None:
    async def run() -> tuple[Told, Told]:
        words = spoken("one two three.")
        played = PlayedEngine(words)
        broken = played.engine.open(VAD, session_id="broken")

        def fail(turn: object) -> bool:
            raise RuntimeError("a mistake")

        listening = asyncio.ensure_future(listen(broken, played.clock))
        await speak(broken, pcm_of_words(words)[:SAMPLE_RATE], played.clock)
        broken._detector.add_probabilities = fail  # type: ignore[assignment, method-assign]
        broken.append(pcm_of_words(words)[SAMPLE_RATE:])
        told_by_broken = await listening
        told = await say(played, pcm_of_words(words), VAD)
        await played.close()
        return told_by_broken, told

    broken, told = virtually(run())
    assert [type(event) for event in (broken.events[0][1], broken.events[-1][1])] == [
        SpeechStarted,
        TurnFailed,
    ]
    assert plain(told.texts[0]) == ["one", "two", "three"]


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


def test_audio_of_which_the_detector_is_never_sure_is_not_kept_for_the_word_behind_it() -> None:
    """Such as a hum, for seconds: the words behind it are decoded all the same."""

    class Hum(LoudIsSpeech):
        def run(
            self, frames: NDArray[np.float32], state: NDArray[np.float32]
        ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
            heard, state = super().run(frames, state)
            return np.maximum(heard, np.float32(0.4)), state

    async def run() -> Told:
        words = spoken("one two three.", at_s=8.0)
        played = PlayedEngine(words, model=Hum())
        pcm = pcm_of_words(words)
        pcm[pcm == 0] = 9  # silence itself is not shown to the detector
        told = await say(played, pcm, VAD)
        await played.close()
        return told

    told = virtually(run())
    assert plain(told.texts[0]) == ["one", "two", "three"]
    assert abs(told.of(SpeechStarted)[0].audio_start_ms - 7400) < 100  # type: ignore[attr-defined]
