"""What is handed from encoder to decoder is a matter of speed: both modes give the same answer."""

from __future__ import annotations

import re
from typing import Any

import openai

from cluster.demo.samples import sample_path
from tests.support.in_process import in_process_server

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
