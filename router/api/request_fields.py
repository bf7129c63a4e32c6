"""The fields of a request, declared once for the parser (`router.api.forms`), the OpenAPI document,
the flags of `splitscribe transcribe` and `configs/API.md`. Defaults are those of
`TranscriptionParams`.
"""

from __future__ import annotations

from typing import Any

from router.api.kinds import (
    ALL,
    NO_ATTRIBUTE,
    AudioFile,
    AudioUrl,
    Boolean,
    Choice,
    Integer,
    Kind,
    Language,
    ListOf,
    Number,
    Origin,
    RequestField,
    SpeakerName,
    Text,
    Threshold,
    Times,
    VoiceCuts,
)
from router.api.params import DECODINGS, RESPONSE_FORMATS, Operation

TRANSCRIPTIONS: tuple[Operation, ...] = ("transcribe",)
ALIGNMENTS: tuple[Operation, ...] = ("align",)
MAX_SEED = 2**63 - 1
MAX_CANDIDATES = 16  # beams, or samples: query rows of one sequence
MAX_TOKENS = 1_000_000  # a window's text context is always smaller
MAX_COMPRESSION_RATIO = 1000  # about the highest that zlib reaches
MIN_LOGPROB = -100
MAX_SILENCE_S = 3600
MAX_CLIP_S = 7 * 24 * 3600
MAX_SPEAKERS = 32
MAX_KNOWN = 16  # speakers that `speakers.known_limit` may allow
MAX_REFERENCE_BYTES = 4 * 1024 * 1024  # of a known speaker's recording


def _flagged(
    name: str, kind: Kind, help: str, origin: Origin = "openai/whisper", **more: Any
) -> RequestField:
    return RequestField(name, kind, help, origin, f"--{name.replace('_', '-')}", **more)


