"""Sequential mode gives openai-whisper's segments, tokens, times and words, in float32."""

from __future__ import annotations

import itertools
import re
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import pytest_asyncio
import torch

from benchmark.shared.speech.wav import wav_bytes
from cluster.common.messages import SAMPLE_RATE, Pcm, QualityGates
from cluster.common.model.checkpoint import open_checkpoint
from cluster.demo.samples import sample_text
from decoder_worker.sampling.sampler import gumbel, noise_key
from router.api.params import LADDER, SequentialOptions, TranscriptionParams
from router.interface import Update
from router.transcriber import RequestTranscriber
from router.transcript import Segment, Transcript
from tests.support.audio.speech import pcm_of
from tests.support.checkpoints import cached_checkpoint
from tests.support.references.hugging_face import make_pcm
from tests.support.references.openai_whisper import (
    DECODING,
    openai_model,
    openai_vocabulary,
    reference_options,
    tokenizer_of,
)
from tests.support.references.transcribers import answer_of, float32_transcriber
from tests.support.requests import request_context

pytestmark = pytest.mark.asyncio(loop_scope="module")
SLOW = pytest.mark.slow  # more of the same: the fast suite has one of each kind


SEED = 11
NEVER = QualityGates(compression_ratio=None, avg_logprob=0.0, no_speech_prob=None)  # all fail
PARAMS = TranscriptionParams(
    model="demo",
    language="en",
    fallback=False,
    seed=SEED,
    decoding="sequential",
    gates=QualityGates(),
)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def demo() -> AsyncIterator[RequestTranscriber]:
    async with float32_transcriber(context="auto") as transcriber:
        yield transcriber


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def micro() -> AsyncIterator[RequestTranscriber]:
    async with float32_transcriber(str(MICRO), context="auto") as transcriber:
        yield transcriber


DEMO = open_checkpoint("demo").path
MICRO = cached_checkpoint("micro")


async def ours(
    transcriber: RequestTranscriber, params: TranscriptionParams, pcm: Pcm, folder: Path
) -> tuple[Transcript, list[Update]]:
    file = folder / "upload"
    file.write_bytes(wav_bytes(pcm))
    context = request_context(seconds=600.0)
    updates: list[Update] = []
    context.on_update = updates.append
    return (await transcriber.transcribe(file, params, context)).transcript, updates


def theirs(checkpoint: Path, params: TranscriptionParams, pcm: Pcm) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if params.beam_size > 1:
        options |= {"beam_size": params.beam_size, "patience": params.patience}
    if params.best_of > 1:
        options |= {"best_of": params.best_of}
    with our_noise(params):
        return answer_of(
            checkpoint,
            pcm,
            language=params.language,
            task=params.task,
            temperature=params.temperatures,
            initial_prompt=params.prompt,
            carry_initial_prompt=params.sequential.carry_initial_prompt,
            condition_on_previous_text=params.sequential.condition_on_previous_text,
            clip_timestamps=list(params.sequential.clip_timestamps),
            word_timestamps=params.words,
            hallucination_silence_threshold=params.sequential.hallucination_silence_threshold,
            compression_ratio_threshold=params.gates.compression_ratio,
            logprob_threshold=params.gates.avg_logprob,
            no_speech_threshold=params.gates.no_speech_prob,
            length_penalty=params.length_penalty,
            **options,
        )


def without_names(text: str) -> str:
    """The reference has the names of sampled special tokens in the whole text, not in segments."""
    return re.sub(r"<\|\w+\|>", "", text).strip()


@contextmanager
def our_noise(params: TranscriptionParams) -> Iterator[None]:
    """Give the reference's sampler our noise; each window begins with the first temperature."""
    windows = itertools.count()
    place: dict[str, Any] = {}
    run = DECODING.DecodingTask.run

    def counting_run(task: Any, mel: torch.Tensor) -> Any:
        attempt = params.temperatures.index(task.options.temperature)
        if attempt == 0:
            place["window"] = next(windows)
        place.update(attempt=attempt, steps=itertools.count())
        return run(task, mel)

    class OurCategorical:
        def __init__(self, logits: torch.Tensor) -> None:
            self._logits = logits

        def sample(self) -> torch.Tensor:
            n, n_vocab = self._logits.shape
            keys = [noise_key(SEED, place["window"], place["attempt"], row) for row in range(n)]
            steps = torch.full((n,), next(place["steps"]))
            return (self._logits + gumbel(torch.tensor(keys), steps, n_vocab)).argmax(-1)

    with (
        patch.object(DECODING.DecodingTask, "run", counting_run),
        patch.object(DECODING, "Categorical", OurCategorical),
    ):
        yield


