"""The bundled checkpoint through the whole path gives each window the reference's tokens."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from unittest.mock import patch

import pytest
import pytest_asyncio
import torch

from cluster.common.messages import (
    DecodeRequest,
    DecodeResult,
    EncodeReply,
    EncodeRequest,
    WorkerStatus,
)
from cluster.common.model.checkpoint import open_checkpoint
from cluster.common.model.text.tokenizer import WhisperTokenizer
from cluster.demo.samples import SAMPLES, sample_path
from router.api.params import TranscriptionParams
from router.pools import DecoderClient, EncoderClient, Unbounded
from router.transcriber import RequestTranscriber
from tests.support.references.hugging_face import hf_features, hf_model
from tests.support.references.transcribers import float32_transcriber
from tests.support.requests import request_context


class Listening(Unbounded):
    def __init__(self, encoders: EncoderClient, decoders: DecoderClient) -> None:
        self._encoders, self._decoders = encoders, decoders
        self.requests: dict[int, EncodeRequest] = {}
        self.results: dict[int, DecodeResult] = {}

    async def encode(self, request: EncodeRequest) -> EncodeReply:
        self.requests[request.window] = request
        return await self._encoders.encode(request)

    async def decode(self, request: DecodeRequest) -> DecodeResult:
        result = await self._decoders.decode(request)
        self.results[request.window] = result
        return result

    async def status(self) -> list[WorkerStatus]:
        return []


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def transcriber() -> AsyncIterator[RequestTranscriber]:
    async with float32_transcriber() as transcriber:
        yield transcriber


async def through_the_path(transcriber: RequestTranscriber, file: Path) -> Listening:
    pipeline = transcriber._pipeline
    listening = Listening(pipeline._encoders, pipeline._decoders)
    with patch.multiple(pipeline, _encoders=listening, _decoders=listening):
        params = TranscriptionParams(model="demo", language="en")
        await transcriber.transcribe(file, params, request_context())
    return listening


def reference_tokens(folder: Path, request: EncodeRequest) -> list[int]:
    """What Hugging Face's `generate` samples for one window, without the start sequence."""
    model = hf_model(folder)
    with torch.inference_mode():
        output = model.generate(
            hf_features(folder, [request.pcm]),
            language="en",
            task="transcribe",
            return_timestamps=True,
            num_beams=1,
            do_sample=False,
        )
    tokenizer = WhisperTokenizer.from_checkpoint(open_checkpoint(str(folder)))
    start = tokenizer.sot_sequence("en", "transcribe", timestamps=True)
    drop = {*start, tokenizer.special.eot}
    return [token for token in output[0].tolist() if token not in drop]


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("name", SAMPLES)
async def test_each_window_has_the_references_tokens(
    transcriber: RequestTranscriber, name: str
) -> None:
    folder = open_checkpoint("demo").path
    heard = await through_the_path(transcriber, sample_path(name))
    assert heard.results
    for window, result in sorted(heard.results.items()):
        expected = reference_tokens(folder, heard.requests[window])
        assert list(result.tokens) == expected, f"window {window} of {name}"
