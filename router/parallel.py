"""Parallel mode: windows cut at pauses, decoded side by side, each by itself.

A bounded number of windows runs at a time, each through its own chain of encodes and decodes, so
that none holds pages while another waits. While the language is unknown, windows go one after
another, until one with speech shows it. Where a decoder stopped before a window's end or before
speech in it, the rest is decoded as a window of its own, so that nothing said is lost (unless the
client limits the tokens of each window).
Where tokens are sent one by one, nothing can be taken back: a window is decoded only once, and its
last text lasts to its end. `router.unsupported_text` decides which text needs the support of the
voice detector.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from cluster.common.messages import SAMPLE_RATE, DecodeOptions, Pcm, QualityGates, SampledToken
from cluster.common.model.text.tokenizer import WhisperTokenizer
from router.audio.stream import AudioStream
from router.audio.windows import Window
from router.interface import Update
from router.pipeline import Pipeline, RequestRun, WindowAudio
from router.transcript import WindowTranscript
from router.transcript_builder import TranscriptBuilder, gather_window, token_logprobs
from router.unsupported_text import gates_for, unheard_from, without_hallucinations

MIN_TAIL_S = 0.1  # less than this cannot hold a word
MIN_QUIET_TAIL_S = 2.0  # the same without text from the decoder: likely the pause before a cut
MAX_TAILS = 16  # of one window


@dataclass(slots=True)
class ParallelRun:
    """One request in parallel mode.

    options: their language is set once it is known. logprobs: send those of the tokens as well.
    by_token: send each token's text at once; only where each window is decoded at one temperature.
    context_for: from a window's content, in mel frames, to the encoder positions that it gets at
        first; None: all.
    """

    pipeline: Pipeline
    run: RequestRun
    options: DecodeOptions
    tokenizer: WhisperTokenizer
    builder: TranscriptBuilder
    logprobs: bool = False
    by_token: bool = False
    context_for: Callable[[int], int] | None = None

    async def decode_all(self, stream: AudioStream, max_in_flight: int) -> None:
        """Decode every window of the stream."""
        slots = asyncio.Semaphore(max_in_flight)
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
        while start_s is not None and len(parts) <= MAX_TAILS:
            part = await self._decode_part(window, start_s, len(parts))
            if self.options.language is None and any(s.text for s in part.segments):
                self.options = replace(self.options, language=part.language)
            parts.append(part)
            start_s = None if self.options.max_new_tokens else _rest(part, window)
        self.run.context.finished_audio(window.n_samples / SAMPLE_RATE)
        text, segments = self.builder.add(window.index, parts)
        logprobs = token_logprobs(segments, self.tokenizer) if self.logprobs else ()
        if text or segments:
            self.run.context.update(Update(text, segments, logprobs))

    def _send_token(self, index: int, gates: QualityGates, token: SampledToken) -> None:
        """Send a token's text at once, unless the window may yet turn out to hold no speech."""
        limit = gates.no_speech_prob
        if limit is not None and token.no_speech_prob > limit:
            return
        if text := self.builder.add_token(index, token.token):
            self.run.context.update(Update(text))

    async def _decode_part(self, window: Window, start_s: float, number: int) -> WindowTranscript:
        """Decode the window from `start_s` on; `number` tells its parts apart."""
        pcm = _samples_from(window, start_s)
        gates = gates_for(window, self.options.gates)
        options = self.options
        if number or gates is not options.gates:  # most windows are one part, of sure speech
            options = replace(options, seed=options.seed + number, gates=gates)
        audio = WindowAudio.of_samples(window.index, pcm, self.context_for)
        on_token = partial(self._send_token, window.index, gates) if self.by_token else None
        result = await self.pipeline.decode(self.run, audio, options, on_token)
        part = gather_window(
            result,
            gates,
            offset_s=start_s,
            duration_s=pcm.shape[0] / SAMPLE_RATE,
            tokenizer=self.tokenizer,
            keep_tail=self.by_token,
            trust_start=True,
        )
        return without_hallucinations(part, window, gates)


def _rest(part: WindowTranscript, window: Window) -> float | None:
    """Where to go on after `part`; None when the window is done."""
    if part.undecoded_s is None:
        return unheard_from(part, window)
    if part.undecoded_s <= part.offset_s:
        return None
    least_s = MIN_TAIL_S if part.has_tail else MIN_QUIET_TAIL_S
    return part.undecoded_s if window.end_s - part.undecoded_s >= least_s else None


def _samples_from(window: Window, start_s: float) -> Pcm:
    return window.pcm[round(start_s * SAMPLE_RATE) - window.start_sample :]
