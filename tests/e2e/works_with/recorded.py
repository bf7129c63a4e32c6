"""What programs send that cannot be installed here, read from the source of the version named."""

from __future__ import annotations

import base64
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Recorded:
    """fields: of the form, in order, as `name=text`; the text `@` is the audio, named as in `file`.

    document: JSON in place of a form.
    """

    program: str
    version: str
    path: str
    fields: str = ""
    file: tuple[str, str | None] = ("", None)
    document: dict[str, Any] | None = None
    query: dict[str, str] = field(default_factory=dict)

    def arguments(self, audio: bytes) -> dict[str, Any]:
        if self.document is not None:
            encoded = base64.b64encode(audio).decode()
            sound = {**self.document["input_audio"], "data": encoded}
            return {"json": {**self.document, "input_audio": sound}}
        (file_name, file_type), pairs = self.file, (one.split("=") for one in self.fields.split())
        files = [
            (name, (file_name, audio, file_type) if text == "@" else (None, text))
            for name, text in pairs
        ]
        return {"files": files, "params": self.query}


TRANSCRIPTIONS = "/v1/audio/transcriptions"
TRANSLATIONS = "/v1/audio/translations"
OPEN_WEBUI = ("Open WebUI", "0.12.4", TRANSCRIPTIONS)
NEXTCLOUD_VERSION = ("Nextcloud", "integration_openai 5.0.0")
BAZARR_VERSION = ("Bazarr", "commit 1029a81")
AUDIO_FILE = ("audio_file=@", ("audio_file", None))

OPEN_WEBUI_FORM = Recorded(*OPEN_WEBUI, "model=whisper-1 language=en file=@", ("8c4.webm", None))
OPEN_WEBUI_FORM_AGAIN = Recorded(  # what it sends when the first try fails
    *OPEN_WEBUI, "model=whisper-1 file=@", ("8c4.webm", None)
)
OPEN_WEBUI_JSON = Recorded(
    *OPEN_WEBUI,
    document={"model": "whisper-1", "language": "en", "input_audio": {"format": "wav"}},
)
LIBRECHAT = Recorded(
    *("LibreChat", "commit 00b3bc3", TRANSCRIPTIONS),
    *("file=@ model=whisper-1 language=en", ("audio.wav", "audio/wav")),
)
N8N = Recorded(
    *("n8n", "commit 536d907", TRANSCRIPTIONS),
    *("model=whisper-1 language=en temperature=0.1 file=@", ("talk.wav", "audio/wav")),
)
NEXTCLOUD = Recorded(
    *(*NEXTCLOUD_VERSION, TRANSCRIPTIONS),
    *("model=whisper-1 file=@ response_format=verbose_json language=en", ("file.mp3", None)),
)
NEXTCLOUD_SUBTITLES = Recorded(
    *(*NEXTCLOUD_VERSION, TRANSLATIONS),
    *("model=whisper-1 file=@ response_format=srt language=en", ("file.mp3", None)),
)
VLLM_BENCH = Recorded(
    *("vllm bench serve", "commit 02cfb53", TRANSCRIPTIONS),
    "file=@ model=whisper-1 max_completion_tokens=64 stream=True language=en "
    "stream_include_usage=True stream_continuous_usage_stats=True",
    ("audio.wav", "audio/wav"),
)
GUIDELLM = Recorded(
    *("guidellm", "0.8.1", TRANSCRIPTIONS),
    "model=whisper-1 stream=true stream_include_usage=true stream_continuous_usage_stats=true "
    "file=@",
    ("audio_input", "audio/wav"),
)
BAZARR = Recorded(
    *(*BAZARR_VERSION, "/asr", *AUDIO_FILE),
    query={"task": "transcribe", "language": "en", "output": "srt", "encode": "false"},
)
BAZARR_DETECTS = Recorded(
    *(*BAZARR_VERSION, "/detect-language", *AUDIO_FILE), query={"encode": "false"}
)
ALL = tuple(one for one in globals().values() if isinstance(one, Recorded))
