"""The design's invariants over the whole path, both roles in this process."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import openai
import pytest

from cluster.common.settings_sources import load_settings
from cluster.demo.samples import sample_path
from cluster.serve.in_process import local_transcriber
from router.api.params import TranscriptionParams
from router.transcriber import RequestTranscriber
from tests.support.audio.recordings import lengthened
from tests.support.in_process import in_process_server
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


FLOAT32 = {"device": "cpu", "dtype": "float32"}
# Of one window of the bundled model in float32: `medium` takes 1280 of 1500 positions.
BYTES = {"cross_kv": 6_912_000 * 1280 // 1500, "encoder_states": 1_152_000 * 1280 // 1500}


def answer(client: openai.OpenAI, name: str) -> tuple[dict[str, Any], int]:
    """Without probabilities, whose last digits depend on a process's threads and batches."""
    raw = client.audio.transcriptions.with_raw_response.create(
        model="whisper-1",
        file=sample_path(name),
        response_format="verbose_json",
        timestamp_granularities=["word", "segment"],
    )
    timing = raw.headers["server-timing"]
    n_bytes = re.search(r'transfer;dur=\S+;desc="(\d+) bytes"', timing)
    n_windows = re.search(r'encode;dur=\S+;desc="(\d+) windows?"', timing)
    assert n_bytes is not None
    assert n_windows is not None
    heard = raw.parse().to_dict()
    for segment in heard["segments"]:
        del segment["avg_logprob"], segment["no_speech_prob"]
    return heard, int(n_bytes[1]) // int(n_windows[1])


def test_every_mode_gives_the_same_answer() -> None:
    expected = None
    for mode, wanted in BYTES.items():
        with in_process_server({"handoff": mode, "encoder": FLOAT32, "decoder": FLOAT32}) as url:
            found, n_bytes = answer(openai.OpenAI(base_url=f"{url}/v1", api_key="none"), "medium")
        assert n_bytes == wanted
        expected = expected or found
        assert found["words"]
        assert found == expected, mode