SECTIONS: dict[str, tuple[RequestField, ...]] = {
    "Model and file": (
        RequestField(
            "file",
            AudioFile(),
            "The audio: flac, mp3, mp4, mpeg, mpga, m4a, ogg, opus, wav or webm. The format is "
            "found from the content, not from the file's name.",
            sets=NO_ATTRIBUTE,
            tasks=ALL,
        ),
        RequestField(
            "model",
            Text(examples=("whisper-1",)),
            "A name from `GET /v1/models`, or `whisper-1`.",
            sets=NO_ATTRIBUTE,
            tasks=ALL,
        ),
    ),
    "Known text": (
        RequestField(
            "text",
            Text(),
            "What is said, in lines of any length.",
            "splitscribe",
            sets=NO_ATTRIBUTE,
            tasks=ALIGNMENTS,
        ),
        RequestField(
            "lines",
            ListOf(Text()),
            "The same, line by line, in place of `text`.",
            "splitscribe",
            sets=NO_ATTRIBUTE,
            tasks=ALIGNMENTS,
        ),
    ),
    "Language and context": (
        _flagged(
            "language",
            Language(),
            "ISO-639-1 code or English name of the language. If it is left out, the language is "
            "detected.",
            "OpenAI",
            tasks=ALL,
        ),
        RequestField(
            "languages",
            ListOf(Language()),
            "The languages that are possible: one of them is detected, and `json` and the last "
            "event of a stream name it. Not beside `language`.",
            tasks=TRANSCRIPTIONS,
        ),
        RequestField(
            "prompt",
            Text(),
            "Text that came before the audio. It guides the style and the spelling of the "
            "transcript.",
            flag="--initial-prompt",
        ),
        _flagged(
            "hotwords",
            Text(),
            "Words to expect, such as names. They are put before the prompt of every window.",
            "faster-whisper",
            sets=NO_ATTRIBUTE,
        ),
        RequestField(
            "keywords",
            ListOf(Text()),
            "Words to expect. They are added to `hotwords`.",
            sets=NO_ATTRIBUTE,
            tasks=TRANSCRIPTIONS,
        ),
    ),
    "Answer": (
        RequestField(
            "response_format",
            Choice(RESPONSE_FORMATS),
            "`json` and `text` give the text, `verbose_json` also segments or words with times, "
            "`srt` and `vtt` give subtitles, and `diarized_json` segments with speakers.",
            tasks=ALL,
            may_be_empty=False,
        ),
        RequestField(
            "timestamp_granularities",
            ListOf(Choice(("word", "segment"))),
            "What `verbose_json` lists: `segment` (the default), `word`, or both.",
            sets=NO_ATTRIBUTE,
        ),
        RequestField(
            "include",
            ListOf(Choice(("logprobs",))),
            "`logprobs` adds the log probability of each token. Only with `json`.",
            sets=NO_ATTRIBUTE,
            tasks=TRANSCRIPTIONS,
        ),
        RequestField(
            "stream",
            Boolean(),
            "Send the text as server-sent events while the rest is still being transcribed. With "
            "`srt` and `vtt`, each delta holds whole cues; with `verbose_json`, the last event "
            "has the whole answer.",
        ),
        RequestField(
            "stream_include_usage",
            Boolean(),
            "Stream as vLLM does: each delta also has `choices`, and the last event's `usage` has "
            "`prompt_tokens` and `completion_tokens`.",
            "vLLM",
            tasks=TRANSCRIPTIONS,
        ),
        RequestField(
            "stream_continuous_usage_stats",
            Boolean(),
            "With `stream_include_usage`: each delta also has the `usage` of all segments that "
            "are complete by then.",
            "vLLM",
            tasks=TRANSCRIPTIONS,
        ),
    ),
    "Speakers": (
        _flagged(
            "diarize",
            Boolean(),
            "Tell speakers apart by their voices, as `diarized_json` always does. `verbose_json`, "
            "`vtt` and `srt` name them too, and a text does before each turn. Not beside "
            "`channels=separate`.",
            "Mistral",
            sets=NO_ATTRIBUTE,
        ),
        _flagged(
            "channels",
            Choice(("mix", "separate")),
            "`separate`: transcribe each channel of the file by itself; each is a speaker. Equal "
            "channels are transcribed once, silent ones not at all. `mix`, the default, "
            "transcribes the sum of the channels.",
            "splitscribe",
            sets=NO_ATTRIBUTE,
        ),
        RequestField(
            "channel_names",
            ListOf(SpeakerName()),
            "With `channels=separate`: the speakers' names, in the order of the channels, in place "
            "of `channel 1` and so on.",
            "splitscribe",
            "--channel-names",
            "speakers.names",
        ),
        _flagged(
            "num_speakers",
            Integer(1, MAX_SPEAKERS),
            "The number of speakers. If it is left out, it is estimated.",
            "splitscribe",
            sets="speakers.num_speakers",
        ),
        _flagged(
            "min_speakers",
            Integer(1, MAX_SPEAKERS),
            "The least number of speakers.",
            "splitscribe",
            sets="speakers.min_speakers",
        ),
        _flagged(
            "max_speakers",
            Integer(1, MAX_SPEAKERS),
            "The largest number of speakers.",
            "splitscribe",
            sets="speakers.max_speakers",
        ),
        RequestField(
            "known_speaker_names",
            ListOf(SpeakerName(), MAX_KNOWN),
            "Names of known speakers, at most 4 unless the server allows more. Other speakers "
            "are called `A`, `B` and so on.",
            flag="--known-speaker-names",
            sets="speakers.names",
        ),
        RequestField(
            "known_speaker_references",
            ListOf(AudioUrl(MAX_REFERENCE_BYTES), MAX_KNOWN),
            "Recordings of the known speakers, in the order of their names: data URLs (on the "
            "command line files) with 1.2 to 10 s of audio each, of at most 4 MB each and 16 MB "
            "together.",
            flag="--known-speaker-references",
            sets="speakers.references",
        ),
    ),
    "Decoding": (
        _flagged(
            "temperature",
            Number(0, 1),
            "At 0, decoding is greedy, or a beam search; above 0, tokens are sampled.",
            "OpenAI",
        ),
        _flagged(
            "beam_size",
            Integer(1, MAX_CANDIDATES),
            "Number of beams at temperature 0; 1 decodes greedily.",
        ),
        _flagged(
            "patience",
            Number(0.1, 8),
            "The beam search ends when `beam_size` times `patience` texts are complete.",
        ),
        _flagged(
            "best_of",
            Integer(1, MAX_CANDIDATES),
            "Number of samples above temperature 0, of which the best one is kept.",
        ),
        _flagged(
            "length_penalty",
            Number(0, 1),
            "Exponent of Google's length penalty, which ranks beams and samples. If it is left "
            "out, their mean log probability ranks them.",
        ),
        _flagged(
            "seed",
            Integer(0, MAX_SEED),
            "Seed of the sampling: the same seed gives the same text. If it is left out, it is "
            "random.",
            "vLLM",
        ),
        RequestField(
            "max_completion_tokens",
            Integer(1, MAX_TOKENS),
            "The largest number of tokens of a window, timestamps included. Text beyond it is "
            "cut off.",
            "vLLM",
        ),
    ),
    "Temperature fallback": (
        RequestField(
            "fallback",
            Boolean(),
            "Decode a window again at higher temperatures if its text fails the thresholds below. "
            "Only if `temperature` is 0.",
            "splitscribe",
        ),
        _flagged(
            "compression_ratio_threshold",
            Threshold(0, MAX_COMPRESSION_RATIO),
            "A text with a higher zlib compression ratio repeats itself, and fails.",
            sets="gates.compression_ratio",
            may_be_empty=False,
        ),
        _flagged(
            "logprob_threshold",
            Threshold(MIN_LOGPROB, 0),
            "A text whose mean log probability is lower fails: the model is unsure of it.",
            sets="gates.avg_logprob",
            may_be_empty=False,
        ),
        _flagged(
            "no_speech_threshold",
            Threshold(0, 1),
            "A window with a higher probability of no speech counts as silence, if its text also "
            "fails `logprob_threshold`.",
            sets="gates.no_speech_prob",
            may_be_empty=False,
        ),
    ),
    "Long files": (
        _flagged(
            "decoding",
            Choice(DECODINGS),
            "`parallel`: the audio is cut into windows at pauses, and these are decoded side by "
            "side. `sequential`: as openai/whisper does it, each window begins where the last "
            "one's text ended.",
            "splitscribe",
        ),
        RequestField(
            "chunking_strategy",
            VoiceCuts(),
            "How the audio is cut into windows. Not with `decoding=sequential`.",
            sets="chunking",
            tasks=TRANSCRIPTIONS,
        ),
        _flagged(
            "condition_on_previous_text",
            Boolean(),
            "Give each window the text before it as its prompt.",
            sets="sequential.condition_on_previous_text",
        ),
        _flagged(
            "carry_initial_prompt",
            Boolean(),
            "Put `prompt` before every window.",
            sets="sequential.carry_initial_prompt",
        ),
        _flagged(
            "clip_timestamps",
            Times(MAX_CLIP_S),
            "The parts to transcribe, as start, end, start, end, ... in seconds. A last start "
            "without an end means up to the file's end. They may be one text with commas.",
            sets="sequential.clip_timestamps",
        ),
        _flagged(
            "hallucination_silence_threshold",
            Threshold(0, MAX_SILENCE_S),
            "Skip silence of more than so many seconds around words that the model may have made "
            "up.",
            sets="sequential.hallucination_silence_threshold",
        ),
    ),
}
FIELDS = {field.name: field for fields in SECTIONS.values() for field in fields}


def fields_of(task: Operation) -> dict[str, RequestField]:
    return {name: field for name, field in FIELDS.items() if task in field.tasks}