async def assert_equal(
    transcriber: RequestTranscriber,
    params: TranscriptionParams,
    pcm: Pcm,
    folder: Path,
    checkpoint: Path = DEMO,
) -> list[dict[str, Any]]:
    """Compare all there is, and return the reference's segments."""
    transcript, updates = await ours(transcriber, params, pcm, folder)
    answer = theirs(checkpoint, params, pcm)
    expected = [segment for segment in answer["segments"] if segment["text"]]
    found = transcript.segments
    assert [s.text for s in found] == [s["text"] for s in expected]
    assert [list(s.tokens) for s in found] == [s["tokens"] for s in expected]
    for segment, reference in zip(found, expected, strict=True):
        assert_same_numbers(segment, reference)
    assert [s.id for s in found] == list(range(len(found)))
    assert transcript.text == without_names(answer["text"])
    assert transcript.language == answer["language"]
    assert "".join(update.text for update in updates) == transcript.text
    assert tuple(s for update in updates for s in update.segments) == found
    return expected


def assert_same_numbers(segment: Segment, reference: dict[str, Any]) -> None:
    assert segment.seek == reference["seek"]
    assert (segment.start, segment.end) == pytest.approx(
        (reference["start"], reference["end"]), abs=6e-4
    )
    assert segment.temperature == reference["temperature"]
    for score in ("avg_logprob", "compression_ratio", "no_speech_prob"):
        assert getattr(segment, score) == pytest.approx(reference[score], abs=2e-3), score
    words = reference.get("words", [])
    assert [word.word for word in segment.words] == [word["word"] for word in words]
    for ours, theirs in zip(segment.words, words, strict=True):
        assert (ours.start, ours.end) == pytest.approx((theirs["start"], theirs["end"]), abs=6e-4)
        assert ours.probability == pytest.approx(theirs["probability"], abs=2e-3)


def hum(seconds: float) -> Pcm:
    rng = np.random.default_rng(4)
    return (rng.standard_normal(round(seconds * SAMPLE_RATE)) * 20).astype(np.int16)


def chat() -> Pcm:
    return np.concatenate((pcm_of("medium"), hum(4.0), pcm_of("short")))


def talk() -> Pcm:
    faint = pcm_of("medium") // 8
    parts = (pcm_of("short"), hum(3.0), pcm_of("long"), faint, hum(12.0), pcm_of("short")[:-77])
    return np.concatenate(parts)


def long_silences() -> Pcm:
    return np.concatenate((hum(31.0), pcm_of("medium"), hum(20.0)))


def mode(**options: Any) -> dict[str, Any]:
    return {"sequential": SequentialOptions(**options)}


def clips(*at_s: float) -> dict[str, Any]:
    return mode(clip_timestamps=at_s)


PROMPT = {"prompt": " her silver captain\n"}
CANDIDATES = {"fallback": True, "best_of": 5}
# Up to its end every attempt fails; the last one stands, and leaves no context.
LADDER_OF_TWO = {"fallback": True, "gates": NEVER, **clips(0.0, 2.5, 2.5)}
WORDS = {"words": True}
CASES: dict[str, tuple[dict[str, Any], Callable[[], Pcm]]] = {
    "short": ({}, lambda: pcm_of("short")),
    "long": ({}, lambda: pcm_of("long")),
    "ten seconds from inside a recording": ({}, lambda: pcm_of("long")[333_333:493_333]),
    "0.1 s": ({}, lambda: pcm_of("short")[8_000:9_600]),
    "a long talk": ({}, talk),
    "a prompt that is carried": ({**PROMPT, **mode(carry_initial_prompt=True)}, chat),
    "a prompt": (PROMPT, chat),
    "two clips": (clips(3.0, 9.99, 20.0, 23.0), lambda: pcm_of("medium")),
    "backwards": (clips(20.0, 23.5, 10.0), lambda: pcm_of("medium")),
    "the language of the first window": ({"language": None}, lambda: pcm_of("long")),
    "everything is silence": ({"gates": QualityGates(None, None, 0.0)}, long_silences),
    "what is unsure is silence": (
        {"gates": QualityGates(avg_logprob=-0.2, no_speech_prob=1e-6)},
        long_silences,
    ),
    "nothing is silence": ({"gates": QualityGates(no_speech_prob=None)}, long_silences),
    "one temperature above zero": ({"temperature": 0.3}, lambda: pcm_of("short")),
    "beams": ({"beam_size": 4}, lambda: pcm_of("short")),
    "patient beams": ({"beam_size": 3, "patience": 2.0}, lambda: pcm_of("short")),
    "long beams": ({"beam_size": 3, "length_penalty": 0.6}, lambda: pcm_of("short")),
    "the ladder": (LADDER_OF_TWO, lambda: pcm_of("short")),
    "the ladder by some gates": (
        {**LADDER_OF_TWO, "gates": QualityGates(1.3, -0.3)},
        lambda: pcm_of("short"),
    ),
    "the ladder of both": (
        {**LADDER_OF_TWO, "beam_size": 3, "best_of": 2},
        lambda: pcm_of("short"),
    ),
    "words": (WORDS, chat),
    "words and short silences": ({**WORDS, **mode(hallucination_silence_threshold=0.2)}, chat),
    "two minutes up the ladder": ({**CANDIDATES, "gates": NEVER}, talk),
    "two minutes of beams and candidates": (
        {**CANDIDATES, "gates": QualityGates(1.3, -0.3), "beam_size": 5},
        talk,
    ),
    "two minutes of words": ({**WORDS, **mode(hallucination_silence_threshold=0.2)}, talk),
}


