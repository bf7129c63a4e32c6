"""What a sequential request tells while it runs.

The decoder is played; the audio worker and its file are real. Texts and times are compared with
openai-whisper's in `tests/parity/test_sequential.py`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from cluster.common.errors import OverloadedError
from cluster.common.messages import QualityGates
from cluster.common.model.checkpoint import open_checkpoint
from cluster.common.model.encoder_context import FULL
from cluster.common.model.text.tokenizer import WhisperTokenizer
from cluster.common.settings import RouterSettings
from router.api.params import SequentialOptions, TranscriptionParams
from router.audio.pool import AudioPool
from router.interface import RequestContext, TranscriptionResult, Update
from router.transcriber import RequestTranscriber
from tests.support.audio.sounds import tone, write_wav
from tests.support.checkpoints import cached_checkpoint
from tests.support.played_pools import PlayedPools
from tests.support.requests import request_context

pytestmark = pytest.mark.asyncio(loop_scope="module")  # that of the shared `pool`

CHECKPOINT = open_checkpoint(str(cached_checkpoint("micro")))
TOKENIZER = WhisperTokenizer.from_checkpoint(CHECKPOINT)
PARAMS = TranscriptionParams(
    model="demo", language="en", decoding="sequential", gates=QualityGates(), seed=3
)
FILE_S = 70.5


def played_pools() -> PlayedPools:
    """Each window says its number over 20 s, and a word that is not finished."""
    pools = PlayedPools(TOKENIZER)
    pools.breaks_off, pools.breaks_at = lambda *_: True, 1000
    return pools


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_wav(tmp_path_factory.mktemp("audio") / "file", tone(FILE_S))


async def transcribe(
    pool: AudioPool,
    pools: PlayedPools,
    file: Path,
    params: TranscriptionParams = PARAMS,
    context: RequestContext | None = None,
) -> TranscriptionResult:
    transcriber = RequestTranscriber(
        pool,
        pools,
        pools,
        TOKENIZER,
        RouterSettings(),  # type: ignore[call-arg]
        dims=CHECKPOINT.dims,
        context_for=lambda frames: 64,
    )
    result = await transcriber.transcribe(file, params, context or request_context())
    asked = {request.context for request in pools.encoded}
    assert asked <= {FULL}, "openai-whisper has all positions, to the letter"
    return result


async def test_what_is_told_joins_to_the_transcript_and_progress_ends_at_the_end(
    pool: AudioPool, file: Path
) -> None:
    updates: list[Update] = []
    progress: list[tuple[float, float]] = []
    context = request_context()
    context.on_update = updates.append
    context.on_progress = lambda done_s, known_s: progress.append((done_s, known_s))
    params = replace(PARAMS, logprobs=True)
    result = await transcribe(pool, played_pools(), file, params, context)
    transcript = result.transcript
    assert transcript.text == "word0 word1 word2 word3"
    times = [(s.start, s.end) for s in transcript.segments]
    assert times == [(0.0, 20.0), (20.0, 40.0), (40.0, 60.0), (60.0, 80.0)]
    assert transcript.duration_s == FILE_S
    assert "".join(update.text for update in updates) == transcript.text
    assert [s for update in updates for s in update.segments] == list(transcript.segments)
    assert "".join(t.token for u in updates for t in u.logprobs).strip() == transcript.text
    assert [done_s for done_s, _ in progress] == pytest.approx([20.0, 40.0, 60.0, FILE_S])
    assert {known_s for _, known_s in progress} == {FILE_S}


async def test_an_unknown_language_is_asked_once_for_the_whole_file(
    pool: AudioPool, file: Path
) -> None:
    pools = played_pools()
    params = replace(PARAMS, language=None, words=True, beam_size=4)
    result = await transcribe(pool, pools, file, params)
    asked, first = pools.decoded[:2]
    assert asked.options.detect_only
    assert asked.options.n_rows == 1
    assert (first.options.detect_only, first.options.language) == (False, "de")
    assert result.transcript.language == "de"
    assert sum(request.options.detect_only for request in pools.decoded) == 1


async def test_a_file_outside_of_all_clips_has_no_text(pool: AudioPool, file: Path) -> None:
    pools = played_pools()
    sequential = SequentialOptions(clip_timestamps=(100.0, 120.0))
    result = await transcribe(pool, pools, file, replace(PARAMS, sequential=sequential))
    assert pools.decoded == []
    assert (result.transcript.text, result.transcript.segments) == ("", ())
    assert result.transcript.duration_s == FILE_S


async def test_audio_that_does_not_fit_is_refused_before_it_is_decoded(
    pool: AudioPool, file: Path
) -> None:
    class Full:
        def expect(self, audio_s: float) -> None:
            raise OverloadedError(f"no room for {audio_s} s")

        def found(self, audio_s: float) -> None:
            raise AssertionError("it was decoded")

    context = RequestContext("r", Full(), 60.0)
    with pytest.raises(OverloadedError, match=r"70\.5 s"):
        await transcribe(pool, played_pools(), file, context=context)
    assert pool._workers[0].streams == {}
