"""Live sessions whose updates fail, are late, or are overtaken: no word is lost for it."""

from __future__ import annotations

import asyncio

import pytest

from cluster.common.errors import OverloadedError, SequenceFailedError, UnsupportedValueError
from cluster.common.messages import SAMPLE_RATE
from cluster.common.settings import LiveSettings
from router.live.interface import (
    LiveConfig,
    SpeechStarted,
    TurnFailed,
)
from tests.support.live.played_speech import SlowToHear, pcm_of_words, spoken
from tests.support.live.talks import GAP_S, MANUAL, TALK, VAD, plain, said, virtually
from tests.support.live.virtual_sessions import PlayedEngine, Told, listen, say, speak


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


@pytest.mark.parametrize("config", [MANUAL, VAD])
@pytest.mark.parametrize("encode_s", [0.05, 1.0, 4.0, 10.0])
@pytest.mark.parametrize("pause_s", [0.46, 0.52, 0.6])
def test_words_do_not_depend_on_how_long_answers_take(
    config: LiveConfig, encode_s: float, pause_s: float
) -> None:
    """Nor on a detector that hears a word when the pause before it seems to have ended a turn."""

    async def run() -> Told:
        words = spoken(f"one two three ({pause_s}) four five ({pause_s}) six seven eight.")
        played = PlayedEngine(words, detector=SlowToHear())
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


def test_an_utterance_without_confirmed_words_is_cut_between_words() -> None:
    """Its updates fail; only the decodes that end an utterance succeed."""

    async def run() -> Told:
        words = spoken(" ".join(f"w{n}" for n in range(120)), gap_s=GAP_S)  # 45 s without a pause
        played = PlayedEngine(words)
        _fails_before_the_last(played)
        told = await say(played, pcm_of_words(words), MANUAL, commit=True)
        await played.close()
        return told

    assert plain(virtually(run()).texts[0]) == [f"w{n}" for n in range(120)]


def test_a_clear_while_a_long_utterance_fails_ends_the_turn() -> None:
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
