"""Every field of a request, declared once.

From this table come the form's parser (`router.api.forms`), the API's description
(`router.api.openapi`), the flags of `splitscribe transcribe` and the tables of `configs/API.md`.
Its defaults are those of `TranscriptionParams`. How fields go together: `router.api.rules`.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Literal

from cluster.messages import Task
from router.api.chunking import VoiceCuts
from router.api.kinds import (
    AudioFile,
    Boolean,
    Choice,
    Integer,
    Kind,
    Language,
    ListOf,
    Number,
    Text,
    Threshold,
    Times,
)
from router.api.params import DECODINGS, RESPONSE_FORMATS, TranscriptionParams

Origin = Literal["OpenAI", "openai/whisper", "faster-whisper", "vLLM", "splitscribe"]

BOTH: tuple[Task, ...] = ("transcribe", "translate")
TRANSCRIPTIONS: tuple[Task, ...] = ("transcribe",)
NO_ATTRIBUTE = ""  # `router.api.forms` makes parameters of the field itself

MAX_SEED = 2**63 - 1
MAX_CANDIDATES = 16  # beams, or samples: query rows of one sequence
MAX_TOKENS = 1_000_000  # more than any window's text context, which bounds it anyway
MAX_COMPRESSION_RATIO = 1000  # zlib cannot do better
MIN_LOGPROB = -100
MAX_SILENCE_S = 3600
MAX_CLIP_S = 7 * 24 * 3600

_USUAL = TranscriptionParams(model="")


@dataclass(frozen=True, slots=True)
class RequestField:
    """One field.

    help: in Markdown; names and values stand in backquotes. origin: whose field it is: those that
        are not OpenAI's go into `extra_body` of its SDKs. tasks: whose endpoints take it.
    flag: its name on the command line, which is openai/whisper's where that has it; "": not there.
    sets: the attribute of `TranscriptionParams`, dotted for one of its parts; None: the field's
        own name. may_be_empty: an empty text is as if nothing had been sent.
    """

    name: str
    kind: Kind
    help: str
    origin: Origin = "OpenAI"
    flag: str = ""
    sets: str | None = None
    tasks: tuple[Task, ...] = BOTH
    may_be_empty: bool = True

    @property
    def attribute(self) -> str:
        return self.name if self.sets is None else self.sets

    @property
    def only_sequential(self) -> bool:
        """Whether it needs `decoding=sequential`."""
        return self.attribute.startswith("sequential.")

    @property
    def default(self) -> Any:
        """The parameter's; None where there is none, or where it is made of several fields."""
        return attrgetter(self.attribute)(_USUAL) if self.attribute else None

    @property
    def description(self) -> str:
        """All that is to be said of it, in Markdown."""
        condition = "Only with `decoding=sequential`. " if self.only_sequential else ""
        off = " `none` turns it off." if isinstance(self.kind, Threshold) else ""
        return f"{condition}{self.help}{off}"

    @property
    def spelling(self) -> str:
        """The name as the documentation writes it."""
        return f"{self.name}[]" if self.kind.shape == "list" else self.name