MORE_OF_THE_SAME = {name for name in CASES if name.startswith("two minutes")} | {
    "a prompt",
    "the ladder of both",
    "what is unsure is silence",
    "nothing is silence",
    "long beams",
}


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=SLOW) if name in MORE_OF_THE_SAME else name for name in CASES],
)
async def test_it_equals_the_reference(demo: RequestTranscriber, tmp_path: Path, name: str) -> None:
    changes, make = CASES[name]
    params = replace(PARAMS, **changes)
    segments = await assert_equal(demo, params, make(), tmp_path)
    assert segments or name not in ("short", "long")
    if params.words:
        assert sum(len(segment["words"]) for segment in segments) > 30
    if params.gates is NEVER:
        assert {segment["temperature"] for segment in segments} == {LADDER[-1]}


@pytest.mark.parametrize(
    ("n_words", "carried"),
    [(45, True), *(pytest.param(*one, marks=SLOW) for one in product((40, 60), (True, False)))],
)
async def test_prompts_that_leave_no_room_equal_the_reference(
    micro: RequestTranscriber, tmp_path: Path, n_words: int, carried: bool
) -> None:
    """Of 200, 225 and 300 tokens, where 223 fit: the decoder cuts them from the front."""
    sequential = SequentialOptions(carry_initial_prompt=carried)
    prompt = "boat " * n_words
    assert len(tokenizer_of(MICRO).encode(f" {prompt.strip()}")) == 5 * n_words
    gates = QualityGates(None, None)
    params = replace(PARAMS, prompt=prompt, sequential=sequential, gates=gates)
    await assert_equal(micro, params, make_pcm(65.0, seed=3), tmp_path, MICRO)


async def test_a_clip_past_the_end_ends_with_the_file(
    demo: RequestTranscriber, tmp_path: Path
) -> None:
    """The reference never comes to an end there."""
    longer = replace(PARAMS, sequential=SequentialOptions(clip_timestamps=(2.0, 1000.0)))
    to_end = replace(PARAMS, sequential=SequentialOptions(clip_timestamps=(2.0,)))
    first, _ = await ours(demo, longer, pcm_of("medium"), tmp_path)
    second, _ = await ours(demo, to_end, pcm_of("medium"), tmp_path)
    assert first == second


@pytest.mark.parametrize(
    ("conditioned", "words"),
    [(False, False), *(pytest.param(*one, marks=SLOW) for one in ((False, True), (True, True)))],
)
async def test_a_model_that_says_anything(
    micro: RequestTranscriber, tmp_path: Path, conditioned: bool, words: bool
) -> None:
    """Random weights give what speech does not: full windows, odd timestamps, split characters."""
    sequential = SequentialOptions(condition_on_previous_text=conditioned)
    params = replace(
        PARAMS, language=None, words=words, sequential=sequential, gates=QualityGates(None, None)
    )
    pcm = make_pcm(47.3, seed=2)
    await assert_equal(micro, params, pcm, tmp_path, MICRO)


async def test_both_sides_suppress_the_same_tokens_and_encode_alike() -> None:
    """What the other tests rest on."""
    tokenizer = tokenizer_of(DEMO)
    with openai_vocabulary(DEMO):
        options = DECODING.DecodingOptions(**reference_options(DEMO))
        task = DECODING.DecodingTask(openai_model(DEMO), options)
        assert task._get_suppress_tokens() == tokenizer.suppress_tokens
        blank = (*task.tokenizer.encode(" "), task.tokenizer.eot)
        assert sorted(blank) == sorted(tokenizer.begin_suppress_tokens)
        for text in (f" {sample_text('long')}", " Don't, he said: 12 of 5!  Ça va?\n"):
            assert task.tokenizer.encode(text) == tokenizer.encode(text)
        assert task.tokenizer.sot_sequence == tokenizer.sot_sequence("en", "transcribe", True)
