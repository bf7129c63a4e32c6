"""What programs send that cannot be installed here, read from the source of the version named.

Each is the body of one request as that version makes it: the fields, their order, the file's name
and type. A test sends them and reads the answer as the program does.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass, field
from typing import Any

Part = tuple[str, Any]


@dataclass(frozen=True, slots=True)
class Recorded:
    """One request. parts: of the form, in order; FILE stands for the audio. document: JSON."""

    program: str
    version: str
    path: str
    parts: tuple[Part, ...] = ()
    document: dict[str, Any] | None = None
    query: dict[str, str] = field(default_factory=dict)

    def arguments(self, audio: bytes) -> dict[str, Any]:
        """For `httpx.post`."""
        if self.document is not None:
            encoded = base64.b64encode(audio).decode()
            sound = {**self.document["input_audio"], "data": encoded}
            return {"json": {**self.document, "input_audio": sound}}
        files = [
            (name, (value.name, audio, value.type) if isinstance(value, File) else (None, value))
            for name, value in self.parts
        ]
        return {"files": files, "params": self.query}


@dataclass(frozen=True, slots=True)
class File:
    """The upload: its name, and its type where the program gives one."""

    name: str
    type: str | None = None


TRANSCRIPTIONS = "/v1/audio/transcriptions"
TRANSLATIONS = "/v1/audio/translations"

OPEN_WEBUI_FORM = Recorded(
    "Open WebUI",
    "0.12.4",
    TRANSCRIPTIONS,
    (("model", "whisper-1"), ("language", "en"), ("file", File("8c4.webm"))),
)
OPEN_WEBUI_FORM_AGAIN = Recorded(  # what it sends when the first try fails
    "Open WebUI", "0.12.4", TRANSCRIPTIONS, (("model", "whisper-1"), ("file", File("8c4.webm")))
)
OPEN_WEBUI_JSON = Recorded(
    "Open WebUI",
    "0.12.4",
    TRANSCRIPTIONS,
    document={"model": "whisper-1", "language": "en", "input_audio": {"format": "wav"}},
)
LIBRECHAT = Recorded(
    "LibreChat",
    "commit 00b3bc3",
    TRANSCRIPTIONS,
    (("file", File("audio.wav", "audio/wav")), ("model", "whisper-1"), ("language", "en")),
)
N8N = Recorded(
    "n8n",
    "commit 536d907",
    TRANSCRIPTIONS,
    (
        ("model", "whisper-1"),
        ("language", "en"),
        ("temperature", "0.1"),
        ("file", File("talk.wav", "audio/wav")),
    ),
)
NEXTCLOUD = Recorded(
    "Nextcloud",
    "integration_openai 5.0.0",
    TRANSCRIPTIONS,
    (
        ("model", "whisper-1"),
        ("file", File("file.mp3")),
        ("response_format", "verbose_json"),
        ("language", "en"),
    ),
)
NEXTCLOUD_SUBTITLES = Recorded(
    "Nextcloud",
    "integration_openai 5.0.0",
    TRANSLATIONS,
    (
        ("model", "whisper-1"),
        ("file", File("file.mp3")),
        ("response_format", "srt"),
        ("language", "en"),
    ),
)
VLLM_BENCH = Recorded(
    "vllm bench serve",
    "commit 02cfb53",
    TRANSCRIPTIONS,
    (
        ("file", File("audio.wav", "audio/wav")),
        ("model", "whisper-1"),
        ("max_completion_tokens", "64"),
        ("stream", "True"),
        ("language", "en"),
        ("stream_include_usage", "True"),
        ("stream_continuous_usage_stats", "True"),
    ),
)
GUIDELLM = Recorded(
    "guidellm",
    "0.8.1",
    TRANSCRIPTIONS,
    (
        ("model", "whisper-1"),
        ("stream", "true"),
        ("stream_include_usage", "true"),
        ("stream_continuous_usage_stats", "true"),
        ("file", File("audio_input", "audio/wav")),
    ),
)
BAZARR = Recorded(
    "Bazarr",
    "commit 1029a81",
    "/asr",
    (("audio_file", File("audio_file")),),
    query={"task": "transcribe", "language": "en", "output": "srt", "encode": "false"},
)
BAZARR_DETECTS = Recorded(
    "Bazarr",
    "commit 1029a81",
    "/detect-language",
    (("audio_file", File("audio_file")),),
    query={"encode": "false"},
)
ALL = (
    OPEN_WEBUI_FORM,
    OPEN_WEBUI_FORM_AGAIN,
    OPEN_WEBUI_JSON,
    LIBRECHAT,
    N8N,
    NEXTCLOUD,
    NEXTCLOUD_SUBTITLES,
    VLLM_BENCH,
    GUIDELLM,
    BAZARR,
    BAZARR_DETECTS,
)
