"""`splitscribe transcribe` and `batch` as the command line lists them.

Their flags are declared when one of them is chosen: the table of the API's fields, from which they
come, takes longer to import than all the rest of `splitscribe --help`.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from typer.core import TyperCommand


class DeferredCommand(TyperCommand):
    """Stands for the command that `command` in the folder of its name makes."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any
    ) -> Any:
        command = import_module(f"cluster.cli.{self.name}.command").make_command(self.help)
        return command.make_context(info_name, args, parent, **extra)


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


def batch() -> None:
    """Transcribe an archive: files, folders, buckets and manifests.

    It uses the application of the Ray cluster on this machine or at --address, after all more
    urgent requests there. Without an application it starts one for this run. A second run
    transcribes only what is missing. The exit status is 0 if all files have their transcripts,
    and 3 if some failed.

    Example: splitscribe batch s3://talks/2026 -o s3://texts/2026 -f srt
    """
