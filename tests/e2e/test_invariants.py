"""The design's invariants over the whole path, both roles in this process."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from cluster.common.settings_sources import load_settings
from cluster.demo.samples import sample_path
from cluster.serve.in_process import local_transcriber
from router.api.params import TranscriptionParams
from router.transcriber import RequestTranscriber
from tests.support.audio.recordings import lengthened
from tests.support.requests import request_context

PARAMS = TranscriptionParams(model="demo", language="en")


async def text_of(transcriber: RequestTranscriber, file: Path) -> str:
    return (await transcriber.transcribe(file, PARAMS, request_context())).transcript.text


@pytest.mark.parametrize("alike", [False, pytest.param(True, marks=pytest.mark.slow)])
async def test_pools_of_one_window_finish_eight_long_files(alike: bool, tmp_path: Path) -> None:
    """No hold and wait: with room for one window in each pool, eight files at once all finish."""
    files = [tmp_path / f"{number}.wav" for number in range(8)]
    for number, file in enumerate(files):
        file.write_bytes(lengthened("long", 0 if alike else number))
    tight = load_settings(
        None,
        {
            "encoder": {"export_windows": 1},
            "decoder": {"kv_windows": 1, "max_batch": 1},
            "router": {"audio_workers": 1},
        },
        environ={},
    )
    async with local_transcriber(tight) as transcriber:
        alone = await text_of(transcriber, sample_path("long"))
        texts = await asyncio.gather(*(text_of(transcriber, file) for file in files))
    assert alone
    assert texts == [alone] * 8
