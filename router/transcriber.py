"""Runs requests from upload to transcript, in parallel or sequential mode."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from cluster.common.clock import SYSTEM_CLOCK, Clock
from cluster.common.errors import UnsupportedValueError
from cluster.common.messages import (
    HOP_LENGTH,
    SAMPLE_RATE,
    WINDOW_SAMPLES,
    DecodeOptions,
    Pcm,
    Role,
    WorkerStatus,
)
from cluster.common.metrics import ROUTER_METRICS, Recorder, silent_recorder
from cluster.common.model.dims import ModelDims
from cluster.common.model.text.tokenizer import WhisperTokenizer
from cluster.common.settings import RouterSettings
from cluster.common.tracing import NO_TRACER, Tracer
from router.alignment import AlignmentRun
from router.api.params import TranscriptionParams
from router.audio.pool import AudioPool
from router.audio.stream import AudioStream
from router.interface import PoolHealth, RequestContext, TranscriptionResult
from router.known_text import aligned_transcript, given_words, said_parts
from router.parallel import ParallelRun
from router.pipeline import Pipeline, RequestRun, WindowAudio
from router.pools import DecoderClient, EncoderClient
from router.seeking import Seeker, TextContext
from router.sequential import SequentialRun
from router.speakers.channels import channels_of, transcribe_channels
from router.speakers.voices import NO_SPEAKER_MODEL, find_turns, transcribe_voices
from router.transcript import HeardPart, Transcript
from router.transcript_builder import TranscriptBuilder

AROUND_TEXT = 5  # tokens of a window's text context beside a known text


class RequestTranscriber:
    def __init__(
        self,
        audio: AudioPool,
        encoders: EncoderClient,
        decoders: DecoderClient,
        tokenizer: WhisperTokenizer,
        settings: RouterSettings,
        recorder: Recorder | None = None,
        *,
        dims: ModelDims,
        context_for: Callable[[int], int] | None = None,
        tracer: Tracer = NO_TRACER,
        clock: Clock = SYSTEM_CLOCK,
        may_sleep: Collection[Role] = (),
        reuses_kv: bool = True,
    ) -> None:
        """may_sleep: pools that are healthy without a worker, since a request starts one."""
        self._may_sleep = may_sleep
        self._audio = audio
        self._encoders = encoders
        self._decoders = decoders
        self.tokenizer = tokenizer
        self._dims = dims
        self._context_for = context_for
        self._settings = settings
        self._clock = clock
        self._recorder = recorder or silent_recorder(ROUTER_METRICS)
        self._pipeline = Pipeline(
            encoders, decoders, settings, self._recorder, tracer, clock, reuses_kv=reuses_kv
        )

    async def transcribe(
        self, upload: Path, params: TranscriptionParams, context: RequestContext
    ) -> TranscriptionResult:
        run = RequestRun(context)
        try:
            transcript = await self._transcribe(upload, params, run)
        except BaseExceptionGroup as failures:
            raise _first(failures) from None
        done_s = transcript.transcribed_s
        self._recorder.add("splitscribe_transcripts_total")
        self._recorder.add("splitscribe_transcribed_audio_seconds_total", done_s)
        return TranscriptionResult(transcript, run.timings)

    def check(self, params: TranscriptionParams) -> None:
        if params.speakers.by == "voice" and not self._audio.tells_voices_apart:
            asked = params.response_format == "diarized_json"
            param = "response_format" if asked else "diarize"
            raise UnsupportedValueError(NO_SPEAKER_MODEL, param=param)

    async def _transcribe(
        self, upload: Path, params: TranscriptionParams, run: RequestRun
    ) -> Transcript:
        context, speakers, settings = run.context, params.speakers, self._settings
        slots = asyncio.Semaphore(settings.max_windows_in_flight)

        async def one(channel: int | None, run: RequestRun) -> Transcript:
            if params.decoding == "sequential":
                return await self._transcribe_sequential(upload, params, run, channel)
            return await self._transcribe_parallel(upload, params, run, channel, slots)

        if speakers.by is None:
            return await one(None, run)
        if speakers.by == "voice":
            self.check(params)
            turns = find_turns(self._audio, upload, speakers, context)
            return await transcribe_voices(run, partial(one, None), turns, words=params.words)
        found = await self._audio.survey(upload, context)
        run.timings.audio_s += found.decode_s
        return await transcribe_channels(
            channels_of(found.result.channels, speakers.names),
            found.duration_s,
            run,
            one,
            max_audio_s=settings.max_audio_s,
            at_once=settings.max_windows_in_flight,
        )

    async def _transcribe_parallel(
        self,
        upload: Path,
        params: TranscriptionParams,
        run: RequestRun,
        channel: int | None,
        slots: asyncio.Semaphore,
    ) -> Transcript:
        opened_s = self._clock.monotonic()
        builder = TranscriptBuilder(self.tokenizer)
        context, options = run.context, self._options(params)
        work = ParallelRun(
            self._pipeline,
            run,
            options,
            self.tokenizer,
            builder,
            logprobs=params.logprobs,
            # Both passes of an alignment must have the same KV.
            context_for=None if params.known_lines else self._context_for,
        )
        async with self._audio.open(
            upload, context, chunking=params.chunking, channel=channel
        ) as stream:
            if stream.expected_s is not None:
                context.expect_audio(stream.expected_s)
            await work.decode_all(stream, slots)
        context.found_audio(stream.duration_s)
        self._record_audio(stream, run, opened_s)
        transcript = builder.finish(
            duration_s=stream.duration_s, task=params.task, language=work.options.language
        )
        if params.known_lines:
            transcript = await self._align(upload, params, run, transcript, builder.parts)
        return transcript

    async def _align(
        self,
        upload: Path,
        params: TranscriptionParams,
        run: RequestRun,
        heard: Transcript,
        parts: Sequence[HeardPart],
    ) -> Transcript:
        """Align the known text. `heard` is the transcript of the audio, made of `parts`."""
        lines, language = params.known_lines, heard.language
        most = self._dims.n_text_ctx - AROUND_TEXT
        given = await asyncio.to_thread(given_words, lines, self.tokenizer, language)
        said, alone = await asyncio.to_thread(said_parts, given, parts, self.tokenizer, most)
        work = AlignmentRun(self._pipeline, run, self._options(params), self.tokenizer)
        if said:
            async with self._audio.open(upload, run.context, chunking=params.chunking) as stream:
                await work.align_all(stream, said, self._settings.max_windows_in_flight)
        return await asyncio.to_thread(aligned_transcript, heard, lines, given, work.times, alone)

    async def _transcribe_sequential(
        self, upload: Path, params: TranscriptionParams, run: RequestRun, channel: int | None
    ) -> Transcript:
        context, opened_s = run.context, self._clock.monotonic()
        async with self._audio.open_whole(
            upload, context, n_mels=self._dims.n_mels, channel=channel
        ) as audio:
            if audio.expected_s is not None:
                context.expect_audio(audio.expected_s)
            await audio.load(context.found_audio)
            self._record_audio(audio, run, opened_s)
            options = replace(self._options(params), gates=replace(params.gates, keep="last"))
            seeker = Seeker(
                audio.n_samples // HOP_LENGTH,
                self._context(params),
                self.tokenizer,
                params.sequential,
                options.gates,
                aligned=options.words,
            )
            work = SequentialRun(
                self._pipeline,
                run,
                options,
                self.tokenizer,
                audio,
                seeker,
                logprobs=params.logprobs,
            )
            await work.decode_all()
        return work.transcript(params.task)

    async def detect_language(self, upload: Path, context: RequestContext) -> tuple[str, float]:
        async with self._audio.open(upload, context) as stream:
            if stream.expected_s is not None:
                context.expect_audio(stream.expected_s)
            pcm = await _first_speech(stream)
        if not self.tokenizer.is_multilingual:
            return "en", 1.0
        options = DecodeOptions(detect_only=True)
        audio = WindowAudio.of_samples(0, pcm)
        result = await self._pipeline.decode(RequestRun(context), audio, options)
        return result.language, math.exp(result.avg_logprob)

    def _context(self, params: TranscriptionParams) -> TextContext:
        return TextContext(
            self.tokenizer,
            self._dims.n_text_ctx,
            prompt=params.prompt,
            hotwords=params.hotwords,
            carried=params.sequential.carry_initial_prompt,
        )

    def _record_audio(self, audio: AudioStream, run: RequestRun, opened_s: float) -> None:
        run.timings.audio_s += audio.decode_s
        run.context.span.stage("audio", opened_s, audio.decode_s, audio_s=audio.duration_s)
        self._recorder.add("splitscribe_audio_seconds_total", audio.duration_s)
        self._recorder.observe("splitscribe_audio_decode_seconds", audio.decode_s)

    async def health(self) -> dict[Role, PoolHealth]:
        encoders, decoders = await asyncio.gather(self._encoders.status(), self._decoders.status())
        found: dict[Role, list[WorkerStatus]] = {"encoder": encoders, "decoder": decoders}
        pools = {}
        for role, workers in found.items():
            sleeps = not workers and role in self._may_sleep
            ready = sleeps or any(worker.healthy for worker in workers)
            of_workers = max((worker.of_workers for worker in workers), default=0)
            pools[role] = PoolHealth(ready, max(len(workers), of_workers), workers)
        return pools

    def _options(self, params: TranscriptionParams) -> DecodeOptions:
        language, languages = params.language, params.languages
        if language is None and not self.tokenizer.is_multilingual:
            language = "en"
        elif len(languages) == 1:
            (language,) = languages
        return DecodeOptions(
            language=language,
            languages=languages,
            task=params.task,
            timestamps=True,
            prompt_tokens=self._context(params).prompt_tokens(),
            temperatures=params.temperatures,
            seed=self._seed(params),
            beam_size=params.beam_size,
            patience=params.patience,
            best_of=params.best_of,
            length_penalty=params.length_penalty,
            gates=params.gates,
            words=params.aligns,
            max_new_tokens=params.max_completion_tokens,
        )

    def _seed(self, params: TranscriptionParams) -> int:
        if params.seed is not None:
            return params.seed
        return self._clock.random.getrandbits(31) if params.temperature > 0 else 0


async def _first_speech(stream: AudioStream) -> Pcm:
    """int16 [at most WINDOW_SAMPLES] from the first speech on, or a second of silence."""
    pcm = np.zeros(WINDOW_SAMPLES, np.int16)
    first, n_samples = None, 0
    async for window in stream:
        first = window.start_sample if first is None else first
        at = window.start_sample - first
        if at >= WINDOW_SAMPLES:
            break
        piece = window.pcm[: WINDOW_SAMPLES - at]
        n_samples = at + piece.shape[0]
        pcm[at:n_samples] = piece
        if n_samples == WINDOW_SAMPLES:
            break
    return pcm[: n_samples or SAMPLE_RATE]


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error that ended a nested group and cancelled its other tasks."""
    first = group.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first
