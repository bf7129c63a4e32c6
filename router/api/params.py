"""What a client asks for, checked: the frozen parameters of one request.

Made by `router.api.forms` from a form, or by the command line from flags; read by the pipeline and
by what writes the answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from cluster.common.messages import QualityGates, Task
from router.speakers.options import NO_SPEAKERS, SpeakerOptions

ResponseFormat = Literal["json", "text", "srt", "verbose_json", "vtt", "diarized_json"]
Decoding = Literal["parallel", "sequential"]
Operation = Literal["transcribe", "translate", "align"]  # one for each audio endpoint

RESPONSE_FORMATS: tuple[str, ...] = get_args(ResponseFormat)
DECODINGS: tuple[str, ...] = get_args(Decoding)
PARALLEL_GATES = QualityGates(keep="best")  # windows are independent: take the best attempt
LADDER = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)  # openai/whisper's temperatures


@dataclass(frozen=True, slots=True)
class Chunking:
    """How the voice detector cuts (`chunking_strategy`); OpenAI's defaults."""

    threshold: float = 0.5
    prefix_padding_ms: int = 300
    silence_duration_ms: int = 200


@dataclass(frozen=True, slots=True)
class SequentialOptions:
    """What only sequential mode knows, under openai/whisper's names and with its defaults.

    clip_timestamps: start, end, start, end, ... in seconds; a last start without an end lasts
        to the end of the file.
    """

    condition_on_previous_text: bool = True
    carry_initial_prompt: bool = False
    hallucination_silence_threshold: float | None = None
    clip_timestamps: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class TranscriptionParams:
    """A checked request.

    model: name as the client spelled it; language: code, or None to detect it, among `languages`
    where there are some; prompt: text that came before the audio; hotwords: words to expect;
    temperature: 0 is greedy; fallback: try higher temperatures where an attempt fails `gates` (only
    from temperature 0 on); seed: of the sampling noise, None for one drawn at random; words,
    segments, logprobs: what the answer shall hold; stream: send it as it becomes certain; chunking:
    None leaves the cuts to the server; max_completion_tokens: of each window, None for as many as
    the model can; stream_include_usage: events are also in vLLM's shape, which with
    stream_continuous_usage_stats has the usage in each;
    known_lines: the text, where it is known and only its times are asked for; speakers: whether and
    how they are told apart.
    """

    model: str
    language: str | None = None
    languages: tuple[str, ...] = ()
    prompt: str | None = None
    hotwords: str | None = None
    temperature: float = 0.0
    fallback: bool = True
    seed: int | None = None
    response_format: ResponseFormat = "json"
    task: Task = "transcribe"
    stream: bool = False
    words: bool = False
    segments: bool = True
    logprobs: bool = False
    chunking: Chunking | None = None
    decoding: Decoding = "parallel"
    sequential: SequentialOptions = SequentialOptions()
    beam_size: int = 1
    patience: float = 1.0
    best_of: int = 1
    length_penalty: float | None = None
    gates: QualityGates = PARALLEL_GATES
    max_completion_tokens: int | None = None
    stream_include_usage: bool = False
    stream_continuous_usage_stats: bool = False
    known_lines: tuple[str, ...] = ()
    speakers: SpeakerOptions = NO_SPEAKERS

    @property
    def temperatures(self) -> tuple[float, ...]:
        """Tried in order."""
        return LADDER if self.fallback and self.temperature == 0 else (self.temperature,)

    @property
    def aligns(self) -> bool:
        """Whether the decoder has to tell when words are spoken.

        A translation's words are nobody's: there, segments have speakers.
        """
        skips = self.sequential.hallucination_silence_threshold is not None
        by_voice = self.speakers.by == "voice" and self.task == "transcribe"
        return self.words or bool(self.known_lines) or skips or by_voice