SECTIONS: dict[str, tuple[RequestField, ...]] = {
    "What is sent": (
        RequestField(
            "file",
            AudioFile(),
            "The audio: flac, mp3, mp4, mpeg, mpga, m4a, ogg, opus, wav or webm. "
            "What it is is seen from its content, not from its name.",
            sets=NO_ATTRIBUTE,
        ),
        RequestField(
            "model",
            Text(examples=("whisper-1",)),
            "A name from `GET /v1/models`, or `whisper-1`.",
            sets=NO_ATTRIBUTE,
        ),
    ),
    "What is said": (
        RequestField(
            "language",
            Language(),
            "ISO-639-1 code or English name. Left out, it is detected.",
            flag="--language",
        ),
        RequestField(
            "prompt",
            Text(),
            "Text that came before the audio: sets style and spelling.",
            flag="--initial-prompt",
        ),
        RequestField(
            "hotwords",
            Text(),
            "Words to expect, such as names; put before the prompt of every window.",
            "faster-whisper",
            "--hotwords",
            sets=NO_ATTRIBUTE,
        ),
        RequestField(
            "keywords",
            ListOf(Text()),
            "Words to expect; added to `hotwords`.",
            sets=NO_ATTRIBUTE,
            tasks=TRANSCRIPTIONS,
        ),
    ),
    "What is answered": (
        RequestField(
            "response_format",
            Choice(RESPONSE_FORMATS, unsupported=("diarized_json",)),
            "`json` and `text` give the text, `verbose_json` segments or words with times too, "
            "`srt` and `vtt` subtitles.",
            may_be_empty=False,
        ),
        RequestField(
            "timestamp_granularities",
            ListOf(Choice(("word", "segment"))),
            "What `verbose_json` lists: `segment` (the default), `word`, or both.",
            sets=NO_ATTRIBUTE,
            tasks=TRANSCRIPTIONS,
        ),
        RequestField(
            "include",
            ListOf(Choice(("logprobs",))),
            "`logprobs`: each token's log probability. Only with `json`.",
            sets=NO_ATTRIBUTE,
            tasks=TRANSCRIPTIONS,
        ),
        RequestField(
            "stream",
            Boolean(),
            "Answer with server-sent events while the rest is still being transcribed. With `srt` "
            "and `vtt` each delta is whole cues; with `verbose_json` the last event has the whole "
            "answer.",
            tasks=TRANSCRIPTIONS,
        ),
        RequestField(
            "stream_include_usage",
            Boolean(),
            "As vLLM's clients read a stream: each delta has `choices` besides, and the last "
            "event's `usage` has `prompt_tokens` and `completion_tokens`.",
            "vLLM",
            tasks=TRANSCRIPTIONS,
        ),
        RequestField(
            "stream_continuous_usage_stats",
            Boolean(),
            "With `stream_include_usage`: each delta has `usage` too, of the segments closed by "
            "then.",
            "vLLM",
            tasks=TRANSCRIPTIONS,
        ),
    ),
    "How text is found": (
        RequestField(
            "temperature",
            Number(0, 1),
            "0 decodes greedily, or with beams; above it, tokens are sampled.",
            flag="--temperature",
        ),
        RequestField(
            "beam_size",
            Integer(1, MAX_CANDIDATES),
            "Beams at temperature 0.",
            "openai/whisper",
            "--beam-size",
        ),
        RequestField(
            "patience",
            Number(0.1, 8),
            "Of the beam search: it ends when `beam_size` times this many texts are complete.",
            "openai/whisper",
            "--patience",
        ),
        RequestField(
            "best_of",
            Integer(1, MAX_CANDIDATES),
            "Samples above temperature 0.",
            "openai/whisper",
            "--best-of",
        ),
        RequestField(
            "length_penalty",
            Number(0, 1),
            "Ranks beams and samples by Google's formula; left out: by their mean.",
            "openai/whisper",
            "--length-penalty",
        ),
        RequestField(
            "seed",
            Integer(0, MAX_SEED),
            "Of the sampling: the same seed gives the same text. Left out, it is drawn at random.",
            "vLLM",
            "--seed",
        ),
        RequestField(
            "max_completion_tokens",
            Integer(1, MAX_TOKENS),
            "Tokens of each window, timestamps included; what it has no room for is not "
            "transcribed.",
            "vLLM",
        ),
    ),
    "When a window is tried again": (
        RequestField(
            "fallback",
            Boolean(),
            "Decode a window again at higher temperatures where its text fails the thresholds "
            "below; only from temperature 0 on.",
            "splitscribe",
        ),
        RequestField(
            "compression_ratio_threshold",
            Threshold(0, MAX_COMPRESSION_RATIO),
            "Text that compresses better repeats itself and has failed.",
            "openai/whisper",
            "--compression-ratio-threshold",
            "gates.compression_ratio",
            may_be_empty=False,
        ),
        RequestField(
            "logprob_threshold",
            Threshold(MIN_LOGPROB, 0),
            "Text whose mean log probability is lower has failed: the model is unsure of it.",
            "openai/whisper",
            "--logprob-threshold",
            "gates.avg_logprob",
            may_be_empty=False,
        ),
        RequestField(
            "no_speech_threshold",
            Threshold(0, 1),
            "A window above it is silence, if its text has failed `logprob_threshold` too.",
            "openai/whisper",
            "--no-speech-threshold",
            "gates.no_speech_prob",
            may_be_empty=False,
        ),
    ),
    "How long files are read": (
        RequestField(
            "decoding",
            Choice(DECODINGS),
            "`parallel`: windows cut at pauses, decoded side by side. `sequential`: "
            "openai/whisper's own way, each window from where the last one's text ended.",
            "splitscribe",
            "--decoding",
        ),
        RequestField(
            "chunking_strategy",
            VoiceCuts(),
            "How the audio is cut into windows; not with `decoding=sequential`.",
            sets="chunking",
            tasks=TRANSCRIPTIONS,
        ),
        RequestField(
            "condition_on_previous_text",
            Boolean(),
            "Show each window the text before it.",
            "openai/whisper",
            "--condition-on-previous-text",
            "sequential.condition_on_previous_text",
        ),
        RequestField(
            "carry_initial_prompt",
            Boolean(),
            "Put `prompt` before every window.",
            "openai/whisper",
            "--carry-initial-prompt",
            "sequential.carry_initial_prompt",
        ),
        RequestField(
            "clip_timestamps",
            Times(MAX_CLIP_S),
            "start, end, start, end, ... in seconds: the parts to transcribe; a last start without "
            "an end lasts to the file's end. One text with commas will do.",
            "openai/whisper",
            "--clip-timestamps",
            "sequential.clip_timestamps",
        ),
        RequestField(
            "hallucination_silence_threshold",
            Threshold(0, MAX_SILENCE_S),
            "Skip silence of so many seconds around odd words, which may be made up.",
            "openai/whisper",
            "--hallucination-silence-threshold",
            "sequential.hallucination_silence_threshold",
        ),
    ),
}
FIELDS = {field.name: field for fields in SECTIONS.values() for field in fields}
NOT_OFFERED = ("languages", "known_speaker_names", "known_speaker_references")  # OpenAI's


def fields_of(task: Task) -> dict[str, RequestField]:
    """What the task's endpoint takes, by name."""
    return {name: field for name, field in FIELDS.items() if task in field.tasks}
