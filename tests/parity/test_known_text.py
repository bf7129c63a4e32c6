"""A text that is known is said when its words were found to be said, whatever stands around it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

import pytest
import pytest_asyncio

from cluster.common.settings_sources import load_settings
from cluster.demo.samples import SAMPLES, sample_path
from cluster.serve.in_process import local_transcriber
from router.api.forms import parse_alignment, parse_transcription
from router.interface import RequestContext
from router.transcriber import RequestTranscriber
from router.transcript import Alignment, Transcript

WHOLE = {"model": "demo", "encoder": {"context": "full"}}  # as alignments are made
pytestmark = pytest.mark.asyncio(loop_scope="module")

NEVER_SAID = "entirely different things that nobody ever told anyone"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def transcriber() -> AsyncIterator[RequestTranscriber]:
    async with local_transcriber(load_settings(None, WHOLE)) as made:
        yield made


async def transcribed(transcriber: RequestTranscriber, name: str) -> Transcript:
    fields = {
        "model": "demo",
        "response_format": "verbose_json",
        "timestamp_granularities[]": "word",
    }
    params = parse_transcription(fields.items(), ("en",))
    context = RequestContext.unlimited("heard", 120.0)
    return (await transcriber.transcribe(sample_path(name), params, context)).transcript


async def aligned(
    transcriber: RequestTranscriber, name: str, lines: Sequence[str]
) -> tuple[Transcript, Alignment]:
    params = parse_alignment([("model", "demo"), *(("lines[]", line) for line in lines)], ("en",))
    context = RequestContext.unlimited("known", 120.0)
    found = (await transcriber.transcribe(sample_path(name), params, context)).transcript
    assert found.alignment is not None
    return found, found.alignment


@pytest.mark.parametrize("name", SAMPLES)
async def test_our_own_transcript_has_its_own_times(
    transcriber: RequestTranscriber, name: str
) -> None:
    heard = await transcribed(transcriber, name)
    lines = [segment.text.strip() for segment in heard.segments]
    found, alignment = await aligned(transcriber, name, lines)
    assert alignment.heard_alone == ()
    assert [word.time for word in alignment.words] == list(heard.words)
    assert [one.text for one in found.segments] == [one.text for one in heard.segments]
    bounds = [(one.words[0].start, one.words[-1].end) for one in heard.segments]
    assert [(one.start, one.end) for one in found.segments] == bounds


async def test_what_has_no_counterpart_moves_nothing(transcriber: RequestTranscriber) -> None:
    heard = await transcribed(transcriber, "long")
    words = [word.word.strip() for word in heard.words]
    other = [
        *words[:12],
        *NEVER_SAID.split(),
        *words[12:40],
        *words[48:90],
        "Xylophone",
        *words[91:],
    ]
    _, alignment = await aligned(transcriber, "long", [" ".join(other)])
    n_never = len(NEVER_SAID.split())
    assert [
        word.text.strip() for word in alignment.words if word.time is None
    ] == NEVER_SAID.split()
    (alone,) = alignment.heard_alone
    assert alone.text == " ".join(words[40:48])
    assert (alone.start, alone.end) == (heard.words[40].start, heard.words[47].end)
    said = [word.time for word in alignment.words if word.time is not None]
    expected = [*heard.words[:40], *heard.words[48:]]
    assert len(said) == len(other) - n_never == len(expected)
    apart = [abs(ours.start - theirs.start) for ours, theirs in zip(said, expected, strict=True)]
    assert sorted(apart)[int(0.95 * len(apart))] <= 0.1
    assert said[12:40] == expected[12:40], "in windows without a change nothing changes"


async def test_a_text_of_another_recording_is_said_nowhere(
    transcriber: RequestTranscriber,
) -> None:
    found, alignment = await aligned(transcriber, "short", [NEVER_SAID] * 5)
    assert not any(word.time for word in alignment.words)
    assert found.segments == ()
    (alone,) = alignment.heard_alone
    assert alone.text.startswith("Victor")
