"""The checked parameters of a request, from a form or from the command line's flags."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

from cluster.common.messages import QualityGates, Task

ResponseFormat = Literal["json", "text", "srt", "verbose_json", "vtt", "diarized_json"]
Decoding = Literal["parallel", "sequential"]
Operation = Literal["transcribe", "translate", "align"]  # one for each audio endpoint
Way = Literal["voice", "channel"]  # how speakers are told apart

RESPONSE_FORMATS: tuple[str, ...] = get_args(ResponseFormat)
DECODINGS: tuple[str, ...] = get_args(Decoding)
PARALLEL_GATES = QualityGates(keep="best")  # windows are independent: take the best attempt
LADDER = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)  # openai/whisper's temperatures


@dataclass(frozen=True, slots=True)
class Chunking:
    """Parameters of the voice detector (`chunking_strategy`), with OpenAI's defaults."""

    threshold: float = 0.5
    prefix_padding_ms: int = 300
    silence_duration_ms: int = 200


@dataclass(frozen=True, slots=True)
class SequentialOptions:
    """Parameters of sequential mode alone, with openai/whisper's names and defaults."""

    condition_on_previous_text: bool = True
    carry_initial_prompt: bool = False
    hallucination_silence_threshold: float | None = None
    clip_timestamps: tuple[float, ...] = ()  # start, end, start, ... in s; no last end: to the end


@dataclass(frozen=True, slots=True)
class SpeakerOptions:
    by: Way | None = None  # None: speakers are not told apart
    num_speakers: int | None = None
    min_speakers: int | None = None
    max_speakers: int | None = None
    names: tuple[str, ...] = ()  # of the known voices, or of the channels in their order
    references: tuple[bytes, ...] = field(default=(), repr=False)  # a file for each known voice


@dataclass(frozen=True, slots=True)
class TranscriptionParams:
    model: str  # as the client spelled it
    language: str | None = None  # code; None: detect it, among `languages` if any are given
    languages: tuple[str, ...] = ()
    prompt: str | None = None  # text that came before the audio
    hotwords: str | None = None  # words to expect
    temperature: float = 0.0  # 0 is greedy
    fallback: bool = True  # from temperature 0, decode again at the next one if `gates` fail
    seed: int | None = None  # of the sampling noise; None: drawn at random
    response_format: ResponseFormat = "json"
    task: Task = "transcribe"
    stream: bool = False
    words: bool = False
    segments: bool = True
    logprobs: bool = False
    chunking: Chunking | None = None  # None: the server decides where to cut
    decoding: Decoding = "parallel"
    sequential: SequentialOptions = SequentialOptions()
    beam_size: int = 1
    patience: float = 1.0
    best_of: int = 1
    length_penalty: float | None = None
    gates: QualityGates = PARALLEL_GATES
    max_completion_tokens: int | None = None  # of each window
    stream_include_usage: bool = False  # events also have vLLM's fields
    stream_continuous_usage_stats: bool = False  # with `stream_include_usage`: usage in each event
    known_lines: tuple[str, ...] = ()  # the text to align; empty: transcribe
    speakers: SpeakerOptions = SpeakerOptions()

    @property
    def temperatures(self) -> tuple[float, ...]:
        return LADDER if self.fallback and self.temperature == 0 else (self.temperature,)

    @property
    def aligns(self) -> bool:
        """Whether the decoder has to align words. A translation's words have no speakers."""
        skips = self.sequential.hallucination_silence_threshold is not None
        by_voice = self.speakers.by == "voice" and self.task == "transcribe"
        return self.words or bool(self.known_lines) or skips or by_voice
