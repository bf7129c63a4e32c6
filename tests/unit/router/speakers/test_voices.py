"""Voices: words get their speakers when the turns are there, and a search outlives its worker."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.common.errors import InvalidRequestError
from cluster.common.settings import RouterSettings, SpeakerSettings
from router.api.params import SpeakerOptions
from router.audio.pool import AudioPool
from router.audio.protocol import Finished, SpeakerSearch
from router.interface import RequestContext, Update
from router.pipeline import RequestRun
from router.speakers.attribution import SpeakerTurn
from router.speakers.voices import find_turns, name_of, transcribe_voices
from router.transcript import Transcript
from tests.support.audio.audio_pools import freeze_on, until
from tests.support.audio.sounds import joined, silence, write_wav
from tests.support.audio.speech import pcm_of
from tests.support.router_fakes import make_segment
from tests.support.speaker_networks import write_network


def context() -> RequestContext:
    return RequestContext.unlimited("r", 60.0)


def run_of(on_update: Any = None) -> RequestRun:
    return RequestRun(replace(context(), on_update=on_update))


def options(**given: Any) -> SpeakerOptions:
    return replace(SpeakerOptions(by="voice"), **given)


def contents(search: SpeakerSearch) -> list[bytes]:
    return [Path(file).read_bytes() for _, file in search.references]


class PlayedPool:
    known_limit, threshold = 1, 0.5

    def __init__(self) -> None:
        self.searches: list[SpeakerSearch] = []
        self.heard: list[bytes] = []

    async def survey(self, path: Path, _: RequestContext, speakers: SpeakerSearch) -> Any:
        self.searches.append(speakers)
        self.heard = contents(speakers)
        turns = [(0, 16_000, 1), (16_000, 24_000, 0), (32_000, 48_000, 2)]
        return SimpleNamespace(result=Finished(48_000, turns=tuple(turns)))


async def test_turns_have_names_and_leave_no_recording_behind() -> None:
    pool: Any = PlayedPool()
    asked = options(names=("A",), references=(b"sound",), num_speakers=3)
    turns = await find_turns(pool, Path("x"), asked, context())
    assert [(turn.start, turn.end, turn.speaker) for turn in turns] == [
        (0.0, 1.0, "B"),
        (1.0, 1.5, "A"),
        (2.0, 3.0, "C"),
    ]
    assert pool.heard == [b"sound"]
    search = pool.searches[-1]
    assert (search.least, search.most, search.threshold) == (3, 3, 0.5)
    with pytest.raises(FileNotFoundError):
        contents(search)


async def test_more_known_voices_than_the_server_takes_are_refused() -> None:
    pool: Any = PlayedPool()
    asked = options(names=("A", "B"), references=(b"sound", b"sound"))
    with pytest.raises(InvalidRequestError, match="takes 1") as refused:
        await find_turns(pool, Path("x"), asked, context())
    assert (refused.value.param, pool.searches) == ("known_speaker_names", [])


def test_unknown_speakers_have_letters() -> None:
    found = [name_of(i, ()) for i in (0, 25, 26, 27, 701, 702)]
    assert found == ["A", "Z", "AA", "AB", "ZZ", "AAA"]
    assert [name_of(i, ("B",)) for i in (0, 1, 2)] == ["B", "A", "C"]


@pytest.mark.slow
async def test_a_killed_worker_costs_a_search(tmp_path: Path) -> None:
    pcm = joined(pcm_of("long")[:192_000], silence(1.0), pcm_of("short"))
    talk = write_wav(tmp_path / "talk.wav", pcm)
    model = write_network(tmp_path / "voices.onnx")
    settings = RouterSettings(audio_workers=1)
    pool = AudioPool(settings, speakers=SpeakerSettings(model=str(model), threshold=0.5))
    await pool.start()
    try:
        want = await find_turns(pool, talk, options(), context())
        again = asyncio.create_task(find_turns(pool, talk, options(), context()))
        await until(lambda: any(worker.streams for worker in pool._workers))
        (stream,) = pool._workers[0].streams.values()
        os.kill(await freeze_on(pool, stream), signal.SIGKILL)
        assert await again == want
    finally:
        await pool.close()


@pytest.mark.parametrize("words", [False, True])
async def test_segments_wait_for_the_turns_and_go_on_as_they_come(words: bool) -> None:
    updates: list[Update] = []
    found, told, third = asyncio.Event(), asyncio.Event(), make_segment(2, " Good.", 4.0)
    heard = (make_segment(0, " How are you?"), make_segment(1, " Fine.", 2.0), third)

    async def transcribe(run: RequestRun) -> Transcript:
        for segment in heard[:2]:
            run.context.update(Update(segment.text, (segment,)))
        assert not updates, "who speaks is not known yet"
        found.set()
        await told.wait()
        assert len(updates[0].segments) == 2
        run.context.update(Update(third.text, (third,)))
        assert len(updates) == 2
        return Transcript("transcribe", "en", 6.0, "How are you? Fine. Good.", heard)

    async def turns() -> list[SpeakerTurn]:
        await found.wait()
        return [SpeakerTurn(0.0, 1.8, "A"), SpeakerTurn(1.9, 4.0, "B"), SpeakerTurn(4.0, 6.0, "A")]

    def tell(update: Update) -> None:
        updates.append(update)
        told.set()

    run = run_of(tell)
    transcript = await transcribe_voices(run, transcribe, turns(), words=words)
    assert transcript.text == "A: How are you?\nB: Fine.\nA: Good."
    assert "".join(update.text for update in updates) == transcript.text
    assert [segment.id for segment in transcript.segments] == [0, 1, 2]
    assert sum((update.segments for update in updates), ()) == transcript.segments
    assert [word.speaker for word in transcript.words] == (list("AAABA") if words else [])


async def test_what_keeps_voices_from_being_found_ends_the_work() -> None:
    ended = asyncio.Event()

    async def transcribe(run: RequestRun) -> Transcript:
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()
        raise AssertionError

    async def turns() -> list[SpeakerTurn]:
        raise InvalidRequestError("the reference is silent", param="known_speaker_references")

    with pytest.raises(ExceptionGroup):
        await transcribe_voices(run_of(), transcribe, turns(), words=False)
    assert ended.is_set()


async def test_a_search_that_outlasts_all_windows_ends_no_request(tmp_path: Path) -> None:
    now_s = 1000.0
    clock: Any = SimpleNamespace(monotonic=lambda: now_s)
    request = RequestContext("r", None, stall_s=600.0, clock=clock)

    class SlowPool(PlayedPool):
        async def survey(self, *asked: Any) -> Any:
            nonlocal now_s
            now_s += 1500.0
            assert request.remaining_s() == 600.0
            return await super().survey(*asked)

    pool: Any = SlowPool()
    await find_turns(pool, tmp_path, options(), request)
    assert request.remaining_s() == 600.0
    now_s += 601.0
    assert request.remaining_s() < 0.0
