"""Parallel mode: windows cut at pauses are decoded side by side, independently of each other.

While the language is unknown they go one by one, until one with speech shows it. Where a decoder
stops before a window's end or misses speech, the rest is decoded like a window of its own (unless
the client limits the tokens). Doubted text without detected speech is dropped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import fmean

from cluster.common.messages import SAMPLE_RATE, DecodeOptions, QualityGates
from cluster.common.model.text.tokenizer import WhisperTokenizer
from router.audio.stream import AudioStream
from router.audio.windows import Window
from router.interface import Update
from router.pipeline import Pipeline, RequestRun, WindowAudio
from router.transcript import Segment, WindowTranscript
from router.transcript_builder import TranscriptBuilder, gather_window, token_logprobs

MIN_TAIL_S = 0.1  # less than this cannot hold a word
MIN_QUIET_TAIL_S = 2.0  # a shorter one without text is likely the pause before a cut
MAX_TAILS = 16  # per window


@dataclass(slots=True)
class ParallelRun:
    pipeline: Pipeline
    run: RequestRun
    options: DecodeOptions  # `language` is set once it is known
    tokenizer: WhisperTokenizer
    builder: TranscriptBuilder
    logprobs: bool = False  # send the tokens' log probabilities
    context_for: Callable[[int], int] | None = None

    async def decode_all(self, stream: AudioStream, slots: asyncio.Semaphore) -> None:
        async with asyncio.TaskGroup() as group:
            async for window in stream:
                self.run.context.found_audio(window.end_s)
                if self.options.language is None:
                    await self._decode_window(window)
                    continue
                await slots.acquire()
                task = group.create_task(self._decode_window(window))
                task.add_done_callback(lambda _: slots.release())

    async def _decode_window(self, window: Window) -> None:
        parts: list[WindowTranscript] = []
        start_s: float | None = window.start_s
        n_left = self.options.max_new_tokens  # None: no limit
        while start_s is not None and len(parts) <= MAX_TAILS:
            part, n_tokens = await self._decode_part(window, start_s, len(parts), n_left)
            if self.options.language is None and any(s.text for s in part.segments):
                self.options = replace(self.options, language=part.language)
            parts.append(part)
            n_left = None if n_left is None else n_left - n_tokens
            start_s = _rest(part, window) if n_left is None or n_left > 0 else None
        self.run.context.finished_audio(window.n_samples / SAMPLE_RATE)
        text, segments = self.builder.add(window.index, parts)
        logprobs = token_logprobs(segments, self.tokenizer) if self.logprobs else ()
        if segments:
            self.run.context.update(Update(text, segments, logprobs))

    async def _decode_part(
        self, window: Window, start_s: float, n_before: int, max_new_tokens: int | None
    ) -> tuple[WindowTranscript, int]:
        """Also returns the number of sampled tokens."""
        pcm = window.pcm[round(start_s * SAMPLE_RATE) - window.start_sample :]
        gates = gates_for(window, self.options.gates)
        options = self.options
        if n_before or gates is not options.gates:  # most windows are one part with sure speech
            options = replace(
                options,
                seed=options.seed + n_before,
                gates=gates,
                max_new_tokens=max_new_tokens,
            )
        audio = WindowAudio.of_samples(window.index, pcm, self.context_for)
        result = await self.pipeline.decode(self.run, audio, options)
        part = gather_window(
            result,
            gates,
            offset_s=start_s,
            duration_s=pcm.shape[0] / SAMPLE_RATE,
            tokenizer=self.tokenizer,
            trust_start=True,
        )
        return without_hallucinations(part, window, gates), len(result.tokens)


def _rest(part: WindowTranscript, window: Window) -> float | None:
    if part.undecoded_s is None:
        return unheard_from(part, window)
    if part.undecoded_s <= part.offset_s:
        return None
    least_s = MIN_TAIL_S if part.has_tail else MIN_QUIET_TAIL_S
    return part.undecoded_s if window.end_s - part.undecoded_s >= least_s else None


FAINT_DOUBT = 0.5  # factor on the log probability that a window without sure speech needs
MIN_UNHEARD_S = 1.0  # a decoder's timestamps are less exact than the detector
LEAD_S = 0.3  # kept before speech that is decoded again
LEAST_SPEECH = 0.5  # share of a doubted segment that must be speech


def gates_for(window: Window, gates: QualityGates) -> QualityGates:
    """Apply stricter gates where the detector is not sure of speech."""
    if not window.is_faint or gates.no_speech_prob is None or gates.avg_logprob is None:
        return gates
    return replace(gates, no_speech_prob=0.0, avg_logprob=FAINT_DOUBT * gates.avg_logprob)


def without_hallucinations(
    part: WindowTranscript, window: Window, gates: QualityGates
) -> WindowTranscript:
    """Empty doubted segments without speech. They stay, since words are aligned with them."""
    if window.speech is None or gates.avg_logprob is None:
        return part
    limit, speech = gates.avg_logprob, window.speech
    segments = tuple(
        replace(segment, text="")
        if fmean(segment.logprobs or (0.0,)) < limit
        and _speech_share(segment, speech) < LEAST_SPEECH
        else segment
        for segment in part.segments
    )
    return replace(part, segments=segments)


def unheard_from(part: WindowTranscript, window: Window) -> float | None:
    """Start of the speech behind a part's last text, in seconds of the upload. None if there is
    less than `MIN_UNHEARD_S` of it, or if it is the whole part.
    """
    if window.speech is None or not part.segments:
        return None
    limit_s = part.offset_s + part.duration_s
    ends = (segment.end for segment in part.segments if segment.text)
    end_s = min(limit_s, max(ends, default=part.offset_s))
    spans = [
        (max(end_s, first / SAMPLE_RATE), min(limit_s, last / SAMPLE_RATE))
        for first, last in window.speech
    ]
    left = [span for span in spans if span[1] - span[0] >= LEAD_S]  # else the text's own end
    if sum(last_s - first_s for first_s, last_s in left) < MIN_UNHEARD_S:
        return None
    start_s = max(end_s, left[0][0] - LEAD_S)
    return start_s if start_s > part.offset_s else None


def _speech_share(segment: Segment, speech: tuple[tuple[int, int], ...]) -> float:
    start, end = (round(at_s * SAMPLE_RATE) for at_s in (segment.start, segment.end))
    heard = sum(max(0, min(end, last) - max(start, first)) for first, last in speech)
    return heard / max(1, end - start)
