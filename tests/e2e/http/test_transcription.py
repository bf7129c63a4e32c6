"""The whole path over HTTP with OpenAI's SDK: right texts, alone and all at once."""

from __future__ import annotations

import asyncio
import concurrent.futures
import subprocess
from pathlib import Path
from typing import Any

import httpx
import jiwer
import pytest

from benchmark.shared.speech.wav import wav_bytes
from cluster.common.messages import SAMPLE_RATE
from cluster.common.settings_sources import load_settings
from cluster.demo.samples import SAMPLES, sample_path, sample_text, words_of
from router.audio.pool import AudioPool
from router.interface import RequestContext
from tests.e2e.conftest import SPLITSCRIBE, Server, wait_until
from tests.support.audio.sounds import joined, silence
from tests.support.audio.speech import pcm_of, sentences_of, wav_of

TOLERANCE = 0.1  # word error rate that a small model may have on its own recordings


def word_error_rate(reference: str, heard: str) -> float:
    return float(jiwer.wer(*(" ".join(words_of(text)) for text in (reference, heard))))


@pytest.mark.parametrize("name", SAMPLES)
def test_each_recording_is_transcribed_as_spoken(server: Server, name: str) -> None:
    with sample_path(name).open("rb") as file:
        answer = server.client().audio.transcriptions.create(
            model="whisper-1", file=file, response_format="verbose_json"
        )
    assert word_error_rate(sample_text(name), answer.text) <= TOLERANCE, answer.text
    assert answer.language == "english"
    segments = answer.segments or []
    assert segments
    assert "".join(s.text for s in segments).strip() == answer.text
    starts = [s.start for s in segments]
    assert starts == sorted(starts)
    assert all(0 <= s.start < s.end <= answer.duration + 0.01 for s in segments)


def test_32_at_once_are_all_right(server: Server) -> None:
    client = server.client(max_retries=0)
    alone = {
        name: client.audio.transcriptions.create(model="whisper-1", file=sample_path(name)).text
        for name in SAMPLES
    }

    def one(index: int) -> tuple[str, str]:
        name = SAMPLES[index % len(SAMPLES)]
        answer = client.audio.transcriptions.create(model="whisper-1", file=sample_path(name))
        return name, answer.text

    with concurrent.futures.ThreadPoolExecutor(32) as pool:
        for name, text in pool.map(one, range(32)):
            assert text == alone[name]


async def test_the_long_recording_has_the_text_of_its_parts(server: Server) -> None:
    pool = AudioPool(load_settings(environ={}).router)
    await pool.start()
    try:
        async with pool.open(sample_path("long"), RequestContext.unlimited("parts", 60)) as stream:
            windows = [window async for window in stream]
    finally:
        await pool.close()
    assert len(windows) >= 3
    client = server.async_client()
    whole = await client.audio.transcriptions.create(
        model="whisper-1", file=sample_path("long"), response_format="verbose_json"
    )
    parts = [
        await client.audio.transcriptions.create(
            model="whisper-1", file=("a.wav", wav_bytes(window.pcm))
        )
        for window in windows
    ]
    assert whole.text == " ".join(part.text for part in parts)
    starts = {round(window.start_s * 100) for window in windows}
    assert starts <= {segment.seek for segment in whole.segments or []}


async def test_a_client_that_hangs_up_frees_everything(server: Server) -> None:
    client = server.async_client(max_retries=0)

    async def hung_up(after_s: float) -> bool:
        call = client.audio.transcriptions.create(model="whisper-1", file=sample_path("long"))
        try:
            await asyncio.wait_for(call, after_s)
        except (TimeoutError, asyncio.CancelledError):
            return True
        return False  # a machine that is quick has answered

    assert any(await asyncio.gather(*(hung_up(0.05 * n) for n in range(1, 9))))
    await asyncio.to_thread(wait_until, server.is_idle, 15.0, "every page free again")


