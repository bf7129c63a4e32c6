"""`splitscribe transcribe` as the command line lists it.

Its flags are declared when it is chosen: the table of the API's fields, from which they come, takes
longer to import than all the rest of `splitscribe --help`.
"""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand


class TranscribeCommand(TyperCommand):
    """Stands for the command that `cluster.cli.transcribe.command` makes."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any
    ) -> Any:
        from cluster.cli.transcribe.command import whisper_command

        return whisper_command(self.help).make_context(info_name, args, parent, **extra)


def transcribe() -> None:
    """Transcribe files, in this process or through a running server.

    The flags are openai/whisper's, with dashes or underscores; "--word-timestamps" and
    "--word_timestamps True" are the same.

    \b
    splitscribe transcribe talk.mp3 -f srt
    splitscribe transcribe *.wav --model large-v3 --language de -o texts
    splitscribe transcribe long.m4a --decoding sequential --beam-size 5
    splitscribe transcribe recordings/ https://example.org/talk.mp3
    ffmpeg -i a.mp4 -f s16le -ac 1 -ar 16000 - | splitscribe transcribe --raw -
    splitscribe transcribe talk.mp3 --server http://127.0.0.1:8000
    splitscribe transcribe --live --language en
    """