def test_health_names_every_worker(server: Server) -> None:
    server.client().audio.transcriptions.create(model="whisper-1", file=sample_path("short"))
    health = server.health()
    assert health["status"] == "ready"
    for role in ("encoder", "decoder"):
        workers = health["pools"][role]["workers"]
        assert len(workers) == 2
        assert all(worker["transport"].startswith("nixl") for worker in workers)
    metrics = httpx.get(f"{server.url}/metrics").text
    assert 'splitscribe_worker_healthy{model="demo",role="encoder"' in metrics
    # What READs ran at, where there was one.
    assert any(worker["extra"]["transfer_gb_per_s"] > 0 for worker in workers)


def test_a_known_text_gets_its_times(server: Server, tmp_path: Path) -> None:
    url, lines = f"{server.url}/v1/audio/alignments", sample_text("short").replace(". ", ".\n")
    form = {"model": "whisper-1", "text": lines}
    audio = sample_path("short")
    answers = [
        httpx.post(url, data=form | {"response_format": shape}, files={"file": audio.read_bytes()})
        for shape in ("json", "vtt")
    ]
    for answer in answers:
        assert answer.status_code == 200, answer.text
    found = answers[0].json()
    assert found["text"] == lines
    assert [word["word"] for word in found["words"]] == lines.split()
    starts = [word["start"] for word in found["words"]]
    assert None not in starts
    assert starts == sorted(starts)
    assert [line["text"] for line in found["lines"]] == lines.splitlines()
    (tmp_path / "said.txt").write_text(lines)
    command = [SPLITSCRIBE, "align", audio, tmp_path / "said.txt"]
    done = subprocess.run(
        [*command, "--server", server.url, "-f", "vtt"], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == answers[1].text.strip()


COPIES = 10
SLACK_S = 0.6
GAP_S = 23.0  # with the recording, too long for two copies in one window


def create(server: Server, file: Any, **options: Any) -> Any:
    client = server.client(max_retries=0)
    return client.audio.transcriptions.create(model="whisper-1", file=file, **options)


@pytest.fixture(scope="module")
def copies_heard(server: Server) -> Any:
    copies = wav_of(joined(*(pcm_of("short"), silence(GAP_S)) * COPIES))
    both = ["word", "segment"]
    return create(server, copies, response_format="verbose_json", timestamp_granularities=both)


def test_ten_copies_of_a_phrase_are_the_phrase_ten_times(server: Server, copies_heard: Any) -> None:
    alone = create(server, sample_path("short")).text
    assert copies_heard.text == " ".join([alone] * COPIES)


def test_times_in_later_chunks_are_true_ones(copies_heard: Any) -> None:
    """Within `SLACK_S`: a first word may reach back to where its window begins."""
    sentences = sentences_of("short")
    period_s = len(pcm_of("short")) / SAMPLE_RATE + GAP_S
    spoken = [
        (n * period_s + sentence.start, n * period_s + sentence.end)
        for n in range(COPIES)
        for sentence in sentences
    ]
    assert len(copies_heard.segments) == len(spoken)
    for segment, (start, end) in zip(copies_heard.segments, spoken, strict=True):
        assert segment.start == pytest.approx(start, abs=SLACK_S)
        assert segment.end == pytest.approx(end, abs=SLACK_S)
    for word in copies_heard.words:
        assert any(
            start - SLACK_S <= word.start <= word.end <= end + SLACK_S for start, end in spoken
        )
    assert copies_heard.duration == pytest.approx(COPIES * period_s, abs=0.01)


@pytest.mark.parametrize("decoding", ["parallel", "sequential"])
def test_a_prompt_is_not_heard(server: Server, decoding: str) -> None:
    prompt = sentences_of("long")[3].text
    heard = create(
        server, sample_path("short"), prompt=prompt, extra_body={"decoding": decoding}
    ).text
    said = set(sample_text("short").lower().split())
    assert len(said & set(heard.lower().split())) >= 0.8 * len(said)
    assert not (set(prompt.lower().split()) - said) & set(heard.lower().split())
